"""Figures of several answers, added up, and a summary of ratios. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

from edgespec.evaluation.document import AnswerRecord, Position, Summary


@dataclass(slots=True)
class Tally:
    """Decoding in one way. The first pass of an answer reads the prompt and is not decoding."""

    tokens: int = 0
    passes: int = 0
    first_tokens_s: list[float] = field(default_factory=list)
    sources: dict[str, dict[str, int]] = field(default_factory=dict)
    positions: list[Position] = field(default_factory=list)
    widths: dict[int, tuple[int, float]] = field(default_factory=dict)  # passes and their seconds

    def add(self, answer: AnswerRecord, *, is_cold: bool) -> None:
        """Count an answer. Its time to the first token counts if nothing of its prompt was cached."""
        if passes := answer.get("passes", 0):
            self.tokens += answer["decoded"]
            self.passes += passes
        if is_cold and answer["first_token_s"]:
            self.first_tokens_s.append(answer["first_token_s"])
        for name, counts in answer.get("sources", {}).items():
            before = self.sources.get(name, {})
            self.sources[name] = {key: before.get(key, 0) + count for key, count in counts.items()}
        positions = answer.get("positions", [])
        missing = len(positions) - len(self.positions)
        self.positions += [{"drafted": 0, "kept": 0} for _ in range(missing)]
        for position, added in zip(self.positions, positions, strict=False):
            position["drafted"] += added["drafted"]
            position["kept"] += added["kept"]
        for width, each in answer.get("widths", {}).items():
            passes, seconds = self.widths.get(width, (0, 0.0))
            self.widths[width] = passes + each["passes"], seconds + each["seconds"]

    def count(self, name: str) -> int:
        """The sum over all sources of one of their counts, such as accepted."""
        return sum(counts.get(name, 0) for counts in self.sources.values())

    @property
    def first_token_s(self) -> float | None:
        return median(self.first_tokens_s) if self.first_tokens_s else None


def tally(answers: Sequence[tuple[AnswerRecord, bool]]) -> Tally:
    """The figures of answers, each with whether nothing of its prompt was cached."""
    added = Tally()
    for answer, is_cold in answers:
        added.add(answer, is_cold=is_cold)
    return added


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
