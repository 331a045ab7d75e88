"""How many tokens to draft next, from what drafting has cost and yielded so far.

Knows nothing of who drafts or what.
"""

from typing import Protocol

# A row more in a pass costs about a quarter of a step on a CPU until it has been measured (docs/log.md).
_ROW_COST = 0.25
_MEMORY = 0.95  # weight that the past keeps at each draft that is judged
_COST_MEMORY = 0.85
# Before anything is known: as if two tokens of three had been kept.
_PRIOR_TRIED, _PRIOR_KEPT = 3.0, 2.0
_POOLED_WEIGHT = 4.0  # how many trials of its own make a position count as much as all of them
_FIRST_PAUSE, _LONGEST_PAUSE = 4, 64


class DraftLength(Protocol):
    def choose(self) -> int:
        """The number of tokens to ask for next; 0 is plain decoding."""
        ...

    def observe(self, num_draft: int, num_accepted: int, draft_s: float, verify_s: float) -> None:
        """What the last round drafted and kept, and what it took."""
        ...


class FixedLength:
    """The same number always, for reproducible runs and comparisons."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def choose(self) -> int:
        return self._num_tokens

    def observe(self, num_draft: int, num_accepted: int, draft_s: float, verify_s: float) -> None:
        pass


class MeasuredLength:
    """The length with the most expected tokens per second, none included.

    E(k) = (1 + a₁ + a₁a₂ + … ) / (verify cost of k + 1 rows + draft cost of k tokens), with running averages
    of the acceptance aᵢ of each position and of the costs (Leviathan et al., 2023, section 3.3, with measured
    costs). When no drafting is best it is tried again after a pause that doubles while it fails.
    """

    def __init__(self, longest: int = 8) -> None:
        self._tried = [0.0] * longest  # discounted counts of drafts that reached a position
        self._kept = [0.0] * longest
        self._prior = 1.0
        self._verify_s: dict[int, float] = {}
        self._draft_s_per_token = 0.0
        self._pause = _FIRST_PAUSE
        self._waited = 0
        self._num_rounds = 0

    def choose(self) -> int:
        best = self._best()
        if best > 0:
            self._pause, self._waited = _FIRST_PAUSE, 0
            return best
        self._waited += 1
        if self._waited < self._pause:
            return 0
        self._pause, self._waited = min(2 * self._pause, _LONGEST_PAUSE), 0
        return 1

    def observe(self, num_draft: int, num_accepted: int, draft_s: float, verify_s: float) -> None:
        self._num_rounds += 1
        if self._num_rounds == 1:
            return  # the prompt is read in this pass
        width = num_draft + 1
        self._verify_s[width] = _averaged(self._verify_s.get(width), verify_s)
        if num_draft:
            self._draft_s_per_token = _averaged(self._draft_s_per_token or None, draft_s / num_draft)
            self._judge(num_draft, num_accepted)

    def _judge(self, num_draft: int, num_accepted: int) -> None:
        self._tried = [_MEMORY * tried for tried in self._tried]
        self._kept = [_MEMORY * kept for kept in self._kept]
        self._prior *= _MEMORY
        # Positions past the first rejection were not judged: they say nothing.
        for i in range(min(num_accepted + 1, num_draft, len(self._tried))):
            self._tried[i] += 1
            self._kept[i] += i < num_accepted
        if num_accepted:
            self._pause = 1  # a probe that succeeds is followed up at once

    def _acceptance(self) -> list[float]:
        """By position; those that were seldom reached lean on all of them."""
        prior_kept, prior_tried = _PRIOR_KEPT * self._prior, _PRIOR_TRIED * self._prior
        pooled = (sum(self._kept) + prior_kept) / (sum(self._tried) + prior_tried)
        pairs = zip(self._kept, self._tried, strict=True)
        return [(kept + _POOLED_WEIGHT * pooled) / (tried + _POOLED_WEIGHT) for kept, tried in pairs]

    def _best(self) -> int:
        best, best_rate = 0, 1.0 / self._pass_s(1)
        expected = reached = 1.0
        for num_draft, chance in enumerate(self._acceptance(), start=1):
            reached *= chance
            expected += reached
            rate = expected / (self._pass_s(num_draft + 1) + num_draft * self._draft_s_per_token)
            if rate > best_rate:
                best, best_rate = num_draft, rate
        return best

    def _pass_s(self, width: int) -> float:
        """Seconds of a pass, from the nearest narrower and wider ones that were measured."""
        if width in self._verify_s or not self._verify_s:
            return self._verify_s.get(width, _row_factor(width))
        narrower = [w for w in self._verify_s if w < width]
        wider = [w for w in self._verify_s if w > width]
        if narrower and wider:
            low, high = max(narrower), min(wider)
            share = (width - low) / (high - low)
            return (1 - share) * self._verify_s[low] + share * self._verify_s[high]
        nearest = max(narrower) if narrower else min(wider)
        return self._verify_s[nearest] * _row_factor(width) / _row_factor(nearest)


def _row_factor(width: int) -> float:
    return 1.0 + _ROW_COST * (width - 1)


def _averaged(old: float | None, new: float) -> float:
    return new if old is None else _COST_MEMORY * old + (1 - _COST_MEMORY) * new
