"""When a drafter model's drafts are trees: where rows are cheap, and what trees have gained over chains."""

from collections.abc import Mapping
from dataclasses import dataclass

from edgespec.policy.costs import PassCosts

# Where a row takes more of a step than this, trees gain nothing (docs/log/draft-policy.md).
_MAX_ROW = 0.05
_WIDTHS = (2, 8)
_NEWEST = 0.05  # the share of a draft in the running sums


def may_pay(ratios: Mapping[int, float]) -> bool:
    """Whether rows are so cheap that trees may pay, by the times of passes over that of one token."""
    costs = PassCosts(dict(ratios))
    low, high = _WIDTHS
    return max(ratios, default=1) >= high and (costs.ratio(high) - costs.ratio(low)) / (high - low) <= _MAX_ROW


@dataclass(slots=True)
class TreeGain:
    """What trees have lately promised, relative to the best chain by mean acceptance rates in equal time.

    It is about 1 at first. A row's time is worth what trees yield in it, not what chains do.
    """

    tokens: float = 2.0
    tokens_of_chains: float = 2.0

    @property
    def ratio(self) -> float:
        return max(1.0, self.tokens / self.tokens_of_chains)

    def observe(self, tokens: float, tokens_of_chains: float) -> None:
        self.tokens += _NEWEST * (tokens - self.tokens)
        self.tokens_of_chains += _NEWEST * (tokens_of_chains - self.tokens_of_chains)
