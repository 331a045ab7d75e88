"""True if one text comes out of a target on a device whatever drafts: proved once, and kept in its folder.

Deterministic mode rests on rows of logits that do not depend on how a text is cut into passes. Which kernels keep
that is a matter of the device, the version of ONNX Runtime, the processor and the model.

For the proof a text of random tokens is run in several cuts: as a prompt, as plain decoding does, and in passes as
drafts make them, some of them refused. Each row must have the same bits in all cuts. On the CPU long texts are not
run: the cache is filled with keys and values like those of a short one, so that attention over thousands of
positions is compared within a few passes. A GPU that pads its passes reads them. What was found is stored beside
the model, for each device and set of kernels.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np

from edgespec.decoding.decoder import CHAINS, Can, Decoder, Pass
from edgespec.errors import DeviceUnavailable, MemoryExhausted
from edgespec.manifest import Manifest
from edgespec.runtimes.device_checks import DeviceCheck, DeviceChecks
from edgespec.runtimes.devices import Device, kernels_key
from edgespec.runtimes.pass_shapes import RULE_VERSION
from edgespec.setup.device_choice import Placement
from edgespec.setup.open_model import ModelFolder
from edgespec.system.console import show_progress
from edgespec.system.system_info import read_l2_bytes
from edgespec.system.typed_json import RecordFile
from edgespec.types import Logits, Report, TokenIds

FILE_NAME = "row_proofs.json"
_QUIET_S = 2.0  # a check that took longer is reported
# A pass without a draft may take so many times as long as without the mode. By what passes took on NVIDIA's cards
# drafts from the text gain a little more than that in every kind of text (docs/log/devices.md).
MOST_COST = 1.1
_CHECKING = "checking whether drafts change the text on this machine"

LIMIT_S = 1.0
_STRETCH = 20  # positions that are compared at a time
_GPU_TIMES = 4  # a prompt that is compared on a GPU, of which a pass reads more, is so many times as long
_NUM_RUN = 48  # tokens whose keys and values stand for those of a longer text
# Tokens of prompts: more than kernels take at a time, and, where there is time, more than a prompt's chunk.
_SHORT_PROMPT, _PROMPT = 136, 280
_WIDEST = 16  # tokens of a pass that verifies a draft
_POWERS = (64, 128, 256, 512, 1024, 2048, 4096)  # positions at which kernels change
_NUM_CUTS = 2
_NUM_ALONE = 4  # passes of one token in a row, as plain decoding runs them, on both sides of a border
_NUM_ALWAYS = 3  # stretches that are compared however long it takes


class RowsDiffer(Exception):
    """A target is to be opened without deterministic mode: rows depend on the cut of a text, or it costs much."""


@dataclass(frozen=True, kw_only=True)
class RowProof:
    """The result of comparing rows in all cuts that were tried; reason says what was compared, or what differs.

    num_rows, num_different: Rows that were compared with the same ones of another cut, and those that differ.
    max_difference: The largest difference of a logit.
    longest_past: The most positions before a row that was compared.
    """

    holds: bool
    reason: str
    num_rows: int
    num_different: int
    max_difference: float
    longest_past: int
    seconds: float


def settle_mode(target: ModelFolder, placement: Placement, asked: bool | None = None) -> Placement:
    """The placement with the mode in which a target is opened there.

    It is deterministic as asked, or unless it is known not to hold or to cost much there. A model in the
    static form would read its prompts token by token, and an emulator takes a minute for the proof, so that these
    have the mode only if asked. A vector of a text is read in one way alone.
    """
    proof, manifest = _known_proof(target, placement), target.manifest
    never = manifest.kv_cache.form == "static" or placement.device.is_software or manifest.pooling is not None
    usual = not never and (proof is None or proof.holds) and _cost(target, placement) <= MOST_COST
    return replace(placement, deterministic=usual if asked is None else asked)


def _known_proof(target: ModelFolder, placement: Placement, can: Can | None = None) -> RowProof | None:
    """The proof of a target from an earlier session; None without one, or where the width of passes is unknown.

    can: Of the target, once it is open.
    """
    if can is None and placement.device.memory != "cpu":
        if (check := _check_of(target, placement)) is None:
            return None
        can = shapes.can() if (shapes := check.shapes[True]) else None
    key = proof_key(target.manifest, placement.device, placement.num_threads, can or CHAINS)
    return proofs_of(target.folder).read().get(key)


def _check_of(target: ModelFolder, placement: Placement) -> DeviceCheck | None:
    return DeviceChecks(target.folder, target.manifest, placement.device).read()


def _cost(target: ModelFolder, placement: Placement) -> float:
    """How many times as long a pass over one token takes in deterministic mode, as far as an opened model told."""
    check = None if placement.device.memory == "cpu" else _check_of(target, placement)
    return check.same_cost if check else 1.0


def settle_rows(
    target: ModelFolder, decoder: Decoder, placement: Placement, asked: bool | None, report: Report
) -> None:
    """Prove what an open target of a placement promises, unless that is known.

    A line tells where deterministic mode is not the default.

    Raises:
        DeviceUnavailable: A user asks for it where it does not hold.
        MemoryExhausted: A user asks for it, and there is no memory to prove it.
        RowsDiffer: It does not hold, costs much, or there is no memory to prove it, and nobody asks for it.
    """
    cost = _cost(target, placement)
    if placement.deterministic:
        if asked is None and cost > MOST_COST:
            raise RowsDiffer
        try:
            proof = _known_proof(target, placement, decoder.can) or _prove(target, decoder, placement, report)
        except MemoryExhausted:
            if asked is None:
                raise RowsDiffer from None
            raise
        if not proof.holds:
            raise RowsDiffer if asked is None else _refusal(target, placement, proof)
    elif asked is None and not placement.exact and not target.manifest.pooling:
        known = _known_proof(target, placement)
        because = f" ({known.reason})" if known and not known.num_rows else ""
        if cost > MOST_COST:
            because = (
                f" (--deterministic rules that out; passes without a draft then take {cost:.2f} times as long)"
            )
        report(
            f"on '{placement.device.name}' the text of {target.manifest.name} can differ from that of plain "
            f"decoding where two tokens are nearly tied{because}; --exact rules that out for greedy text, at a "
            "cost in speed"
        )


def _prove(target: ModelFolder, decoder: Decoder, placement: Placement, report: Report) -> RowProof:
    """Prove whether deterministic mode holds for an open target, and store what was found in its folder."""
    try:
        proof = prove_rows(decoder, target.manifest, on_step=partial(show_progress, _CHECKING))
    finally:
        show_progress("")
    if target.manifest.is_ours:
        key = proof_key(target.manifest, placement.device, placement.num_threads, decoder.can)
        write_row_proof(target.folder, key, proof, report)
    if proof.seconds > _QUIET_S:
        verdict = "do not change" if proof.holds else "can change"
        report(
            f"drafts {verdict} the text of {target.manifest.name} on '{placement.device.name}' "
            f"(checked in {proof.seconds:.0f} s)"
        )
    return proof


def _refusal(target: ModelFolder, placement: Placement, proof: RowProof) -> DeviceUnavailable:
    """The error for a user who asks for deterministic mode where it does not hold."""
    name, model = placement.device.name, target.manifest.name
    elsewhere = "" if name == "cpu" else ", or run it with --device cpu"
    return DeviceUnavailable(
        f"--deterministic does not hold for {model} on '{name}': {proof.reason}. Leave it out; --exact gives the "
        f"greedy text of plain decoding there{elsewhere}",
        device=name,
    )


@dataclass(frozen=True)
class _Found:
    num_rows: int = 0
    num_different: int = 0
    max_difference: float = 0.0
    longest_past: int = 0
    first: str = ""  # where rows differ first

    def add(self, rows: Logits, expected: Logits, start: int, cut: str) -> "_Found":
        """Adds rows from a position on, compared with those of another cut."""
        differing = (rows != expected).any(1)  # also where a logit is no number
        first = self.first
        if differing.any() and not first:
            first = f"position {start + int(differing.argmax())} in {cut}"
        difference = float(np.abs(rows[differing] - expected[differing]).max(initial=0.0))
        return replace(
            self,
            num_rows=self.num_rows + len(rows),
            num_different=self.num_different + int(differing.sum()),
            max_difference=max(self.max_difference, difference),
            longest_past=max(self.longest_past, start + len(rows) - 1),
            first=first,
        )


def prove_rows(
    decoder: Decoder,
    manifest: Manifest,
    *,
    limit_s: float = LIMIT_S,
    on_step: Callable[[float], None] = lambda share: None,
) -> RowProof:
    """Compare the rows of an open decoder, in deterministic mode or not, in several cuts of texts.

    The decoder forgets what it holds. The comparison ends about limit_s after its start, but not before some
    hundred rows were compared. on_step takes the share that is done.

    Raises MemoryExhausted: The cache or the workspace does not fit.
    """
    start_s = perf_counter()
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, decoder.vocab_size, min(decoder.context_length, _longest(manifest)), np.int32)
    found = _Found()
    starts = _starts(manifest, len(tokens))
    for number, start in enumerate(starts):
        if number >= _NUM_ALWAYS and perf_counter() - start_s > limit_s:
            break
        on_step(max(number / len(starts), min(1.0, (perf_counter() - start_s) / max(limit_s, 1e-9))))
        if not _hold(decoder, tokens[:start]):
            continue
        found = _compare_stretch(decoder, tokens[: start + _STRETCH], start, found, rng)
        if number in (0, _NUM_ALWAYS):
            times = _GPU_TIMES if decoder.can.read_width else 1
            found = _compare_prompts(decoder, tokens[: times * (_PROMPT if number else _SHORT_PROMPT)], found, rng)
    _forget(decoder)
    return _as_proof(found, len(tokens), perf_counter() - start_s)


def _as_proof(found: _Found, num_tokens: int, seconds: float) -> RowProof:
    if not found.num_rows:
        reason = f"its context of {num_tokens} tokens is too short to compare cuts of a text into passes"
    elif found.num_different:
        reason = (
            f"{found.num_different} of {found.num_rows} rows differ with the cut of the text into passes, by up "
            f"to {found.max_difference:.2g} of a logit; first at {found.first}"
        )
    else:
        reason = (
            f"{found.num_rows} rows after up to {found.longest_past} positions are equal to the bit in all cuts "
            f"of the text into passes of 1 to {_WIDEST} tokens and prompts"
        )
    holds = found.num_different == 0 and found.num_rows > 0
    counts = {name: value for name, value in asdict(found).items() if name != "first"}
    return RowProof(holds=holds, reason=reason, seconds=seconds, **counts)


def _longest(manifest: Manifest) -> int:
    return max(_POWERS[-1], 2 * (manifest.sliding_window or 0)) + 2 * _STRETCH


def _starts(manifest: Manifest, num_tokens: int) -> list[int]:
    """Where stretches begin: even positions shortly before those at which kernels change, the likeliest first."""
    tile = (read_l2_bytes() or 0) // (32 * max(manifest.kv_cache.head_dims))
    window = manifest.sliding_window or 0
    borders = [_POWERS[0], _POWERS[3], tile, window, tile + 64, _POWERS[4], 2 * tile + 64, _POWERS[1], _POWERS[2]]
    borders += [_POWERS[5], 3 * tile, window + 64, _POWERS[6]]
    starts = [0, *((border - _STRETCH // 2) // 2 * 2 for border in borders if border)]
    return [start for start in dict.fromkeys(starts) if 0 <= start <= num_tokens - _STRETCH]


def _hold(decoder: Decoder, tokens: TokenIds) -> bool:
    """Fill the cache with tokens; returns False where that would take a long text."""
    if len(tokens) <= _NUM_RUN:
        _forget(decoder)
        return True
    if decoder.can.read_width:  # the next pass reads them
        return True
    if decoder.cache is None:
        return len(tokens) <= _PROMPT
    decoder.logits(tokens[:_NUM_RUN], 1)
    return decoder.cache.imitate(tokens, _NUM_RUN, len(tokens)) or len(tokens) <= _PROMPT


def _compare_stretch(
    decoder: Decoder, tokens: TokenIds, start: int, found: _Found, rng: np.random.Generator
) -> _Found:
    """Compare rows from a position on, before which all is prompt."""
    expected = _rows(decoder, tokens, len(tokens) - start, start + 1).copy()
    before = (_STRETCH - _NUM_ALONE) // 2 if start else 0
    alone = [before] * bool(before) + [1] * _NUM_ALONE + [len(tokens) - start - before - _NUM_ALONE]
    cuts = [("passes of one token among wider ones", alone)]
    for _ in range(_NUM_CUTS):
        widths = list(_random_widths(len(tokens) - start, rng))
        cuts.append((f"passes of {', '.join(map(str, widths))} tokens", widths))
    for name, widths in cuts:
        at = start
        for width in widths:
            num_refused = int(rng.integers(0, 5)) if 1 < width <= _WIDEST else 0
            refused = rng.integers(0, decoder.vocab_size, num_refused, np.int32)
            fitting = np.concatenate([tokens[: at + width], refused])[: decoder.context_length]
            rows = _rows(decoder, fitting, len(fitting) - at, start + 1)[:width]
            found = found.add(rows, expected[at - start : at - start + width], at, name)
            at += width
    return found


def _compare_prompts(decoder: Decoder, tokens: TokenIds, found: _Found, rng: np.random.Generator) -> _Found:
    """Compare rows behind a prompt that is run at once with those of one that grows, as a conversation does."""
    num_last = min(_WIDEST, len(tokens))
    num_prompt = len(tokens) - num_last + 1
    _forget(decoder)
    expected = _rows(decoder, tokens, num_last, num_prompt).copy()
    _forget(decoder)
    at, widths = 0, []
    while at < num_prompt - 1:
        widths.append(min(int(rng.integers(9, max(90, decoder.can.read_width))), num_prompt - 1 - at))
        at += widths[-1]
        _rows(decoder, tokens[:at], 1, at)
    rows = _rows(decoder, tokens, num_last, num_prompt)
    return found.add(rows, expected, num_prompt - 1, f"a prompt of {', '.join(map(str, widths))} tokens")


def _rows(decoder: Decoder, tokens: TokenIds, num_last: int, num_prompt: int) -> Logits:
    return decoder.run(Pass(tokens, num_last=num_last, num_prompt=num_prompt)).logits


def _random_widths(total: int, rng: np.random.Generator) -> Iterator[int]:
    while total:
        width = min(int(rng.integers(1, _WIDEST + 1)), total)
        yield width
        total -= width


def _forget(decoder: Decoder) -> None:
    if decoder.cache:
        decoder.cache.forget()
    else:
        decoder.logits(np.zeros(1, np.int32), 1)


def proof_key(manifest: Manifest, device: Device, num_threads: int | None, can: Can = CHAINS) -> str:
    """The key of a proof: what kernels are chosen by, and the context where it ends before all that is compared.

    can: Of the open model, with the widths that its passes are padded to, if they are to one.
    """
    context_length = manifest.context_length
    parts = [
        f"version {RULE_VERSION}",
        kernels_key(manifest, device, num_threads),
        *([f"passes of {can.widths[0]} tokens, prompts {can.read_width}"] if len(can.widths) == 1 else []),
        *([f"context of {context_length} tokens"] if context_length < _longest(manifest) else []),
    ]
    return ", ".join(parts)


def write_row_proof(folder: Path, key: str, proof: RowProof, report: Report = lambda line: None) -> None:
    """Store a proof. A damaged file is reported and replaced; one that cannot be written is reported."""
    file = proofs_of(folder)
    try:
        if damage := file.write(key, proof):
            report(f"{file.path} was damaged ({damage}); it was made again")
    except OSError as error:
        report(
            f"{file.path} cannot be written ({error.strerror}): whether the model gives one text in all passes is "
            "found out again the next time"
        )


def proofs_of(folder: Path) -> RecordFile[RowProof]:
    """The proofs of a model folder by proof_key; one that cannot be used is made again."""
    return RecordFile(folder / FILE_NAME, dict[str, RowProof], "proofs", version=RULE_VERSION, most=64)
