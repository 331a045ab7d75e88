"""The gain of a drafter for its target, measured on a few prompts, and a verdict.

Speed is not timed end to end, which would take long runs. Acceptance by position and the time of a round by the
length of its draft are measured; the best length and its gain follow (Leviathan et al., 2023, section 3.3).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, cycle, islice
from math import sqrt
from pathlib import Path
from statistics import median

import numpy as np

from edgespec.config.drafter_names import SELF
from edgespec.decoding.sampling import GumbelSampler, SamplingParams, suppressing
from edgespec.decoding.scheduler import Block, DraftPolicy, Plain, Proposal, speculative_decode
from edgespec.draft.drafter import Drafter
from edgespec.draft.limits import MIN_GAIN_OF_PAIR
from edgespec.draft.measured import FixedLength
from edgespec.draft.option import best_length, expected_tokens
from edgespec.engine.engine import Engine
from edgespec.engine.load import load
from edgespec.errors import DeviceUnavailable, MemoryExhausted, ModelError, UsageError
from edgespec.runtimes.devices import device_key, find_device
from edgespec.setup.head_target import PROMPTS
from edgespec.setup.open_model import ModelFolder, read_chat_template, read_tokenizer
from edgespec.setup.pair import PairCheck, read_pair, record_check
from edgespec.setup.resolve import resolve
from edgespec.setup.wish import Wish
from edgespec.system.command_line import quote
from edgespec.system.context_managers import contextmanager
from edgespec.text.tokenizer import have_same_tokens
from edgespec.types import Report, Sampler, TokenIds

_MAX_TOKENS = 48  # of each answer
_LENGTHS = (4, 1, 3, 2)  # of drafts, in turn: passes of some widths cost no more than narrower ones
_LONGEST = 8
_POOLED = 10.0  # tokens that the rate of all positions counts as at each of them
_USUAL_BREAK_EVEN = 0.55


def check_pair(
    target: str,
    drafter: str | None = None,
    *,
    device: str = "auto",
    drafter_device: str = "auto",
    offline: bool = False,
    report: Report = lambda line: None,
) -> PairCheck:
    """Load both models and measure what drafting gains on the devices.

    Without a drafter the target is a pair folder, which the result is recorded in; a pair.json that is damaged is
    replaced.

    Raises:
        DeviceUnavailable: A device cannot be used, or a model is not in the form for it.
        VocabularyMismatch: The drafter has too few of the target's tokens.
        ModelError: One of them is missing or invalid, or the folder holds no pair, or a pair.json that is too new.
        UsageError: The drafter is no model, or several.
    """
    pair = read_pair(Path(target)) if drafter is None else None
    if drafter is None and pair is None:
        raise ModelError(
            f"{target} is not a pair folder; name a drafter too, or export a pair with edgespec export --drafter"
        )
    if pair and pair.is_later:
        raise ModelError(f"{pair.problem}; use a newer edgespec, or delete that file to measure the pair again")
    if pair and pair.problem:
        report(f"{pair.problem}: it is written again, without earlier measurements")
    drafter = target if drafter is None else drafter
    resolved = resolve(
        Wish(
            model=target,
            drafter=drafter,
            device=device,
            drafter_device=drafter_device,
            offline=offline,
            report=report,
            progress=lambda at: None,  # the command shows its own
        )
    )
    own, placement = resolved.target, resolved.placement
    drafters = [model for chain in resolved.drafters for model in chain.models]
    if len(drafters) != 1:
        num = len(drafters) or "no"
        raise UsageError(f"'{drafter}' names {num} models; a pair is a target and a smaller model, so name one")
    (other,) = drafters
    with load(
        own.folder,
        drafter=SELF if other.folder == own.folder and other != own else str(other.folder),
        device=placement.device.name,
        drafter_device=placement.drafter_device.name,
        report=report,
    ) as engine:
        check = measure_pair(engine, own, other, report)
    if pair is not None:
        devices = device_key(placement.device), device_key(placement.drafter_device)
        record_check(pair.folder, check, devices, (own.folder, other.folder))
    return check


def check_if_here(folder: Path, output: Path, devices: tuple[str, str], report: Report) -> PairCheck | None:
    """Measure a pair on the devices that it was exported for, or report why that is not possible."""
    try:
        for name in devices:
            if (device := find_device(name)).is_software:
                raise DeviceUnavailable(f"'{device.name}' is an emulator, whose speed says nothing of a device")
        report("measuring the pair")
        return check_pair(str(folder), device=devices[0], drafter_device=devices[1], report=report)
    except (DeviceUnavailable, MemoryExhausted) as error:
        when = "where the devices are" if isinstance(error, DeviceUnavailable) else "once more memory is free"
        report(
            f"the speed of this pair was not measured: {error}. To measure it {when}: "
            f"edgespec pair check {quote(output)} --device {devices[0]} --drafter-device {devices[1]}"
        )
        return None


def measure_pair(engine: Engine, target: ModelFolder, drafter: ModelFolder, report: Report) -> PairCheck:
    """Measure an engine with its drafter.

    Raises MemoryExhausted: The drafter was not opened for lack of memory, so that nothing can be measured.
    """
    own, other = target.manifest, drafter.manifest
    names = own.name, other.name
    if own.name == other.name:
        names = f"{own.name} ({own.precision})", f"{other.name} ({other.precision})"
    with engine.speculation.hold():
        if all(each.can.is_free for each in engine.speculation.drafters()):
            raise MemoryExhausted(
                f"{names[1]} cannot be measured: there was no memory to open it beside {names[0]}; close other "
                "programs, raise the memory limit, or use a smaller drafter"
            )
        return _measure(engine, names, target, drafter, report)


def _measure(
    engine: Engine, names: tuple[str, str], target: ModelFolder, drafter: ModelFolder, report: Report
) -> PairCheck:
    greedy, sampled = SamplingParams(), SamplingParams(temperature=1.0, seed=1)
    plain: list[Block] = []
    drafted: dict[SamplingParams, list[Block]] = {greedy: [], sampled: []}
    drafters = engine.speculation.drafters()
    for i, prompt in enumerate(PROMPTS, start=1):
        report(f"prompt {i} of {len(PROMPTS)}")
        tokens = np.array(engine.encode(prompt), np.int32)
        for sampling, blocks in drafted.items():
            blocks += _decode(engine, tokens, InTurn(drafters), sampling, _MAX_TOKENS)
        with without_states(drafters):
            plain += _decode(engine, tokens, Plain(), greedy, _MAX_TOKENS // 2)
    both = [*drafted[greedy], *drafted[sampled]]
    times_s = round_times(plain, both)
    draft_cost = _draft_s(both) / median(block.verify_s for block in plain)
    acceptance, *bounds = _acceptance(drafted[greedy])
    own, other = target.manifest, drafter.manifest
    is_head = other.head is not None  # which follows its target's text, and has no template of its own
    rates = rates_by_position(drafted[greedy])
    gain, num_draft = best_gain(rates, times_s, other.most_draft_tokens)
    moved = ([min(max(0.0, rate + bound - acceptance), 1.0) for rate in rates] for bound in bounds)
    least, most = (best_gain(each, times_s, other.most_draft_tokens)[0] for each in moved)
    verdict, reason = judge(acceptance, (least, gain, most), draft_cost, is_head=is_head)
    if not have_same_tokens(read_tokenizer(*target), read_tokenizer(*drafter)):
        verdict += ", translated between two vocabularies"
    return PairCheck(
        target=names[0],
        drafter=names[1],
        same_special_tokens=(own.bos_token_id, own.eos_token_ids) == (other.bos_token_id, other.eos_token_ids),
        same_chat_template=is_head or read_chat_template(target) == read_chat_template(drafter),
        greedy_acceptance=acceptance,
        sampled_acceptance=_acceptance(drafted[sampled])[0],
        draft_cost=draft_cost,
        expected_gain=gain,
        num_draft=num_draft,
        pays=gain >= MIN_GAIN_OF_PAIR,
        verdict=verdict,
        reason=reason,
    )


@contextmanager
def without_states(drafters: Sequence[Drafter]) -> Iterator[None]:
    """Let passes leave out the states that heads read, as plain decoding does.

    A head that reads all of a text keeps them: it could not draft after a prompt that begins as the last one.
    """
    resting = [each for each in drafters if each.can.max_unread is not None]
    for each in resting:
        each.expect_drafts(False)
    try:
        yield
    finally:
        for each in resting:
            each.expect_drafts(True)


class InTurn(FixedLength):
    """Drafts of several lengths in turn, whose rounds show what each takes.

    A drafter that works ahead has one length, since it would start over with each change.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        super().__init__(drafters, max(_LENGTHS))
        is_ahead = any(each.can.run_ahead for each in drafters)
        self._lengths = cycle([max(_LENGTHS)] if is_ahead else _LENGTHS)

    def propose(self, tokens: TokenIds, max_tokens: int, sampler: Sampler) -> Proposal:
        return super().propose(tokens, min(max_tokens, next(self._lengths)), sampler)


def _decode(
    engine: Engine, tokens: TokenIds, policy: DraftPolicy, sampling: SamplingParams, max_tokens: int
) -> list[Block]:
    """Blocks of an answer without the first, which reads the prompt."""
    sampling = suppressing(sampling, engine.manifest.suppressed_token_ids)
    blocks = speculative_decode(tokens, engine.target, GumbelSampler(sampling, len(tokens)), policy)
    found: list[Block] = []
    num_tokens = 0
    for block in islice(blocks, 1, None):
        found.append(block)
        num_tokens += len(block.tokens)
        if num_tokens >= max_tokens or set(block.tokens.tolist()) & set(engine.manifest.eos_token_ids):
            break
    return found


def round_times(plain: Sequence[Block], drafted: Iterable[Block]) -> dict[int, float]:
    """Seconds of a round by the tokens drafted in it: the pass, the draft, and all else that it takes."""
    of_length: dict[int, list[float]] = {0: [block.draft_s + block.verify_s for block in plain]}
    for block in drafted:
        if block.num_draft:
            of_length.setdefault(block.num_draft, []).append(block.draft_s + block.verify_s)
    return {length: median(of_length[length]) for length in sorted(of_length)}


def _draft_s(blocks: Iterable[Block]) -> float:
    """Seconds of a drafted token, in drafts of several if there were any; 0 where nothing was drafted."""
    drafts = [block for block in blocks if block.num_draft]
    longest = max((block.num_draft for block in drafts), default=0)
    return median(block.draft_s / longest for block in drafts if block.num_draft == longest) if drafts else 0.0


def rates_by_position(blocks: Sequence[Block]) -> list[float]:
    """The chance that a drafted token is accepted if all before it were, by position, [_LONGEST].

    Of the later positions few tokens are seen, and those beyond the drafts are taken for the last one: each leans
    on the rate of all.
    """
    of_all, *_ = _acceptance(blocks)
    rates = []
    for i in range(max(_LENGTHS)):
        judged = sum(block.num_draft > i and block.num_accepted >= i for block in blocks)
        kept = sum(block.num_accepted > i for block in blocks)
        rates.append((kept + _POOLED * of_all) / (judged + _POOLED))
    return rates + rates[-1:] * (_LONGEST - len(rates))


def _acceptance(blocks: Sequence[Block]) -> tuple[float, float, float]:
    """The share accepted of the drafted tokens up to the first rejected one of each draft, and its 95 % interval.

    The interval is that of Agresti and Coull (1998), which holds for shares of 0 and 1 too.
    """
    kept = sum(block.num_accepted for block in blocks)
    judged = sum(min(block.num_accepted + 1, block.num_draft) for block in blocks)
    middle = (kept + 2) / (judged + 4)
    half = 1.96 * sqrt(middle * (1 - middle) / (judged + 4))
    return kept / judged if judged else 0.0, max(0.0, middle - half), min(1.0, middle + half)


def best_gain(
    rates: Sequence[float], times_s: Mapping[int, float], longest: int | None = None
) -> tuple[float, int]:
    """The highest gain over plain decoding, and the draft length that has it.

    Args:
        rates: Chance that a drafted token is accepted if all before it were, by position.
        times_s: Seconds of a round by the tokens drafted in it, 0 among them; others lie on lines between these,
            and beyond them on that from 0 to the last one.
        longest: The most tokens of a draft; None for those that are usual.
    """
    lengths = sorted(times_s)
    # A round that was measured to be cheaper than a shorter one was disturbed, or the shorter one was.
    known = list(accumulate((times_s[length] for length in lengths), max))
    token_s = (known[-1] - known[0]) / max(1, lengths[-1])
    lengths, known = [*lengths, lengths[-1] + _LONGEST], [*known, known[-1] + token_s * _LONGEST]
    totals = expected_tokens(rates[: min(_LONGEST, longest or _LONGEST)])
    return best_length(totals, lambda num_draft: float(np.interp(num_draft, lengths, known)) / known[0])


def judge(
    acceptance: float, gains: tuple[float, float, float], draft_cost: float, *, is_head: bool
) -> tuple[str, str]:
    """The verdict and its reason; gains: the least, the measured and the most by the tokens that were seen."""
    least, gain, most = gains
    kept = f"{acceptance:.0%} of its tokens are accepted"
    cost = f"drafting one costs {draft_cost:.0%} of a step of the target"
    if least >= MIN_GAIN_OF_PAIR:
        return "use this drafter", f"the target is about {gain:.2f} times as fast with it: {kept}, and {cost}"
    if most >= MIN_GAIN_OF_PAIR:
        return "cannot say whether to use this drafter", (
            f"the target is {least:.2f} to {most:.2f} times as fast with it, and the prompts are too few to tell; "
            "edgespec bench measures it on yours"
        )
    if acceptance < _USUAL_BREAK_EVEN:
        kept = f"only {kept}, where 55 % is the usual break-even"
        advice = (
            "a head trained for longer or with prompts like yours (edgespec train), or n-gram drafting"
            if is_head
            else "a drafter trained on the same data or distilled from the target, or n-gram drafting"
        )
    else:
        kept = f"{kept}, but {cost}"
        advice = (
            "a head in fewer bits or with fewer tokens to draft (--vocab-subset), or a larger target"
            if is_head
            else "a smaller drafter, one in fewer bits, a larger target, or a separate device for the drafter"
        )
    return "do not use this drafter", f"{kept}; more likely to pay: {advice}"
