"""What drafting gained over plain decoding in one answer, measured against passes without a draft."""

from collections.abc import Mapping
from dataclasses import dataclass

from edgespec.policy.costs import PassCosts
from edgespec.policy.pass_estimate import NUM_WIDTHS

_NUM_DEVIATIONS = 1.96  # that 95 of 100 errors lie within
_MAX_ERROR = 0.06  # as a share; a gain that may be further off than this was not measured
_LEAST_ERROR = 0.01  # what a pass takes varies too
# With fewer passes there is nothing to compare.
_MIN_PASSES = 4


@dataclass(frozen=True, slots=True)
class Gain:
    """A speed relative to plain decoding; the true one lies within error of it in 95 of 100 cases."""

    value: float
    error: float

    @property
    def is_shown(self) -> bool:
        """Whether drafting surely helped."""
        return self.value - self.error > 1.0

    @property
    def is_loss(self) -> bool:
        """Whether drafting surely lost time."""
        return self.value + self.error < 1.0


def measured_gain(
    costs: PassCosts, widths: Mapping[int, tuple[int, float]], num_tokens: int, taken_s: float
) -> Gain | None:
    """Time that plain decoding would have taken for the tokens of an answer, over the time that they took.

    A pass of one token takes what the answer's passes took on average, each divided by the ratio of its width. So
    a change of the machine's speed during the answer changes nothing. The ratios come from passes of one token and
    others that were run alternately; as long as they are not known well, neither is the gain.

    Args:
        widths: Passes, and the seconds of all of them, by the tokens that they ran.
        taken_s: Seconds of the answer, drafts and all else included.

    Returns:
        None where the answer was too short, or what passes take is not known well.
    """
    known = {width: each for width, each in widths.items() if width <= NUM_WIDTHS}
    num_passes = sum(passes for passes, _ in known.values())
    if num_passes < _MIN_PASSES or not num_tokens or taken_s <= 0 or not costs.is_measured:
        return None
    steps = {width: passes * costs.ratio(width) for width, (passes, _) in known.items()}
    total = sum(steps.values())
    value = num_tokens * sum(seconds for _, seconds in known.values()) / total / taken_s
    unsure = costs.mean_spread({width: each / total for width, each in steps.items()})
    error = max(_NUM_DEVIATIONS * unsure, _LEAST_ERROR)
    return Gain(value, error * value) if error <= _MAX_ERROR else None
