"""Speeds of the schedules in closed form. Pure.

The unit of time is a step of the target.

Serial: (1 + a₁ + a₁a₂ + …) / (r(n) + n c) for drafts of n tokens, with the chance aᵢ that a token is accepted if
all before it were, r(n) a pass over n drafted tokens and c the draft of one (Leviathan et al., 2023, section 3.3).

Pipelined: the drafter goes on while the target verifies. When all of a draft was accepted and the target's own
token is the one that the drafter has put next, what was drafted beyond it serves. Otherwise the drafter starts
over, and the target waits until it has `wait` tokens: 0 is the rule of PEARL (Liu et al., 2025, arXiv:2408.11850),
as many as a pass verifies is the serial schedule. The rate is that of a cycle from one such start to the next.
The two slow each other while both work; the drafter rests once it is far enough ahead.

Hedged (Kumar et al., 2026, arXiv:2603.03251): a share of those starts was prefetched while the target verified,
and finds as many tokens ready as fit into a pass. The drafter prefetches again for each pass, so a token is
lost that is half done when a pass ends.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from operator import mul
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from edgespec.draft.option import best_length, expected_tokens

_Floats: TypeAlias = npt.NDArray[np.float64]
_Ints: TypeAlias = npt.NDArray[np.int64]
Count = TypeVar("Count", int, _Ints)
Ratio = Callable[[int], float]  # of a pass over so many drafted tokens to a step

_WAITS = (0, 1, 2, 3, 4, 5, 6, 8)
_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
_NEGLIGIBLE = 1e-3
_CERTAIN = 1 - 1e-9
# The share of a step by which the end of a pass and that of a step may miss each other.
_NEARLY = 0.15
_SETTLED = 12  # passes in a row without a miss, after which as many more are like all that follow


class AheadPlan(NamedTuple):
    """rate: tokens a step of the target. wait: tokens to wait for. length: the most that a pass verifies."""

    rate: float
    wait: int
    length: int
    is_hedged: bool = False


def max_ahead(length: Count) -> Count:
    """How many tokens ahead of the text a drafter rests: those of this pass, of the next, and the one between."""
    return 2 * length + 1


def pass_beside(alone: float, contention: float, busy: float) -> float:
    """Time of a pass: alone by itself, contention times as long while the drafter works, busy from its start."""
    return alone + min(busy, contention * alone) * (1 - 1 / contention)


def time_beside(alone: float, contention: float, share: float) -> float:
    """Time of work: alone by itself, contention times as long for the share of it in which both lanes work."""
    return alone / (1 - share + share / contention)


def wait_for_step_s(step_s: float, running_s: float | None) -> float | None:
    """How long to wait for a step that is nearly done, so that a pass does not just miss its token; None for not.

    running_s: Seconds of the step_s expected that it has taken; None if none is being done.
    """
    if running_s is None:
        return None
    due_s = max(0.0, step_s - running_s)
    return due_s + _NEARLY * step_s if due_s <= _NEARLY * step_s else None


def serial_rate(rates: Sequence[float], ratio: Ratio, step: float, length: int) -> float:
    """Tokens per step of the serial schedule with drafts of a length."""
    return expected_tokens(rates[:length])[-1] / (ratio(length) + length * step)


def best_serial(rates: Sequence[float], ratio: Ratio, step: float, longest: int) -> AheadPlan:
    """The serial plan with the best draft length; length 0 is plain decoding."""
    rate, length = best_length(expected_tokens(rates[:longest]), lambda k: ratio(k) + k * step)
    return AheadPlan(rate, length, length)


def pipelined_rate(
    rates: Sequence[float],
    ratio: Ratio,
    step: float,
    wait: int,
    length: int,
    contention: tuple[float, float] = (1.0, 1.0),
    prefetched: tuple[float, int] = (0.0, 0),
) -> float:
    """Tokens per step of the pipelined schedule, or of the hedged one if starts are prefetched.

    Args:
        contention: How many times as long a pass and the draft of a token take while both lanes work.
        prefetched: The share of starts that were prefetched, and the most tokens that they find.
    """
    tables = _Tables.of(rates, ratio, contention[0])
    steps = (step, step * contention[1])
    return float(_rates(tables, steps, np.array([wait]), np.array([length]), prefetched)[0])


def best_pipelined(
    rates: Sequence[float],
    ratio: Ratio,
    step: float,
    longest: int,
    contention: tuple[float, float] = (1.0, 1.0),
    prefetched: tuple[float, int] = (0.0, 0),
    fixed: int | None = None,
) -> AheadPlan:
    """The best plan of the pipelined or hedged schedule; arguments as of pipelined_rate.

    fixed: The length of all drafts, which are waited for; None for the best one.
    """
    waits, lengths = _plans(longest) if fixed is None else (np.array([fixed]), np.array([fixed]))
    if not len(waits):
        return AheadPlan(1.0, 0, 0)
    tables = _Tables.of(rates, ratio, contention[0])
    found = _rates(tables, (step, step * contention[1]), waits, lengths, prefetched)
    best = int(found.argmax())
    return AheadPlan(float(found[best]), int(waits[best]), int(lengths[best]))


@cache
def _plans(longest: int) -> tuple[_Ints, _Ints]:
    """The waits and lengths that are compared."""
    plans = [(wait, length) for length in _LENGTHS for wait in _WAITS if wait <= length <= longest]
    waits, lengths = np.array(plans, np.int64).reshape(-1, 2).T
    return waits, lengths


class _Tables(NamedTuple):
    """By the number of tokens: what a pass takes, what it yields, and the chance that all are kept."""

    passes: _Floats
    totals: _Floats
    reached: _Floats
    contention: float  # how many times as long a pass takes while the drafter works

    @classmethod
    def of(cls, rates: Sequence[float], ratio: Ratio, contention: float) -> "_Tables":
        return cls(
            np.array([ratio(length) for length in range(len(rates) + 1)]),
            np.array(expected_tokens(rates)),
            np.array(list(accumulate(rates, mul, initial=1.0))),
            contention,
        )


def _rates(
    tables: _Tables, steps: tuple[float, float], waits: _Ints, lengths: _Ints, prefetched: tuple[float, int]
) -> _Floats:
    """Tokens per step of each plan. steps: Time for a drafted token, alone and while the target works."""
    share, most = prefetched
    if not share:
        tokens, taken = _cycles(tables, steps, waits, lengths, np.zeros(len(waits)))
    else:
        pass_taken = tables.contention * tables.passes[np.clip(waits, 1, len(tables.passes) - 1)]
        found = np.minimum(most, pass_taken // steps[1])
        more, longer = _cycles(tables, steps, waits, lengths, found, is_whole=True)
        tokens, taken = _cycles(tables, steps, waits, lengths, np.zeros(len(waits)), is_whole=True)
        tokens, taken = (1 - share) * tokens + share * more, (1 - share) * taken + share * longer
    return tokens / taken


def _cycles(
    tables: _Tables,
    steps: tuple[float, float],
    waits: _Ints,
    lengths: _Ints,
    ready: _Floats,
    *,
    is_whole: bool = False,
) -> tuple[_Floats, _Floats]:
    """Tokens, and the time that they take, from a start with so many ready to the next start, for each plan.

    is_whole: Nothing that is half done outlives a pass, and no step that is nearly done is counted on: hedging by
        plans that did so took 2 to 5 % more time than they foresaw.
    """
    longest = len(tables.passes) - 1
    tokens, taken, chance = np.zeros(len(waits)), np.zeros(len(waits)), np.ones(len(waits))
    settled = (tokens, taken, chance)
    least = 1 - 1 / tables.contention
    for num_passes in range(2 * _SETTLED):
        if num_passes == _SETTLED:
            settled = (tokens, taken, chance)
        waited = np.maximum(0.0, waits - ready)
        if not is_whole:
            due = np.ceil(ready + waited) - ready - waited
            # As wait_for_step_s has it: a step that is nearly done is waited for.
            waited = waited + np.where((due <= _NEARLY) & (ready < lengths), due, 0.0)
        ready = ready + waited
        verified = np.minimum(np.minimum(ready.astype(np.int64), lengths), longest)
        tokens = tokens + chance * tables.totals[verified]
        alone = tables.passes[verified]
        busy = tables.contention * alone
        if not is_whole:
            busy = np.minimum(np.maximum(0.0, max_ahead(lengths) - ready) * steps[1], busy)
        taken = taken + chance * (waited * steps[0] + alone + busy * least)
        more = busy / steps[1]
        ready = ready + (np.floor(more) if is_whole else more) - verified
        goes_on = (ready >= 1) & (verified != longest)
        chance = chance * goes_on * tables.reached[np.minimum(verified + 1, longest)]
        chance[chance <= _NEGLIGIBLE] = 0.0
        if not chance.any():
            return tokens, taken
        ready = np.clip(ready - 1, 0, longest)
    kept = np.minimum(chance / np.maximum(settled[2], _NEGLIGIBLE), _CERTAIN)
    return tokens + (tokens - settled[0]) * kept / (1 - kept), taken + (taken - settled[1]) * kept / (1 - kept)
