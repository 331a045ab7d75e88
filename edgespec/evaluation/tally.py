"""Figures of several answers, added up, and a summary of ratios. Pure."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

from edgespec.engine.answers import Completion
from edgespec.evaluation.document import Position, Summary


@dataclass(slots=True)
class Tally:
    """Decoding in one way. The first pass of an answer reads the prompt and is not decoding."""

    tokens: int = 0
    seconds: float = 0.0
    passes: int = 0
    accepted: float = 0.0
    drafted: float = 0.0
    first_tokens_s: list[float] = field(default_factory=list)
    sources: dict[str, dict[str, int]] = field(default_factory=dict)
    positions: list[Position] = field(default_factory=list)
    widths: dict[int, tuple[int, float]] = field(default_factory=dict)  # passes and their seconds

    def add(self, answer: Completion, *, is_cold: bool) -> None:
        """Count an answer. Its time to the first token counts if nothing of its prompt was cached."""
        stats = answer.stats
        if stats.decode_tokens_per_second:
            self.tokens += stats.num_decoded
            self.seconds += stats.num_decoded / stats.decode_tokens_per_second
            self.passes += stats.passes - 1
        if is_cold and stats.time_to_first_token_s:
            self.first_tokens_s.append(stats.time_to_first_token_s)
        self.accepted += stats.num_accepted
        self.drafted += stats.num_drafted
        for name, counts in stats.sources.items():
            before = self.sources.get(name, {})
            self.sources[name] = {key: before.get(key, 0) + count for key, count in counts.items()}
        missing = len(stats.counts_by_position) - len(self.positions)
        self.positions += [{"drafted": 0, "kept": 0} for _ in range(missing)]
        for position, (drafted, kept) in zip(self.positions, stats.counts_by_position, strict=False):
            position["drafted"] += drafted
            position["kept"] += kept
        for width, (passes, seconds) in stats.widths.items():
            before_passes, before_s = self.widths.get(width, (0, 0.0))
            self.widths[width] = before_passes + passes, before_s + seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def first_token_s(self) -> float | None:
        return median(self.first_tokens_s) if self.first_tokens_s else None


@dataclass(slots=True)
class Tallies:
    total: Tally = field(default_factory=Tally)
    by_category: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))

    def add(self, category: str, answer: Completion, *, is_cold: bool) -> None:
        self.total.add(answer, is_cold=is_cold)
        self.by_category[category].add(answer, is_cold=is_cold)


def summary(values: Sequence[float]) -> Summary | None:
    """Count, extremes, median and quartiles; None without values."""
    if not values:
        return None
    low, middle, high = quantiles(values, method="inclusive") if len(values) > 1 else 3 * [values[0]]
    return {
        "count": len(values),
        "min": min(values),
        "quartile_1": low,
        "median": middle,
        "quartile_3": high,
        "max": max(values),
    }
