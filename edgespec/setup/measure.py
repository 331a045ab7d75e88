"""Measures a profile: passes of several widths after a short and a long text, draft steps, both models at once.

Some 6 seconds for a model of 1.5 billion parameters and its drafter on two cores. What is compared runs in
alternation, so that a machine busy for a moment is busy for all, and the fastest run counts. Passes after a long
text are measured of decoders that can pretend to have read one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import log
from statistics import fmean, median
from threading import Event
from time import perf_counter

import numpy as np

from edgespec.decoding.decoder import Decoder
from edgespec.draft.costs import PassCosts, PassTimes, pass_costs, run_width
from edgespec.draft.pass_estimate import UNMEASURED
from edgespec.setup.profile import LEAST_SPAN, DrafterProfile, Profile
from edgespec.system.context_managers import contextmanager
from edgespec.types import TokenIds, append

# Passes of widths between these lie within 6 % of the line through their neighbours (docs/log/draft-policy.md).
_WIDTHS = (1, 2, 4, 8, 16, 32)
_WIDTHS_FAR = (1, 2, 4, 16, 32)
_BRANCHES = (1, 2, 4, 8)
_READ_A_DRAFT, _TOKENS_A_DRAFT = 32, 2
_WIDTH_OUT = 8  # width of the passes that show how long a row takes on its way out
_NEAR = 128  # tokens that are held
LONGEST = 4096  # tokens of a long text with the pass after it
_READ = (64, 16)  # tokens of a prompt; fewer where they would take longer than this
_READING_S = 1.0
_ROUNDS = (2, 4)  # at least, of narrow passes after the shortest text, and at most
_PASSES_S, _BRANCHES_S = 2.2, 0.25
_REPEATS, _REPEATS_S = 8, 0.8  # of narrow passes after a short text
_SPREADS = (0.08, UNMEASURED)  # the least and the most that ratios count as unsure
_NARROW = 8  # wider passes than this are left out where they do not fit into these
_WIDTH_TOGETHER = 3  # width of the passes that run beside a drafter
_ROUNDS_TOGETHER = (2, 3)
_RUNS_TOGETHER = (2, 8)  # passes, and steps, of each round: at least, and enough
_TOGETHER_S, _ALL_TOGETHER_S = 0.12, 1.0  # for a part of a round, and for all rounds, after the first ones

_Run = Callable[[int], float]  # the number of the run → its seconds


def profile_target(decoder: Decoder, longest: int = LONGEST) -> Profile:
    """Measure reading, and passes after texts, of which the longest has longest tokens with the pass."""
    near, far = _text_lengths(decoder, longest)
    padded = decoder.can.widths
    with _hold_text(decoder, far or near) as text:
        widths: dict[int, Sequence[int]] = {near: _WIDTHS, far: _WIDTHS_FAR} if far else {near: _WIDTHS}
        alike = {run_width(width, padded): width for width in reversed(_WIDTHS)}  # once for each pass that differs
        widths = {held: [width for width in each if width in alike.values()] for held, each in widths.items()}
        passes_s = _measure_passes(decoder, text, widths, _PASSES_S)
        spread = _repeat_narrow_passes(decoder, text[:near], passes_s[near])
        out = max(width for width in passes_s[near] if width <= _WIDTH_OUT)
        one_row_s = min(_time_pass(decoder, text[:near], out, _ROUNDS[1] + i, 1) for i in range(_ROUNDS[0]))
    transfer_s = max(0.0, passes_s[near][out] - one_row_s) / max(1, out - 1)
    most, few = _READ
    num_read = few if most * passes_s[near][out] / out > _READING_S else most
    prefill_s = _time_reading(decoder, _text(min(num_read, decoder.context_length), decoder, 1))
    return Profile(passes_s=passes_s, prefill_s=prefill_s, transfer_s=transfer_s, spread=spread, widths=padded)


def _repeat_narrow_passes(decoder: Decoder, text: TokenIds, known_s: dict[int, float]) -> float:
    """Run narrow passes again in turn, and keep the fastest in known_s; returns how unsure their ratios are.

    Most passes of an answer are narrow, and in a busy second the fastest of two says little.
    """
    widths = [width for width in known_s if width <= _NARROW]
    taken_s: dict[int, list[float]] = {width: [known_s[width]] for width in widths}
    ends = perf_counter() + _REPEATS_S
    for i in range(_REPEATS):
        if i and perf_counter() > ends:
            break
        for width in widths:
            if decoder.cache:
                decoder.cache.pretend(text)
            taken_s[width].append(_time_pass(decoder, text, width, _ROUNDS[1] + i))
    known_s.update({width: min(all_s) for width, all_s in taken_s.items()})
    # What the middle one takes longer is what other programs took.
    noise = fmean(log(median(all_s) / min(all_s)) for all_s in taken_s.values())
    low, high = _SPREADS
    return min(max(noise, low), high)


def _text_lengths(decoder: Decoder, longest: int) -> tuple[int, int]:
    """Tokens of a short text, and of a long one, 0 where none can be measured."""
    near = min(_NEAR, decoder.context_length // 2)
    far = min(longest, decoder.context_length) - _WIDTHS_FAR[-1]
    return near, far if decoder.cache and far - near >= LEAST_SPAN else 0


@contextmanager
def _hold_text(decoder: Decoder, num_tokens: int | None = None) -> Iterator[TokenIds]:
    """Have the decoder hold a text meanwhile, a short one by default; it reads it only if it cannot pretend to."""
    text = _text(_text_lengths(decoder, 0)[0] if num_tokens is None else num_tokens, decoder, 0)
    cache = decoder.cache
    if cache is None:
        _time_pass(decoder, text, 1, -1)
        yield text
        return
    cache.pretend(text)
    try:
        yield text
    finally:
        cache.forget()


def complete_profile(
    known: Profile | None,
    target: Decoder,
    drafters: Mapping[str, Decoder],
    report: Callable[[str], None] = lambda line: None,
    name: str = "the target",
    longest: int = LONGEST,
) -> Profile:
    """Measure what a profile lacks of a target and its drafters."""
    if known is None:
        report(f"measuring how long passes take: {name}")
        known = profile_target(target, longest)
    known = replace(known, widths=target.can.widths)  # one that was stored may not say it
    for each, drafter in drafters.items():
        if each not in known.drafters:
            report(f"measuring how long drafts take: {each}")
            found = profile_drafter(drafter, target, known)
            known = replace(known, drafters={**known.drafters, each: found})
    return known


def profile_drafter(drafter: Decoder, target: Decoder, profile: Profile) -> DrafterProfile:
    """Measure what a drafter takes beside a target; raises what their passes raise."""
    # Over steps of the target that run alternately: the machine's speed may have changed since its profile.
    step, row = _measure_drafts(drafter, target)
    with _hold_text(drafter) as text:
        branches_s = _measure_passes(drafter, text, {len(text): _BRANCHES}, _BRANCHES_S)[len(text)]
    return DrafterProfile(
        step_s=max(step * profile.pass_s(1, 0), 1e-9),
        row_s=row * profile.pass_s(1, 0),
        branches={width: max(1.0, taken / branches_s[1]) for width, taken in branches_s.items()},
        slowed=measure_contention(drafter, target),
    )


def _measure_drafts(drafter: Decoder, target: Decoder) -> tuple[float, float]:
    """Time for a drafted token, and for one that is read, in steps of the target.

    Drafted in another thread and alternately with the target, as in use: a thread that is woken and has lost its
    caches is slower. Qwen2.5-Coder-1.5B and SmolLM2 on two cores: 8.7 ms where steps by themselves are 6.5.
    """
    num_read = min(_READ_A_DRAFT, drafter.context_length - _TOKENS_A_DRAFT)
    steps_s, drafts_s, reads_s = [], [], []
    with _hold_text(target) as held, ThreadPoolExecutor(1, "drafter") as lane:
        for i in range(_ROUNDS[1]):
            text = _text(max(0, num_read), drafter, i + 1)  # another one each time, of which nothing is held
            reads_s.append(lane.submit(_time_reading, drafter, text).result())
            steps_s.append(_time_pass(target, held, 1, i))
            started = perf_counter()
            num_drafted = lane.submit(_draft, drafter, text, i).result()
            drafts_s.append((perf_counter() - started) / num_drafted)
    step_s, draft_s = median(steps_s), median(drafts_s)
    read_s = min(reads_s) * max(1, num_read)
    return draft_s / step_s, max(0.0, read_s - draft_s) / max(1, num_read - 1) / step_s


def _draft(drafter: Decoder, text: TokenIds, i: int) -> int:
    """Run some tokens one by one; returns how many the context had room for."""
    num_tokens = max(1, min(_TOKENS_A_DRAFT, drafter.context_length - len(text)))
    for _ in range(num_tokens):
        text = append(text, [(len(text) + i + 1) % drafter.vocab_size])[: drafter.context_length]
        if (num_block := drafter.can.tokens_per_pass) > 1:  # the time of a whole block
            drafter.begin(text, num_block)
        drafter.logits(text, 1)
    return num_tokens


def measure_contention(drafter: Decoder, target: Decoder) -> tuple[float, float]:
    """Factors on a pass of the target and on a step of the drafter while both run, in two threads."""
    factors: list[tuple[float, float]] = []
    with _hold_text(target) as text, _hold_text(drafter) as its_text:
        verify, draft = _pass_timer(target, text, _WIDTH_TOGETHER), _pass_timer(drafter, its_text, 1)
        least, most = _ROUNDS_TOGETHER
        started = perf_counter()
        while len(factors) < least or (len(factors) < most and perf_counter() - started < _ALL_TOGETHER_S):
            verify_alone_s, draft_alone_s = _mean_s(verify), _mean_s(draft)
            verify_s, draft_s = _together_s(verify, draft)
            factors.append((max(1.0, verify_s / verify_alone_s), max(1.0, draft_s / draft_alone_s)))
    return median(factor for factor, _ in factors), median(factor for _, factor in factors)


def _mean_s(run: _Run) -> float:
    taken, started = [run(0)], perf_counter()
    while not _is_enough(len(taken), started):
        taken.append(run(len(taken)))
    return fmean(taken)


def _is_enough(num_runs: int, started: float) -> bool:
    least, most = _RUNS_TOGETHER
    return num_runs >= most or (num_runs >= least and perf_counter() - started > _TOGETHER_S)


def _together_s(verify: _Run, draft: _Run) -> tuple[float, float]:
    """Seconds of a pass and of a step, each while the other runs all the time."""
    stop = Event()
    passes_s: list[float] = []
    steps_s: list[float] = []

    def run_steps() -> None:
        while not stop.is_set():
            steps_s.append(draft(len(steps_s)))

    with ThreadPoolExecutor(1, "drafter") as lane:
        stepping = lane.submit(run_steps)
        started = perf_counter()
        try:
            while not stepping.done() and not _is_enough(min(len(passes_s), len(steps_s)), started):
                passes_s.append(verify(len(passes_s)))
        finally:
            stop.set()
        stepping.result()  # raises what the drafter raised
    # The last step may have run alone.
    return fmean(passes_s), fmean(steps_s[:-1] or steps_s)


def _pass_timer(decoder: Decoder, text: TokenIds, width: int) -> _Run:
    width = min(width, decoder.context_length - len(text))
    return lambda i: _time_pass(decoder, text, width, i)


def _measure_passes(
    decoder: Decoder, text: TokenIds, widths: Mapping[int, Sequence[int]], limit_s: float
) -> dict[int, dict[int, float]]:
    """The fastest pass of each width, by the tokens of text before it as in widths, which has the least first."""
    taken_s: dict[int, dict[int, float]] = {num_held: {} for num_held in widths}
    ends = perf_counter() + limit_s
    for i in range(_ROUNDS[1]):
        for num_held, known_s in taken_s.items():
            is_wanted = i == 0 or (i < _ROUNDS[0] and num_held == min(widths))
            if decoder.cache:
                decoder.cache.pretend(text)
            for width in widths[num_held]:
                is_due = is_wanted and width <= _NARROW
                if num_held + width > decoder.context_length or not (is_due or _is_in_time(width, known_s, ends)):
                    break
                taken = _time_pass(decoder, text[:num_held], width, i)
                known_s[width] = min(known_s.get(width, np.inf), taken)
    return taken_s


def _is_in_time(width: int, known_s: PassTimes, ends: float) -> bool:
    """True if a pass of this width ends in time, as far as narrower ones tell."""
    widest = max(each for each in known_s if each <= width)
    return perf_counter() + known_s[widest] * width / widest <= ends


def _time_pass(decoder: Decoder, past: TokenIds, width: int, i: int, num_rows: int | None = None) -> float:
    # Another token after the same past each time, so that nothing but the past is held.
    new = (np.arange(width, dtype=np.int32) + len(past) + i + 1) % decoder.vocab_size
    return _time_logits(decoder, append(past, new), num_rows or width)


def _time_reading(decoder: Decoder, text: TokenIds) -> float:
    """Seconds for each token of a text of which nothing is held."""
    return _time_logits(decoder, text, 1) / len(text) if len(text) else _time_pass(decoder, text, 1, 0)


def _time_logits(decoder: Decoder, tokens: TokenIds, num_last: int) -> float:
    started = perf_counter()
    decoder.logits(tokens, num_last)
    return max(perf_counter() - started, 1e-9)


def _text(num_tokens: int, decoder: Decoder, first: int) -> TokenIds:
    """Texts with another first token have nothing in common that a cache could hold."""
    return (np.arange(num_tokens, dtype=np.int32) + first) % decoder.vocab_size


def measure_passes(decoder: Decoder) -> PassCosts:
    """Run passes of several widths after a short text, alternately; the fastest of each counts."""
    with _hold_text(decoder) as text:
        return pass_costs(_measure_passes(decoder, text, {len(text): _WIDTHS}, _PASSES_S)[len(text)])
