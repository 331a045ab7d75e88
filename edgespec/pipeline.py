"""What schedules yield by closed forms, with a step of the target as the unit of time. Pure.

In sequence: (1 + a₁ + a₁a₂ + …) / (r(n) + n c) for drafts of n tokens, with the chance aᵢ that a token is kept if
all before it were, r(n) a pass over n drafted tokens and c the draft of one (Leviathan et al., 2023, section 3.3).

Two at once: the drafter goes on while the target verifies. When all of a draft was kept and the target's own
token is the one that the drafter has put next, what was drafted beyond it serves. Otherwise the drafter starts
anew, and the target waits until it has `wait` tokens: none is the rule of PEARL (Liu et al., 2025,
arXiv:2408.11850), as many as are verified at a time the one in sequence. The rate is that of a cycle from one such
start to the next. They slow each other as long as both work: the drafter rests once it is far enough ahead.

Hedged (Kumar et al., 2026, arXiv:2603.03251): a share of those starts was prepared while the target verified, and
finds as many tokens ready as fit into a pass. The drafter prepares anew for each pass, so that a token is lost
which is half done when a pass ends.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf
from operator import mul
from typing import NamedTuple

from edgespec.chances import expected

Ratio = Callable[[int], float]  # of a pass over so many drafted tokens to a step

_WAITS = (0, 1, 2, 3, 4, 5, 6, 8)
_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
_NEGLIGIBLE = 1e-3
_CERTAIN = 1 - 1e-9
_SETTLED = 32  # passes in a row without a miss, after which as many more are like all that follow


class Policy(NamedTuple):
    """rate: tokens a step of the target. wait: tokens to wait for. length: the most that a pass verifies."""

    rate: float
    wait: int
    length: int
    is_hedged: bool = False


def ahead_of(length: int) -> int:
    """Tokens behind the text after which a drafter rests: those of this pass, of the next, and the one between."""
    return 2 * length + 1


def pass_beside(alone: float, slowed: float, busy: float) -> float:
    """A pass that takes alone by itself, beside a drafter that works for the first busy of it."""
    return alone + min(busy, slowed * alone) * (1 - 1 / slowed)


def serial_rate(chances: Sequence[float], ratio: Ratio, step: float, length: int) -> float:
    return expected(chances[:length])[-1] / (ratio(length) + length * step)


def best_serial(chances: Sequence[float], ratio: Ratio, step: float, longest: int) -> Policy:
    """The best length from 0, which is plain decoding."""
    rates = [total / (ratio(length) + length * step) for length, total in enumerate(expected(chances[:longest]))]
    length = max(range(len(rates)), key=rates.__getitem__)
    return Policy(rates[length], length, length)


def pipelined_rate(
    chances: Sequence[float],
    ratio: Ratio,
    step: float,
    wait: int,
    length: int,
    slowed: tuple[float, float] = (1.0, 1.0),
    prepared: tuple[float, int] = (0.0, 0),
) -> float:
    """Tokens a step.

    Args:
        slowed: What a pass and the draft of a token take more while both lanes work.
        prepared: The share of starts that were prepared, and the most tokens that they find.
    """
    return _rate(_Tables.of(chances, ratio, slowed[0]), (step, step * slowed[1]), wait, length, prepared)


def best_pipelined(
    chances: Sequence[float],
    ratio: Ratio,
    step: float,
    longest: int,
    slowed: tuple[float, float] = (1.0, 1.0),
    prepared: tuple[float, int] = (0.0, 0),
) -> Policy:
    tables = _Tables.of(chances, ratio, slowed[0])
    policies = (
        Policy(_rate(tables, (step, step * slowed[1]), wait, length, prepared), wait, length)
        for length in _LENGTHS
        for wait in _WAITS
        if wait <= length <= longest
    )
    return max(policies, default=Policy(1.0, 0, 0))


class _Tables(NamedTuple):
    """By the number of tokens: what a pass takes, what it yields, and the chance that all are kept.

    slowed: What a pass takes more while the drafter works.
    """

    passes: list[float]
    totals: list[float]
    reached: list[float]
    slowed: float

    @classmethod
    def of(cls, chances: Sequence[float], ratio: Ratio, slowed: float) -> "_Tables":
        return cls(
            [ratio(length) for length in range(len(chances) + 1)],
            expected(chances),
            list(accumulate(chances, mul, initial=1.0)),
            slowed,
        )


def _rate(
    tables: _Tables, steps: tuple[float, float], wait: int, length: int, prepared: tuple[float, int]
) -> float:
    """Tokens a step, of a drafter that takes steps for a token, alone and while the target works."""
    share, most = prepared
    if not share:
        tokens, taken = _cycle(tables, steps, wait, length, 0.0)
    else:
        pass_taken = tables.slowed * tables.passes[min(max(wait, 1), len(tables.passes) - 1)]
        more, longer = _cycle(tables, steps, wait, length, min(most, pass_taken // steps[1]), is_whole=True)
        tokens, taken = _cycle(tables, steps, wait, length, 0.0, is_whole=True)
        tokens, taken = (1 - share) * tokens + share * more, (1 - share) * taken + share * longer
    return tokens / taken


def _cycle(
    tables: _Tables,
    steps: tuple[float, float],
    wait: int,
    length: int,
    ready: float,
    *,
    is_whole: bool = False,
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
        room = inf if is_whole else max(0.0, ahead_of(length) - ready)
        busy = min(room * steps[1], tables.slowed * alone)
        taken += chance * (waited * steps[0] + pass_beside(alone, tables.slowed, busy))
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
