"""Figures of several answers, added up, and the spread of figures. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import quantiles

from edgespec.answers import Completion


@dataclass(slots=True)
class Tally:
    """Decoding of one category by one of the two; the first pass of an answer is not decoding."""

    tokens: int = 0
    seconds: float = 0.0
    passes: int = 0
    kept: float = 0.0
    drafted: float = 0.0
    firsts_s: list[float] = field(default_factory=list)
    sources: dict[str, dict[str, int]] = field(default_factory=dict)
    positions: list[list[int]] = field(default_factory=list)  # drafts that reached it, and those kept up to it
    widths: dict[int, tuple[int, float]] = field(default_factory=dict)

    def add(self, answer: Completion, *, is_cold: bool = True) -> None:
        """Count an answer; is_cold says that nothing was held of its prompt, so that its first token counts."""
        stats = answer.stats
        if stats.decode_tokens_per_second:
            self.tokens += stats.num_decoded
            self.seconds += stats.num_decoded / stats.decode_tokens_per_second
            self.passes += stats.passes - 1
        if is_cold and stats.time_to_first_token_s:
            self.firsts_s.append(stats.time_to_first_token_s)
        self.kept += stats.num_accepted
        self.drafted += stats.num_drafted
        self._add_counts(stats.sources, stats.counts_by_position, stats.widths)

    def merge(self, other: "Tally") -> None:
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.passes += other.passes
        self.kept += other.kept
        self.drafted += other.drafted
        self.firsts_s += other.firsts_s
        self._add_counts(other.sources, other.positions, other.widths)

    def _add_counts(
        self,
        sources: Mapping[str, Mapping[str, int]],
        positions: Sequence[Sequence[int]],
        widths: Mapping[int, tuple[int, float]],
    ) -> None:
        for name, counts in sources.items():
            mine = self.sources.setdefault(name, dict.fromkeys(counts, 0))
            for key, count in counts.items():
                mine[key] += count
        self.positions += [[0, 0] for _ in range(len(positions) - len(self.positions))]
        for place, (reached, kept) in zip(self.positions, positions, strict=False):
            place[0] += reached
            place[1] += kept
        for width, (passes, seconds) in widths.items():
            before = self.widths.get(width, (0, 0.0))
            self.widths[width] = before[0] + passes, before[1] + seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Count, extremes, median and quartiles; None of nothing."""
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
