"""A pair of devices as figures, and the most that any schedule gets out of them. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

from edgespec.chances import expected

_LONGEST = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A target on one device and a drafter on another.

    target_s: Seconds of a pass over one token.
    draft_s: Seconds of a drafted token; of several at once, in branches, as much.
    ratios: A pass over 1, 2, … tokens to a pass over one; beyond the last by the last difference.
    """

    target_s: float
    draft_s: float
    ratios: Sequence[float] = (1.0,)

    @property
    def step(self) -> float:
        """A drafted token in passes over one token."""
        return self.draft_s / self.target_s

    def ratio(self, num_draft: int) -> float:
        """A pass over so many drafted tokens and one more, in passes over one token."""
        beyond = num_draft - (len(self.ratios) - 1)
        if beyond <= 0:
            return self.ratios[num_draft]
        slope = self.ratios[-1] - self.ratios[-2] if len(self.ratios) > 1 else 0.0
        return self.ratios[-1] + max(0.0, slope) * beyond

    def verify_s(self, num_fed: int) -> float:
        """A pass over so many tokens."""
        return self.target_s * self.ratio(max(0, num_fed - 1))


def bound(machine: Machine, chance_at: Callable[[int], float]) -> float:
    """The most tokens a second that any schedule yields with drafts in a chain, both devices at work always.

    A pass over n drafted tokens yields E(n) = 1 + a₁ + a₁a₂ + … and takes r(n); the drafter takes a step for each
    of them, whatever else it prepares beside. However rounds of n and of m tokens are mixed, the time is at least
    the longer of what the passes take and of what the drafts take, so the rate is at most the maximum over
    mixtures of (mean E) / max(mean r, c · mean n). At an integer n and without the drafter's part this is the
    ceiling of perfect prediction, and 2 is the most that overlap adds to the same drafts in sequence.

    Args:
        chance_at: The chance that the token at a place in a draft is kept, if all before it were.
    """
    totals = expected(map(chance_at, range(_LONGEST)))
    points = [(totals[n], machine.ratio(n), n * machine.step) for n in range(_LONGEST + 1)]
    return max(_mixed(one, other) for one, other in combinations_with_replacement(points, 2)) / machine.target_s


def _mixed(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    """The best rate of rounds of two kinds, each of which yields, verifies for and drafts for so much.

    The rate is a ratio of linear functions of the share on each side of where verifying and drafting take the
    same, so it is greatest at an end or there.
    """
    shares = [0.0, 1.0]
    gap, other_gap = one[1] - one[2], other[1] - other[2]
    if gap * other_gap < 0:
        shares.append(gap / (gap - other_gap))
    rates = []
    for share in shares:
        total, verifying, drafting = ((1 - share) * x + share * y for x, y in zip(one, other, strict=True))
        rates.append(total / max(verifying, drafting))
    return max(rates)
