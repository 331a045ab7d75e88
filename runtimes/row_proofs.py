"""Rows that have the same bits however a text is cut into passes: the rule of passes, and its proof on a machine.

Two kernels of ONNX Runtime's CPU provider decide (MLAS, measured in docs/log/exactness.md):

- A product with weights, and one of attention's, gives a single row to another kernel. So passes are of even
  width.
- Attention multiplies queries and keys in sums of up to 128 channels, or of more where it sees few positions: 256
  up to 64 positions, 512 up to 32, 1,024 up to 16. So heads of more than 128 channels have positions that no pass
  crosses. Flash attention counts these positions anew in each tile of the cache, whose length follows from the
  size of the L2 cache. Without flash attention they are counted once, from the start of the text.

For the proof a text of random tokens is run in several cuts: as a prompt, as plain decoding does, and in passes as
drafts make them, some of them refused. Each row must have the same bits in all cuts. On the CPU long texts are not
run: the cache is filled with keys and values like those of a short one, so that attention over thousands of
positions is compared within a few passes. A GPU that pads its passes reads them. What was found is stored beside
the model, for each device and set of kernels.
"""

import hashlib
import os
import platform
import sys
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np

from edgespec.decoding.decoder import CHAINS, Can, Decoder, Pass
from edgespec.manifest import Manifest
from edgespec.runtimes.devices import Device, device_key, import_onnxruntime
from edgespec.runtimes.pass_shapes import PaddedPass
from edgespec.system.system_info import cpuinfo_line, physical_cores, processor_name
from edgespec.system.typed_json import RecordFile
from edgespec.types import Logits, Report, TokenIds

_LEVEL2_CACHE_SIZE = 191  # _SC_LEVEL2_CACHE_SIZE in glibc's bits/confname.h, which os.sysconf_names lacks
# Up to so many positions a sum has the second number of channels; with more positions half of them.
_SUMS = ((16, 1024), (32, 512), (64, 256))


class RowRule(NamedTuple):
    """The borders that keep rows equal to the bit, with passes of even width."""

    has_flash_attention: bool
    borders: tuple[int, ...]  # positions that no pass crosses, even and rising


NO_RULE = RowRule(has_flash_attention=True, borders=())


def row_rule(head_dims: Collection[int], l2_bytes: int | None) -> RowRule:
    """The rule for a model with heads of these sizes.

    Flash attention stays where it needs no borders. It shares out rows in blocks of min(tile, 2 · head_dim), so
    that an even number of rows leaves a single one behind where that block is odd. Where the size of the L2 cache
    is unknown, so is the tile.
    """
    borders = tuple(positions for positions, channels in _SUMS if 2 * max(head_dims) > channels)
    tiles = [((l2_bytes or 0) // (32 * size), 2 * size) for size in head_dims]
    is_even = all(tile > 0 and min(tile, rows) % 2 == 0 for tile, rows in tiles)
    return RowRule(has_flash_attention=is_even and not borders, borders=borders)


def read_l2_bytes() -> int | None:
    """The size of a core's L2 cache as ONNX Runtime reads it; None where the system's C library does not say."""
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return None
    with suppress(ValueError, OSError):
        return max(0, os.sysconf(_LEVEL2_CACHE_SIZE)) or None
    return None


def next_pass(start: int, stop: int, borders: tuple[int, ...], context_length: int) -> PaddedPass:
    """The first pass of even width over positions from start, up to stop at most.

    An odd one gets one more token, whose entry in the cache the next pass overwrites. Where a border or the end of
    the context leaves no room for it, the position before is run again, which gives it the entry that it has.
    """
    begin = max((border for border in borders if border <= start), default=0)
    end = min([context_length, *(border for border in borders if border > start)])
    stop = min(stop, end)
    if (stop - start) % 2 == 0:
        return PaddedPass(start, stop)
    if stop < end:
        return PaddedPass(start, stop, 1)
    if start > begin:
        return PaddedPass(start - 1, stop)
    # The last position alone, or all but it: a later pass runs it with the one before.
    return PaddedPass(start, max(start + 1, stop - 1))


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


FILE_NAME = "row_proofs.json"
_VERSION = 1  # raised when passes or their proof change


def proof_key(manifest: Manifest, device: Device, num_threads: int | None, can: Can = CHAINS) -> str:
    """The key of a proof: what kernels are chosen by, and the context where it ends before all that is compared.

    can: Of the open model, with the widths that its passes are padded to, if they are to one.
    """
    context_length = manifest.context_length
    parts = [
        f"version {_VERSION}",
        _kernels_key(manifest, device, num_threads),
        *([f"passes of {can.widths[0]} tokens, prompts {can.read_width}"] if len(can.widths) == 1 else []),
        *([f"context of {context_length} tokens"] if context_length < _longest(manifest) else []),
    ]
    return ", ".join(parts)


def _kernels_key(manifest: Manifest, device: Device, num_threads: int | None) -> str:
    """The graph, the device, ONNX Runtime, and what its kernels are chosen by."""
    graph, listed = manifest.files.get(manifest.graph), cpuinfo_line("flags", "Features")
    parts = [
        f"{manifest.graph} {graph.sha256[:16] if graph else manifest.precision}",
        f"{device.provider} {device_key(device)}",
        f"onnxruntime {import_onnxruntime().__version__}",
        f"{processor_name()} {platform.machine()} " + (f"{zlib.crc32(listed.encode()):08x}" if listed else ""),
        f"L2 {read_l2_bytes()}",
        f"{device.host_threads or num_threads or physical_cores()} threads of {os.cpu_count()}",
    ]
    return ", ".join(parts)


def prefix_key(
    manifest: Manifest, device: Device, num_threads: int | None = None, *, deterministic: bool = False
) -> str | None:
    """Equal for sessions that make the same keys and values of a text; None where nothing tells the weights."""
    if not manifest.files:
        return None
    files = sorted((name, record.sha256) for name, record in manifest.files.items())
    model = hashlib.sha256(repr(files).encode()).hexdigest()
    mode = "deterministic" if deterministic else "fastest"
    return f"{model[:32]}, {mode}, version {_VERSION}, {_kernels_key(manifest, device, num_threads)}, by token"


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
    return RecordFile(folder / FILE_NAME, dict[str, RowProof], "proofs", version=_VERSION, most=64)
