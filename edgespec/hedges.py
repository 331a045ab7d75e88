"""What a drafter prepares for the outcomes that it does not expect, while the target verifies.

An outcome of a pass is how many tokens were kept, and which token the target put behind them. The likeliest are
those where the drafter's own next choices come true, for drafter and target share their noise. Each is drafted on,
all in one pass a token (Kumar et al., 2026, arXiv:2603.03251).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from edgespec.drafters import Guess, ModelDrafter
from edgespec.types import Ask, Sampler, TokenIds

_MISSES_LEFT = 1.0  # the share of outcomes that fan_out misses falls with the number of guesses to this power


def fan_out(chance: float, num_verified: int, budget: int) -> list[int]:
    """How many other tokens to prepare behind each number of kept ones, [num_verified + 1].

    Fₖ ∝ P(k)^(1/(1+r)) for the chance P(k) that just k are kept, a^k (1 - a) and at the end a^k, which leaves the
    fewest outcomes unprepared where a share F^-r of those behind one place is missed with F guesses.
    """
    chances = [chance**k * (1 - chance) for k in range(num_verified)] + [chance**num_verified]
    weights = [each ** (1 / (1 + _MISSES_LEFT)) for each in chances]
    shares = [budget * weight / (sum(weights) or 1.0) for weight in weights]
    counts = [int(share) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda k: counts[k] - shares[k])
    for k in by_rest[: budget - sum(counts)]:
        counts[k] += 1
    return counts


class Step(NamedTuple):
    """Guesses, each behind one that was made before; is_timed where they took the time of a pass."""

    guesses: Sequence[Guess]
    is_timed: bool = True


class Hedges(NamedTuple):
    """How many outcomes are prepared, and how many tokens for each."""

    budget: int = 16
    depth: int = 12
    num_others: int = 4  # at one place
    chance: float = 0.7  # that a drafted token is kept

    def grown(
        self,
        drafter: ModelDrafter,
        tokens: TokenIds,
        made: Sequence[Guess],
        num_verified: int,
        ask: Ask,
        sampler: Sampler,
    ) -> Iterator[Step]:
        """The drafted chain a token longer with each pass, and beside it the other outcomes; each step whole.

        Args:
            tokens: The text, [num_tokens].
            made: The chain behind it.
            num_verified: How many of its tokens the target verifies.
        """
        tree = list(made)
        wanted = fan_out(self.chance, num_verified, self.budget)
        tips = [len(tree) - 1]  # the chain first, then the outcomes
        chain = list(range(len(tree)))
        placed = 0
        for _ in range(self.depth):
            roots: list[Guess] = []
            # An outcome can be prepared once the drafter has said what else it would have put in its place.
            while placed <= num_verified and placed < len(chain):
                node = tree[chain[placed]]
                for other in node.others[: wanted[placed]]:
                    roots.append(Guess(other, after=node.after))
                    tips.append(len(tree) + len(roots) - 1)
                placed += 1
            tree += roots
            yield Step(roots, is_timed=False)
            if ask.cancel.is_set():
                return
            found = drafter.tree_guesses(tokens, tree, tips, ask, sampler)
            tips = list(range(len(tree), len(tree) + len(found)))
            chain.append(tips[0])
            tree += found
            yield Step(found)
