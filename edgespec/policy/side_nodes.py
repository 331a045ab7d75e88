"""Next best choices that a pass verifies beside a chain of guesses: those that are worth their row. Pure.

A side node is the rank of a choice at a position of the chain: (0, 0) is the second best first token. It costs a
row of the pass and no step of the drafter. Where it comes true, the pass yields it and the token behind it. Shapes
are by measured costs in each round, as in OPT-Tree (Wang et al., arXiv:2406.17276), and not by a template.
"""

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from edgespec.policy.costs import PassCosts

SideNode = tuple[int, int]  # position in the chain, and rank among the next best choices there

# Where a row takes more of a step than this, next best choices gain nothing (docs/log/draft-policy.md).
_MAX_ROW = 0.05
_WIDTHS = (2, 8)


def choose_side_nodes(
    rates: Sequence[float],
    alternatives: Sequence[float],
    pass_times_s: Sequence[float],
    draft_s: float = 0.0,
) -> tuple[float, tuple[SideNode, ...]]:
    """The side nodes with which a pass over a chain yields the most tokens a second, and that speed.

    A node is taken where its chance is greater than its row's time is worth at the speed so far, and a choice only
    beside the better ones.

    Args:
        rates: The chance of each token of the chain if all before it are accepted.
        alternatives: By rank, the chance of a next best choice where the better ones are wrong.
        pass_times_s: Times of passes by width, from 1 on, as wide as a pass may be.
        draft_s: Time of the draft.
    """
    width, total, reached = len(rates), 1.0, 1.0
    waiting: list[tuple[float, SideNode]] = []  # of each position the best that is not taken, by falling chance
    for position, rate in enumerate(rates):
        heappush(waiting, (-reached * (1 - rate) * alternatives[0], (position, 0)))
        reached *= rate
        total += reached
    speed, chosen = total / (draft_s + pass_times_s[width]), []
    while waiting and width + 1 < len(pass_times_s):
        negative, (position, rank) = heappop(waiting)
        width, total = width + 1, total - negative
        if (faster := total / (draft_s + pass_times_s[width])) <= speed:
            break
        speed = faster
        chosen.append((position, rank))
        if rank + 1 < len(alternatives):
            missed = (1 - alternatives[rank]) / max(alternatives[rank], 1e-9)
            heappush(waiting, (negative * missed * alternatives[rank + 1], (position, rank + 1)))
    return speed, tuple(chosen)


def may_pay(ratios: Mapping[int, float]) -> bool:
    """Whether rows are so cheap that side nodes may pay, by the times of passes over that of one token."""
    costs = PassCosts(dict(ratios))
    low, high = _WIDTHS
    return max(ratios, default=1) >= high and (costs.ratio(high) - costs.ratio(low)) / (high - low) <= _MAX_ROW
