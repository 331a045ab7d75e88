"""Which outcomes of a pass a lane drafts on from while the target verifies.

An outcome is how many tokens are accepted, and which token the target puts after them. The likeliest are the
drafter's own next choices, for drafter and target share their noise. Each may be drafted on from, with a row of
the drafter's step (Kumar et al., 2026, arXiv:2603.03251). A step has the rows that yield the most tokens that come
to be used in the time that it takes.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from edgespec.decoding.tree import NO_DRAFT, Tree, Worth
from edgespec.draft.draft_model import UNKNOWN_WORTH
from edgespec.draft.limits import MAX_AHEAD_TOKENS
from edgespec.draft.model_drafter import Guess, step_of

_TYPICAL_DRAFT = 2


class _Outcome(NamedTuple):
    """A node of the tree, or a next best choice that is no node yet.

    chance: That the text comes to run through it.
    position: Its place after the text; -1 for the text itself.
    """

    chance: float
    position: int
    node: int | None
    token: int = -1
    parent: int = -1


def choose(
    tree: Tree, worth: Worth, num_verified: int, max_rows: int, longest: int = MAX_AHEAD_TOKENS
) -> tuple[Tree, list[int]]:
    """The tree with the next best choices that are worth a row of the drafter, and the nodes to draft on from.

    Args:
        num_verified: How many tokens of the first choices the target verifies.
        longest: The most tokens that lie after each other.
    """
    outcomes = [*_next_best(tree, worth, num_verified), *_ends(tree, worth)]
    outcomes = [each for each in outcomes if each.position + 1 < longest]
    outcomes = sorted(outcomes, key=lambda outcome: -outcome.chance)[:max_rows]
    outcomes = outcomes[: worth.num_branches([each.chance for each in outcomes])]
    new = [each for each in outcomes if each.node is None]
    numbers = iter(range(len(tree.tokens), len(tree.tokens) + len(new)))
    nodes = [next(numbers) if each.node is None else each.node for each in outcomes]
    if new:
        # Of a draft with distributions each node has one; those of these nodes are never asked for.
        q = tree.distributions[0] if tree.distributions else None
        guesses = [Guess(each.token, distribution=q) for each in new]
        tree = tree.grown(step_of(guesses, [each.parent for each in new], [each.chance for each in new]))
    return tree, nodes


def behind(tree: Tree, tips: Sequence[int], guesses: Sequence[Guess], worth: Worth) -> Tree:
    """The guesses of a step after nodes of a tree, as the tree by which that grows."""
    depths = tree.depths
    chances = [
        tree.chances[tip] * worth.acceptance(depths[tip]) if tip >= 0 else worth.acceptance(0) for tip in tips
    ]
    return step_of(guesses, tips, chances)


def typical_branching(step_times: Sequence[float]) -> tuple[int, float]:
    """The rows of a step, and the share of misses whose outcome they cover, where chances are unknown.

    Args:
        step_times: Time of a step by its rows, over that of a step of one, [max_rows].
    """
    worth, tree = replace(UNKNOWN_WORTH, step_times=step_times), NO_DRAFT
    others = tuple(range(1, len(worth.others) + 1))
    for position in range(_TYPICAL_DRAFT + 1):
        tree = tree.grown(step_of([Guess(0, others=others)], [position - 1]))
    grown, nodes = choose(tree, worth, _TYPICAL_DRAFT, len(step_times))
    missed = 1 - worth.reached(_TYPICAL_DRAFT + 1)
    return max(1, len(nodes)), sum(grown.chances[len(tree.tokens) :]) / missed


def _next_best(tree: Tree, worth: Worth, num_verified: int) -> list[_Outcome]:
    """The next best choices after each number of accepted tokens, but for those that are nodes already."""
    above, found = tree.above, []
    known = set(zip(above, tree.tokens.tolist(), strict=True))
    for position, node in enumerate(tree.first_choices()[: num_verified + 1]):
        left = worth.reached(position) * (1 - worth.acceptance(position))
        for other, rate in zip(tree.others[node], worth.others, strict=False):
            if (above[node], other) not in known:
                found.append(_Outcome(left * rate, position, None, other, above[node]))
            left *= 1 - rate
    return found


def _ends(tree: Tree, worth: Worth) -> list[_Outcome]:
    """The nodes that nothing was drafted after, and the text where there is no node."""
    trunk, inner = tree.first_choices(), set(tree.above)
    last = _Outcome(worth.reached(len(trunk)), len(trunk) - 1, trunk[-1] if trunk else -1)
    depths = tree.depths
    ends = [node for node in range(len(depths)) if node not in inner and node != last.node]
    return [last, *(_Outcome(tree.chances[node], depths[node] - 1, node) for node in ends)]
