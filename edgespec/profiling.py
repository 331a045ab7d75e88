"""Measures a profile: passes of several widths behind a short and a long text, draft steps, both at once.

All within a few seconds. What is compared runs in turn, so that a machine busy for a moment is busy for all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from threading import Event, Thread
from time import perf_counter

import numpy as np

from edgespec.profile import DrafterProfile, Profile
from edgespec.types import Decoder, TokenIds, append

_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
_WIDTHS_FAR = (1, 2, 4, 8, 16, 32)
_BRANCHES = (1, 2, 4, 8)
_WIDTH_OUT = 8  # of the passes that tell what a row takes on its way out
_SHORT, _LONG = 64, 1000  # tokens that are held
_READING_S = 2.5  # for the long text: what is left of it has to do on a slow machine
_ROUNDS = (2, 7)  # at least and at most
_NEAR_S, _FAR_S, _BRANCHES_S = 2.0, 0.6, 0.4
_LATE, _NARROW = 2.0, 8  # past so many times these, wider passes than this are left out
_WIDTH_TOGETHER = 5  # of the passes that run beside a drafter
_ROUNDS_TOGETHER = 3
_RUNS_TOGETHER = (2, 8)  # passes, and steps, of each round: at least, and as many as are enough
_TOGETHER_S = 0.3  # of each round, once there is the least


def profile_target(decoder: Decoder) -> Profile:
    """What passes and reading take. A few seconds for a model of 1.5 billion parameters on two cores."""
    short = _text(min(_SHORT, decoder.context_length // 2), decoder, 0)
    prefill_s = min(_read_s(decoder, _text(len(short), decoder, first)) for first in (1, 0))
    near = _passes_s(decoder, short, _WIDTHS, _NEAR_S)
    transfer_s = _transfer_s(decoder, short, max(width for width in near if width <= _WIDTH_OUT))
    passes_s: dict[int, Mapping[int, float]] = {len(short): near}
    long = min(_LONG, decoder.context_length // 2, int(_READING_S / max(prefill_s, 1e-9)))
    if long >= 2 * len(short) > 0:
        text = _text(long, decoder, 3)
        prefill_s = _read_s(decoder, text)
        passes_s[long] = _passes_s(decoder, text, _WIDTHS_FAR, _FAR_S)
    return Profile(passes_s=passes_s, prefill_s=prefill_s, transfer_s=transfer_s)


def profiled(
    known: Profile | None,
    target: Decoder,
    drafters: Mapping[str, Decoder],
    report: Callable[[str], None] = lambda line: None,
    name: str = "the target",
) -> Profile:
    """What is known already, and what is not, measured."""
    if known is None:
        report(f"measuring passes of several widths: {name}")
        known = profile_target(target)
    for each, drafter in drafters.items():
        if each not in known.drafters:
            report(f"measuring what drafts take, and both at once: {each}")
            found = profile_drafter(drafter, target, known)
            known = replace(known, drafters={**known.drafters, each: found})
    return known


def profile_drafter(drafter: Decoder, target: Decoder, profile: Profile) -> DrafterProfile:
    text = _text(min(_SHORT, drafter.context_length // 2), drafter, 0)
    branches_s = _passes_s(drafter, text, _BRANCHES, _BRANCHES_S)
    # Against steps of the target that run in between: the mood of the machine may have changed since its profile.
    step, row = _in_steps(drafter, target)
    return DrafterProfile(
        step_s=max(step * profile.pass_s(1, 0), 1e-9),
        row_s=row * profile.pass_s(1, 0),
        branches={width: max(1.0, taken / branches_s[1]) for width, taken in branches_s.items()},
        slowed=interference(drafter, target),
    )


def _in_steps(drafter: Decoder, target: Decoder) -> tuple[float, float]:
    """What a drafted token takes, and one that is read, in steps of the target; each at its fastest."""
    num_read = min(_SHORT, drafter.context_length // 2)
    verify = _runs(target, 1)
    verify(0)  # reads the text
    target_s = step_s = read_s = np.inf
    for i in range(_ROUNDS[0] + 1):
        text = _text(num_read, drafter, i + 1)  # another one each time, of which nothing is held
        read_s = min(read_s, num_read * _read_s(drafter, text))
        target_s, step_s = min(target_s, verify(i + 1)), min(step_s, _pass_s(drafter, text, 1, i))
    return step_s / target_s, max(0.0, read_s - step_s) / max(1, num_read - 1) / target_s


def interference(drafter: Decoder, target: Decoder) -> tuple[float, float]:
    """Factors on a pass of the target and on a step of the drafter while both run, in two threads."""
    verify = _runs(target, _WIDTH_TOGETHER)
    draft = _runs(drafter, 1)
    verify(0), draft(0)  # read the texts
    factors: list[tuple[float, float]] = []
    for _ in range(_ROUNDS_TOGETHER):
        alone = (_mean_s(verify), _mean_s(draft))
        verify_s, draft_s = _together_s(verify, draft)
        factors.append((max(1.0, verify_s / alone[0]), max(1.0, draft_s / alone[1])))
    return median(factor for factor, _ in factors), median(factor for _, factor in factors)


def _mean_s(run: Callable[[int], float]) -> float:
    taken, started = [run(0)], perf_counter()
    while not _is_enough(len(taken), started):
        taken.append(run(len(taken)))
    return fmean(taken)


def _is_enough(num_runs: int, started: float) -> bool:
    least, most = _RUNS_TOGETHER
    return num_runs >= most or (num_runs >= least and perf_counter() - started > _TOGETHER_S)


def _together_s(verify: Callable[[int], float], draft: Callable[[int], float]) -> tuple[float, float]:
    """Seconds of a pass and of a step, each while the other goes on all the time."""
    stop, failed = Event(), Event()
    steps_s: list[float] = []
    raised: list[BaseException] = []

    def steps() -> None:
        try:
            while not stop.is_set():
                steps_s.append(draft(len(steps_s)))
        except BaseException as error:  # raised again in the caller's thread
            raised.append(error)
            failed.set()

    lane = Thread(target=steps, name="drafter", daemon=True)
    lane.start()
    passes_s: list[float] = []
    started = perf_counter()
    try:
        while not failed.is_set() and not _is_enough(min(len(passes_s), len(steps_s)), started):
            passes_s.append(verify(len(passes_s)))
    finally:
        stop.set()
        lane.join()
    if raised:
        raise raised[0]
    # The last step may have gone on alone.
    return fmean(passes_s), fmean(steps_s[:-1] or steps_s)


def _runs(decoder: Decoder, width: int) -> Callable[[int], float]:
    """Runs a pass of width tokens behind the same text and gives its seconds."""
    text = _text(min(_SHORT, decoder.context_length // 2), decoder, 0)
    width = min(width, decoder.context_length - len(text))

    def run(i: int) -> float:
        return _pass_s(decoder, text, width, i)

    return run


def _passes_s(decoder: Decoder, past: TokenIds, widths: Sequence[int], limit_s: float) -> dict[int, float]:
    """Each width at its fastest, in rounds."""
    taken_s: dict[int, float] = {}
    _pass_s(decoder, past, 1, 0)  # reads the past
    started = perf_counter()
    for i in range(1, _ROUNDS[1] + 1):
        if i > _ROUNDS[0] and perf_counter() - started > limit_s:
            break
        for width in widths:
            is_late = width > _NARROW and perf_counter() - started > _LATE * limit_s
            if len(past) + width <= decoder.context_length and not is_late:
                taken_s[width] = min(taken_s.get(width, np.inf), _pass_s(decoder, past, width, i))
    return taken_s


def _transfer_s(decoder: Decoder, past: TokenIds, width: int) -> float:
    """Of a further row out of a pass of width tokens."""
    if width < 2:
        return 0.0
    all_s = min(_pass_s(decoder, past, width, i, width) for i in range(_ROUNDS[0]))
    one_s = min(_pass_s(decoder, past, width, i + _ROUNDS[0], 1) for i in range(_ROUNDS[0]))
    return max(0.0, all_s - one_s) / (width - 1)


def _pass_s(decoder: Decoder, past: TokenIds, width: int, i: int, num_rows: int | None = None) -> float:
    # Another token behind the same past each time, so that nothing but the past is held.
    new = (np.arange(width, dtype=np.int32) + len(past) + i + 1) % decoder.vocab_size
    tokens = append(past, new)
    started = perf_counter()
    decoder.logits(tokens, num_rows or width)
    return max(perf_counter() - started, 1e-9)


def _read_s(decoder: Decoder, text: TokenIds) -> float:
    """For each token of a text of which nothing is held."""
    if not len(text):
        return _pass_s(decoder, text, 1, 0)
    started = perf_counter()
    decoder.logits(text, 1)
    return max(perf_counter() - started, 1e-9) / len(text)


def _text(num_tokens: int, decoder: Decoder, first: int) -> TokenIds:
    """Texts with another first token have nothing in common that a cache could hold."""
    return (np.arange(num_tokens, dtype=np.int32) + first) % decoder.vocab_size
