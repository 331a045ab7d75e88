"""What a drafter is expected to gain, from the chance of its tokens and what passes cost here. Pure.

Drafts are made between passes (Leviathan et al., 2023, section 3.3), and all tokens of a draft have one chance to
be accepted: published figures are means over whole drafts and say no more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from math import ceil

from edgespec.policy.expected import best_length, expected_tokens
from edgespec.policy.limits import MAX_PLANNED_TOKENS, MIN_GAIN_OF_PAIR
from edgespec.policy.overlap import Ratio

_HALVINGS = 40
_HIGHEST_RATE = 0.999  # a rate of 1 would promise tokens without end


@dataclass(frozen=True, kw_only=True)
class DraftingCosts:
    """Times in steps of the target.

    ratio: Of a pass of the target over so many drafted tokens.
    draft: Of a pass of the drafter, which drafts tokens_at_once tokens.
    longest: The most tokens that a draft can have.
    """

    ratio: Ratio
    draft: float
    tokens_at_once: int = 1
    longest: int = MAX_PLANNED_TOKENS

    def cost(self, num_draft: int) -> float:
        """Time of drafting and verifying that many tokens."""
        return self.ratio(num_draft) + ceil(num_draft / self.tokens_at_once) * self.draft


def expected_gain(rate: float, costs: DraftingCosts) -> tuple[float, int]:
    """Speed over plain decoding at the best draft length, and that length; 1 and 0 where no draft pays.

    rate: The chance that a token is accepted if all before it were.
    """
    return best_length(expected_tokens(repeat(rate, costs.longest)), costs.cost)


def rate_of(tokens_per_pass: float, num_draft: int) -> float:
    """The acceptance rate with which passes over num_draft drafted tokens yield tokens_per_pass.

    Example: of 4 drafted tokens, 2.17 a pass are a rate of 0.57.
    """
    found = _least(lambda rate: expected_tokens(repeat(rate, num_draft))[-1] >= tokens_per_pass)
    return _HIGHEST_RATE if found is None else found


def break_even_rate(costs: DraftingCosts) -> float | None:
    """The least acceptance rate with which a drafter pays; None where it never does."""
    return _least(lambda rate: expected_gain(rate, costs)[0] >= MIN_GAIN_OF_PAIR)


def _least(is_enough: Callable[[float], bool]) -> float | None:
    """The least rate that is enough, where each higher one is too; None where none is."""
    low, high = 0.0, _HIGHEST_RATE
    if not is_enough(high):
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
