"""What schedules yield by closed forms, with a step of the target as the unit of time. Pure.

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
from itertools import accumulate
from math import inf
from operator import mul
from typing import NamedTuple

from edgespec.policy.expected import best_length, expected_tokens

Ratio = Callable[[int], float]  # of a pass over so many drafted tokens to a step

_WAITS = (0, 1, 2, 3, 4, 5, 6, 8)
_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
_NEGLIGIBLE = 1e-3
_CERTAIN = 1 - 1e-9
# The share of a step by which the end of a pass and that of a step may miss each other.
_NEARLY = 0.15
_SETTLED = 32  # passes in a row without a miss, after which as many more are like all that follow


class AheadPlan(NamedTuple):
    """rate: tokens a step of the target. wait: tokens to wait for. length: the most that a pass verifies."""

    rate: float
    wait: int
    length: int
    is_hedged: bool = False


def max_ahead(length: int) -> int:
    """Tokens behind the text at which a drafter rests: those of this pass, of the next, and the one between."""
    return 2 * length + 1


def pass_beside(alone: float, contention: float, busy: float) -> float:
    """Time of a pass beside a drafter that works during the first busy of it.

    Args:
        alone: Time of the pass by itself.
        contention: How much longer it takes while the drafter works.
    """
    return alone + min(busy, contention * alone) * (1 - 1 / contention)


def wait_for_step_s(step_s: float, running_s: float | None) -> float | None:
    """How long to wait for a step that is nearly done: a pass that just misses its token is a pass without it.

    Args:
        step_s: Seconds that a step is expected to take.
        running_s: Seconds that this one has taken; None if none is being done.
    """
    if running_s is None:
        return None
    due_s = max(0.0, step_s - running_s)
    return due_s + _NEARLY * step_s if due_s <= _NEARLY * step_s else None


def serial_rate(rates: Sequence[float], ratio: Ratio, step: float, length: int) -> float:
    return expected_tokens(rates[:length])[-1] / (ratio(length) + length * step)


def best_serial(rates: Sequence[float], ratio: Ratio, step: float, longest: int) -> AheadPlan:
    """The best length from 0, which is plain decoding."""
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
    """Tokens a step.

    Args:
        contention: What a pass and the draft of a token take more while both lanes work.
        prefetched: The share of starts that were prefetched, and the most tokens that they find.
    """
    return _rate(_Tables.of(rates, ratio, contention[0]), (step, step * contention[1]), wait, length, prefetched)


def best_pipelined(
    rates: Sequence[float],
    ratio: Ratio,
    step: float,
    longest: int,
    contention: tuple[float, float] = (1.0, 1.0),
    prefetched: tuple[float, int] = (0.0, 0),
) -> AheadPlan:
    tables = _Tables.of(rates, ratio, contention[0])
    plans = (
        AheadPlan(_rate(tables, (step, step * contention[1]), wait, length, prefetched), wait, length)
        for length in _LENGTHS
        for wait in _WAITS
        if wait <= length <= longest
    )
    return max(plans, default=AheadPlan(1.0, 0, 0))


class _Tables(NamedTuple):
    """By the number of tokens: what a pass takes, what it yields, and the chance that all are kept."""

    passes: list[float]
    totals: list[float]
    reached: list[float]
    contention: float  # what a pass takes more while the drafter works

    @classmethod
    def of(cls, rates: Sequence[float], ratio: Ratio, contention: float) -> "_Tables":
        return cls(
            [ratio(length) for length in range(len(rates) + 1)],
            expected_tokens(rates),
            list(accumulate(rates, mul, initial=1.0)),
            contention,
        )


def _rate(
    tables: _Tables, steps: tuple[float, float], wait: int, length: int, prefetched: tuple[float, int]
) -> float:
    """Tokens a step, of a drafter that takes steps for a token, alone and while the target works."""
    share, most = prefetched
    if not share:
        tokens, taken = _cycle(tables, steps, wait, length, 0.0)
    else:
        pass_taken = tables.contention * tables.passes[min(max(wait, 1), len(tables.passes) - 1)]
        more, longer = _cycle(tables, steps, wait, length, min(most, pass_taken // steps[1]), is_whole=True)
        tokens, taken = _cycle(tables, steps, wait, length, 0.0, is_whole=True)
        tokens, taken = (1 - share) * tokens + share * more, (1 - share) * taken + share * longer
    return tokens / taken


def _cycle(
    tables: _Tables, steps: tuple[float, float], wait: int, length: int, ready: float, *, is_whole: bool = False
) -> tuple[float, float]:
    """Tokens, and what they take, from a start with so many ready to the next start.

    Args:
        is_whole: Nothing that is half done outlives a pass.
    """
    longest = len(tables.passes) - 1
    tokens = taken = 0.0
    chance = 1.0
    settled = (tokens, taken, chance)
    for num_passes in range(2 * _SETTLED):
        if num_passes == _SETTLED:
            settled = (tokens, taken, chance)
        waited = max(0.0, wait - ready)
        ready += waited
        verified = min(int(ready), length, longest)
        tokens += chance * tables.totals[verified]
        alone = tables.passes[verified]
        room = inf if is_whole else max(0.0, max_ahead(length) - ready)
        busy = min(room * steps[1], tables.contention * alone)
        taken += chance * (waited * steps[0] + pass_beside(alone, tables.contention, busy))
        more = busy / steps[1]
        ready += (int(more) if is_whole else more) - verified
        if ready < 1 or verified == longest:
            break
        chance *= tables.reached[verified + 1]
        ready = min(ready - 1, longest)
        if chance <= _NEGLIGIBLE:
            break
    else:
        kept = min(chance / settled[2], _CERTAIN)
        tokens += (tokens - settled[0]) * kept / (1 - kept)
        taken += (taken - settled[1]) * kept / (1 - kept)
    return tokens, taken
