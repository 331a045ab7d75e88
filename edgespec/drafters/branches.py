"""Alternatives: outcomes of a pass that a drafter does not expect, drafted on from while the target verifies.

An outcome of a pass is how many tokens are accepted, and which token the target puts behind them. The likeliest
are the drafter's own next choices, for drafter and target share their noise. All are drafted on from in one pass a
token (Kumar et al., 2026, arXiv:2603.03251).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from edgespec.drafters.model_drafter import Guess, ModelDrafter
from edgespec.types import DraftRequest, Sampler, TokenIds

_MISSES_LEFT = 1.0  # the share of outcomes that fan_out misses falls with the number of guesses to this power


def fan_out(acceptance: float, num_verified: int, num_alternatives: int) -> list[int]:
    """How many alternatives to draft behind each number of accepted tokens, [num_verified + 1].

    Fₖ ∝ P(k)^(1/(1+r)) for the chance P(k) that just k tokens are accepted, a^k (1 - a) and at the end a^k. This
    misses the fewest outcomes if F guesses at one position miss a share F^-r of them.
    """
    chances = [acceptance**k * (1 - acceptance) for k in range(num_verified)] + [acceptance**num_verified]
    weights = [each ** (1 / (1 + _MISSES_LEFT)) for each in chances]
    shares = [num_alternatives * weight / (sum(weights) or 1.0) for weight in weights]
    counts = [int(share) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda k: counts[k] - shares[k])
    for k in by_rest[: num_alternatives - sum(counts)]:
        counts[k] += 1
    return counts


class Step(NamedTuple):
    """Guesses, each behind an earlier one; is_timed if they took a pass."""

    guesses: Sequence[Guess]
    is_timed: bool = True


class BranchPlan(NamedTuple):
    """How alternatives are drafted."""

    num_alternatives: int = 16  # outcomes of one pass
    depth: int = 12  # tokens behind each of them
    num_others: int = 4  # alternatives at one position
    acceptance: float = 0.7  # the chance that a drafted token is accepted

    def draft_branches(
        self,
        drafter: ModelDrafter,
        tokens: TokenIds,
        chain: Sequence[Guess],
        num_verified: int,
        request: DraftRequest,
        sampler: Sampler,
    ) -> Iterator[Step]:
        """Draft behind a chain and each alternative, a token more for all of them with each pass.

        Args:
            tokens: The text, [num_tokens].
            chain: Guesses behind it.
            num_verified: How many of these the target verifies.
        """
        tree = list(chain)
        counts = fan_out(self.acceptance, num_verified, self.num_alternatives)
        tips = [len(tree) - 1]  # the chain first, then the alternatives
        path = list(range(len(tree)))  # nodes of the chain
        position = 0  # the next one to branch at
        for _ in range(self.depth):
            roots: list[Guess] = []
            # There are alternatives to a token once it is drafted.
            while position <= num_verified and position < len(path):
                node = tree[path[position]]
                for other in node.others[: counts[position]]:
                    roots.append(Guess(other, after=node.after))
                    tips.append(len(tree) + len(roots) - 1)
                position += 1
            tree += roots
            yield Step(roots, is_timed=False)
            if request.cancel.is_set():
                return
            guesses = drafter.tree_guesses(tokens, tree, tips, request, sampler)
            tips = list(range(len(tree), len(tree) + len(guesses)))
            path.append(tips[0])
            tree += guesses
            yield Step(guesses)
