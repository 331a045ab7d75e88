"""The time of a pass of the target, by how many tokens it runs and how long the text before them is.

And what drafting gained by that over plain decoding. Knows nothing of who drafts.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, repeat
from typing import NamedTuple

import numpy as np

from edgespec.decoding.pass_queue import ALONE, Beside
from edgespec.draft.pass_estimate import NUM_WIDTHS, PassEstimate, starting_spreads

PassTimes = Mapping[int, float]  # seconds by width

# A row more costs about a quarter of a step on a CPU until it has been measured (docs/log/draft-policy.md).
_ROW_COST = 0.25

_WIDEST = 64


class ContextCosts(NamedTuple):
    """The time that attention to a longer text adds to a pass.

    base: length of the text after which passes were measured without it.
    added: for each token beyond, by the width of the pass from 0 on, in steps of one token at the base.
    """

    base: int = 0
    added: tuple[float, ...] = (0.0,)

    @classmethod
    def between(cls, base: int, near_s: PassTimes, far: int, far_s: PassTimes) -> "ContextCosts":
        """From seconds of passes after base tokens and after far tokens, where fewer widths may be known."""
        near, behind = pass_costs(near_s), pass_costs(far_s)
        steps = (far - base) * near_s[1]
        widths = sorted(far_s)
        known = [max(0.0, behind.pass_s(width) - near.pass_s(width)) / steps for width in widths]
        if len(widths) > 1:  # each token of a pass attends to the whole text
            slope = max(0.0, known[-1] - known[-2]) / (widths[-1] - widths[-2])
            widths, known = [*widths, _WIDEST], [*known, known[-1] + slope * (_WIDEST - widths[-1])]
        return cls(base, tuple(np.interp(range(_WIDEST + 1), widths, known).tolist()))

    def padded(self, widths: Sequence[int]) -> "ContextCosts":
        last = len(self.added) - 1
        known = [self.added[min(run_width(width, widths), last)] for width in range(last + 1)]
        return self._replace(added=tuple(known))

    def steps(self, width: int, context_length: int) -> float:
        """Added cost, in steps of one token at the base."""
        if context_length <= self.base:
            return 0.0
        return (context_length - self.base) * self.added[min(width, len(self.added) - 1)]


NO_CONTEXT_COSTS = ContextCosts()


def run_width(width: int, widths: Sequence[int]) -> int:
    """The width by which a pass that is padded to the next of widths is known: that one, and 1 for the first."""
    if not widths or width > widths[-1]:
        return width
    run = widths[bisect_left(widths, width)]
    return min(width, 1) if run == widths[0] else run


@dataclass(slots=True)
class PassCosts:
    """Seconds of a pass by its width: those of a step, a pass of one token, times a ratio.

    ratios: a pass to a step, by width, after a short text; width 1 has 1.
    step_s: seconds of a step after the present text; None until a pass was seen.
    context_costs: what a longer text adds.
    context_length: tokens of the present text.
    warm: widths that the session has run, on a device whose first pass of a width loads or compiles kernels; such
        a pass does not count. None where the first is like the others.
    spreads: how unsure the ratios are that it starts with, by width, as standard deviations of their logs.
    estimate: what passes have shown; None until then.
    widths: passes are padded to the next of these, if there are any (Can.widths). Those that run alike have one
        ratio, whatever was measured of either.
    beside: what shares the passes. A pass then takes what its rows add to it, and a token's share of the rest.
    """

    ratios: dict[int, float] = field(default_factory=lambda: {1: 1.0})
    step_s: float | None = None
    context_costs: ContextCosts = NO_CONTEXT_COSTS
    context_length: int = 0
    warm: set[int] | None = None
    spreads: Mapping[int, float] = field(default_factory=dict)
    estimate: PassEstimate | None = None
    widths: Sequence[int] = ()
    beside: Beside = ALONE
    _listed: list[float] = field(init=False)  # ratios from width 1 on, as measured or as the estimate has them
    _row: float = field(init=False)  # the ratio of a token more than in the widest listed pass
    _has_seen: bool = field(init=False, default=False)  # the list is the estimate's

    def __post_init__(self) -> None:
        self.ratios = self.ratios or {1: 1.0}
        first = self.widths[0] if self.widths else 1  # the last width that is a step
        if self.widths:
            # Of two widths that are one pass the wider one counts, but 1 for those that are a step.
            wider = {self._run_width(width): self.ratios[width] for width in sorted(self.ratios)}
            self.ratios = wider | {1: 1.0, first: 1.0}
            self.context_costs = self.context_costs.padded(self.widths)
        widths = sorted(self.ratios)
        self._list(_interpolated(self.ratios))
        self._row = (self._listed[-1] - 1) / (widths[-1] - first) if widths[-1] > first else _ROW_COST

    def _list(self, ratios: list[float]) -> None:
        """Use ratios from width 1 on; where passes are padded, each that of the width to which its pass is."""
        if self.widths:
            last = len(ratios)
            ratios = [ratios[min(self._run_width(width), last) - 1] for width in range(1, last + 1)]
        self._listed = ratios

    def pass_s(self, width: int) -> float:
        """Seconds of a pass of width tokens; its ratio to a step as long as nothing was measured."""
        if self.beside.num_rows:
            return self.pass_times_s(width)[-1]
        return self.ratio(width) * (self.step_s or 1.0)

    def pass_times_s(self, num_widths: int) -> list[float]:
        """pass_s of each width from 1 on, in 0.2 µs each, where pass_s takes 2."""
        if self.beside.num_rows:
            return marginal_times(self._times_s(num_widths + self.beside.num_rows), self.beside)
        return self._times_s(num_widths)

    def _times_s(self, num_widths: int) -> list[float]:
        """Seconds of passes that are not shared, by width from 1 on."""
        ratios, step_s = self._ratios(num_widths), self.step_s or 1.0
        if not self._is_long:
            return [ratio * step_s for ratio in ratios]
        beyond, step = self.context_length - self.context_costs.base, self._step()
        added = chain(self.context_costs.added[1:], repeat(self.context_costs.added[-1]))
        return [(ratio + beyond * each) / step * step_s for ratio, each in zip(ratios, added, strict=False)]

    def spread(self, width: int) -> float:
        """How unsure a ratio is: the standard deviation of its log."""
        width = self._run_width(width + (self.beside.num_rows if width > 1 else 0))
        return self._started().spread(width) if width > 1 else 0.0

    def mean_spread(self, shares: Mapping[int, float]) -> float:
        """How unsure a mean over ratios is, by the share of each width in it."""
        return self._started().mean_spread([(self._run_width(width), share) for width, share in shares.items()])

    @property
    def is_measured(self) -> bool:
        """True if a pass was seen."""
        return self.estimate is not None and self.estimate.is_started

    def observe(self, width: int, taken_s: float, num_beside: int = 0) -> None:
        """Learn what a pass took, which num_beside rows of other texts shared."""
        width = self._run_width(width + num_beside)
        if num_beside and width > NUM_WIDTHS:  # whose passes are not told apart
            return
        if self.warm is not None and width not in self.warm:
            self.warm.add(width)
            return
        estimate = self.estimate or self._started()
        is_long = self._is_long
        if is_long:
            # Seconds after a short text, by what the present one is known to add.
            taken_s /= 1 + self.context_costs.steps(width, self.context_length) / self._ratio(width)
        estimate.observe(width, taken_s)
        self._list(estimate.ratios())
        self._row, self._has_seen = (self._listed[-1] - 1) / (NUM_WIDTHS - 1), True
        self.step_s = estimate.step_s * self._step() if is_long else estimate.step_s

    def known_ratios(self) -> dict[int, float]:
        """The field ratios, updated by what passes have shown."""
        if not self._has_seen:
            return dict(self.ratios)
        change = self._listed[-1] / PassCosts(self.ratios, widths=self.widths).ratio(NUM_WIDTHS)
        last = self._run_width(NUM_WIDTHS)
        wider = {width: max(self._listed[-1], r * change) for width, r in self.ratios.items() if width > last}
        return dict(enumerate(self._listed, 1)) | wider

    def known_spreads(self) -> dict[int, float]:
        """The field spreads, updated by what passes have shown."""
        if self.estimate is None:
            return dict(self.spreads)
        return {width: self.spread(width) for width in range(2, NUM_WIDTHS + 1)}

    def _started(self) -> PassEstimate:
        if self.estimate is None:
            widest_step = self.widths[0] if self.widths else 1  # whose ratio is 1, and was not measured
            measured = [width for width in self.ratios if width > widest_step]
            spreads = starting_spreads(self.spreads, measured)
            self.estimate = PassEstimate(self._ratios(NUM_WIDTHS), spreads)
            if self.step_s is not None:
                self.estimate.observe(1, self.step_s / self._step())
        return self.estimate

    def ratio(self, width: int) -> float:
        """The time of a pass relative to a step, both after the present text."""
        if self.beside.num_rows:
            times_s = self.pass_times_s(width)
            return times_s[-1] / times_s[0]
        width = self._run_width(width)
        if not self._is_long:
            return self._ratio(width)
        return (self._ratio(width) + self.context_costs.steps(width, self.context_length)) / self._step()

    @property
    def _is_long(self) -> bool:
        """True if the present text adds to passes."""
        return self.context_length > self.context_costs.base and self.context_costs is not NO_CONTEXT_COSTS

    def _step(self) -> float:
        """The time of a step after the present text, relative to one after a short text."""
        return 1.0 + self.context_costs.steps(1, self.context_length)

    def _ratio(self, width: int) -> float:
        """Ratio after a short text."""
        known = self._listed
        if width <= len(known):
            return known[width - 1]
        return known[-1] + self._row * (self._run_width(width) - self._run_width(len(known)))

    def _ratios(self, num_widths: int) -> list[float]:
        beyond = range(len(self._listed) + 1, num_widths + 1)
        return self._listed[:num_widths] + [self._ratio(width) for width in beyond]

    def _run_width(self, width: int) -> int:
        return run_width(width, self.widths)


def marginal_times(times_s: Sequence[float], beside: Beside) -> list[float]:
    """The time of passes that others share, as one text counts it, by its own rows from 1 on.

    One more row pays if it yields more tokens in the time that it adds than the whole pass yields in that time. So
    the time that it adds counts in full; of the pass with one row of the text, the time per token of all texts.

    times_s: Seconds of passes by all of their rows, from 1 on.
    """
    first_s = times_s[beside.num_rows]
    token_s = first_s / (beside.num_tokens + 1)
    return [token_s + each - first_s for each in times_s[beside.num_rows :]]


def _interpolated(ratios: Mapping[int, float]) -> list[float]:
    """Ratios from width 1 on, from the nearest narrower and wider widths that were measured."""
    widths = sorted(ratios)
    found = []
    for low, high in pairwise(widths):
        shares = (i / (high - low) for i in range(high - low))
        found += [(1 - share) * ratios[low] + share * ratios[high] for share in shares]
    return [*found, ratios[widths[-1]]]


def pass_costs(taken_s: PassTimes, widths: Sequence[int] = ()) -> PassCosts:
    """Costs from seconds by width, 1 among them; a wider pass never counts as cheaper than a narrower one."""
    ratios, highest = {}, 1.0
    for width in sorted(taken_s):
        highest = ratios[width] = max(highest, taken_s[width] / taken_s[1])
    return PassCosts(ratios, taken_s[1], widths=widths)


_NUM_DEVIATIONS = 1.96  # that 95 of 100 errors lie within
# As a share; a gain that may be further off than this was not measured. Gains of several answers to one prompt
# differ by as much on a busy machine, though what passes take is known better.
_MAX_ERROR = 0.06
# With fewer passes there is nothing to compare.
_MIN_PASSES = 4


@dataclass(frozen=True, slots=True)
class Gain:
    """The speed of one answer relative to plain decoding; another answer to its prompt may differ by 6 %."""

    value: float

    @property
    def is_shown(self) -> bool:
        """True if drafting helped by more than answers differ."""
        return self.value > 1.0 + _MAX_ERROR

    @property
    def is_loss(self) -> bool:
        """True if drafting lost more time than answers differ."""
        return self.value < 1.0 - _MAX_ERROR


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
    return Gain(value) if _NUM_DEVIATIONS * unsure <= _MAX_ERROR else None
