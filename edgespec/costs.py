"""What a pass of the target takes, by how many tokens it runs and how many are held before them.

Knows nothing of who drafts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import numpy as np

from edgespec.types import Decoder, append

PassTimes = Mapping[int, float]  # seconds by width

# A row more costs about a quarter of a step on a CPU until it has been measured (docs/log.md).
_ROW_COST = 0.25
_SPEED_MEMORY, _RATIO_MEMORY = 0.8, 0.97
# A pass that took this many times what was foreseen was disturbed: by another program, a wider cache.
_DISTURBED = 2.0

_WIDEST = 64
_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
_DRAFT_MEMORY = 0.85
_PAST_TOKENS = 64
_MEASURE_S = 1.0
_ROUNDS = (2, 7)  # at least and at most


class HeldCosts(NamedTuple):
    """What attention to the tokens that are held adds to a pass.

    base: tokens held where passes were measured without it.
    added: for each token held beyond, by the width of the pass from 0 on, in steps of one token at the base.
    """

    base: int = 0
    added: tuple[float, ...] = (0.0,)

    @classmethod
    def between(cls, base: int, near_s: PassTimes, far: int, far_s: PassTimes) -> "HeldCosts":
        """From what passes take behind base tokens and behind far, which may know fewer widths."""
        near, behind = measured(near_s), measured(far_s)
        steps = (far - base) * near_s[1]
        widths = sorted(far_s)
        known = [max(0.0, behind.of(width) - near.of(width)) / steps for width in widths]
        if len(widths) > 1:  # each token of a pass looks at what is held
            slope = max(0.0, known[-1] - known[-2]) / (widths[-1] - widths[-2])
            widths, known = [*widths, _WIDEST], [*known, known[-1] + slope * (_WIDEST - widths[-1])]
        return cls(base, tuple(np.interp(range(_WIDEST + 1), widths, known).tolist()))

    def of(self, width: int, num_held: int) -> float:
        """In steps of one token at the base."""
        return max(0, num_held - self.base) * self.added[min(width, len(self.added) - 1)]


NOTHING_HELD = HeldCosts()


@dataclass(slots=True)
class PassCosts:
    """Seconds of a pass by its width: a step's, which follows the machine's mood, times a ratio that keeps.

    A machine shared with others is at times a third slower. Were each width averaged for itself, a width last
    run in a slow moment would seem dear; so what all passes share is followed fast and the ratios slowly.

    ratios: of a pass to a pass of one token, by width, behind a short text; 1 has 1.
    step_s: of a pass of one token behind the text of now.
    held: what a longer text adds.
    num_held: tokens of the text of now.
    """

    ratios: dict[int, float] = field(default_factory=lambda: {1: 1.0})
    step_s: float | None = None
    held: HeldCosts = NOTHING_HELD
    num_held: int = 0

    def of(self, width: int) -> float:
        """Seconds of a pass of width tokens; of one relative to a step as long as nothing was measured."""
        return self.ratio(width) * (self.step_s or 1.0)

    def observe(self, width: int, taken_s: float) -> None:
        ratio = self.ratio(width)
        if self.step_s is None:
            self.step_s = taken_s / ratio
            return
        strange = taken_s / (ratio * self.step_s)
        bounded = min(max(strange, 1 / _DISTURBED), _DISTURBED)
        if width in self.ratios:
            self.step_s *= bounded ** (1 - _SPEED_MEMORY)
        if width > 1:
            weight = 1 - _RATIO_MEMORY if width in self.ratios else 1.0
            seen = ratio * bounded**weight
            self.ratios[width] = max(1.0, seen * self._step() - self.held.of(width, self.num_held))

    def ratio(self, width: int) -> float:
        """Of a pass to a step, both behind the text of now."""
        return (self._ratio(width) + self.held.of(width, self.num_held)) / self._step()

    def _step(self) -> float:
        """Of now, in steps behind a short text."""
        return 1.0 + self.held.of(1, self.num_held)

    def _ratio(self, width: int) -> float:
        """Behind a short text, from the nearest narrower and wider ones that were measured."""
        if width in self.ratios:
            return self.ratios[width]
        low = max(w for w in self.ratios if w < width)
        wider = [w for w in self.ratios if w > width]
        if wider:
            high = min(wider)
            share = (width - low) / (high - low)
            return (1 - share) * self.ratios[low] + share * self.ratios[high]
        return self.ratios[low] + self._row_cost(low) * (width - low)

    def _row_cost(self, low: int) -> float:
        """Of a further row behind the widest pass that was measured."""
        return (self.ratios[low] - 1) / (low - 1) if low > 1 else _ROW_COST


@dataclass(slots=True)
class DraftCosts:
    """What a model's draft takes, in steps of its target, so that the machine's mood cancels.

    step: for each token that is drafted.
    row: for each token of the text that it has not read yet.
    """

    step: float
    row: float

    def of(self, num_tokens: int, num_unread: int) -> float:
        # The last token of the text is read by the step that drafts the first.
        return num_tokens * self.step + max(0, num_unread - 1) * self.row

    def observe(self, num_tokens: int, num_unread: int, taken: float) -> None:
        """Correct what is foreseen by what was seen, each part by its share of it."""
        foreseen = self.of(num_tokens, num_unread)
        drafting = num_tokens * self.step / foreseen
        self.step *= correction(taken / foreseen) ** drafting
        self.row *= correction(taken / foreseen) ** (1 - drafting)


def correction(strange: float, count: int = 1) -> float:
    """The factor on what is foreseen, where so many took strange times as long on average."""
    weight = 1 - _DRAFT_MEMORY**count
    return min(max(strange, 1 / _DISTURBED), _DISTURBED) ** weight  # type: ignore[no-any-return]


def measured(taken_s: PassTimes) -> PassCosts:
    """From seconds by width, which hold that of 1. A wider pass never counts as cheaper than a narrower one."""
    ratios, highest = {}, 1.0
    for width in sorted(taken_s):
        highest = ratios[width] = max(highest, taken_s[width] / taken_s[1])
    return PassCosts(ratios, taken_s[1])


def measure(decoder: Decoder) -> PassCosts:
    """Run passes of several widths for about a second, in turn, and take each at its fastest."""
    past = np.arange(min(_PAST_TOKENS, decoder.context_length // 2), dtype=np.int32) % decoder.vocab_size
    widths = [width for width in _WIDTHS if len(past) + width <= decoder.context_length]
    taken_s: dict[int, float] = {}
    started = perf_counter()
    for i in range(_ROUNDS[1] + 1):
        if i > _ROUNDS[0] and perf_counter() - started > _MEASURE_S:
            break
        for width in widths:
            # Another token behind the same past each time, so that nothing but the past is held.
            new = (np.arange(width, dtype=np.int32) + len(past) + i + 1) % decoder.vocab_size
            begun = perf_counter()
            decoder.logits(append(past, new), width)
            if i:  # the first round warms up
                taken_s[width] = min(taken_s.get(width, np.inf), perf_counter() - begun)
    return measured(taken_s)
