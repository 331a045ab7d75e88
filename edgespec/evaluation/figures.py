"""Figures of a benchmark as text, for its table and its page."""

from collections import Counter
from collections.abc import Mapping, Sequence

from edgespec.config.byte_size import format_bytes
from edgespec.evaluation.document import Position, Summary


def ratio_text(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×"


def time_text(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.1f} ms" if seconds < 0.1 else f"{1e3 * seconds:.0f} ms"


def size_text(num_bytes: float) -> str:
    return format_bytes(num_bytes, decimals=2)


def percent_text(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def middle_half(summary: Summary | None) -> str:
    """The range from the first to the third quartile."""
    return f"{summary['quartile_1']:.2f}–{summary['quartile_3']:.2f}" if summary else ""


def rounds_by_source(sources: Mapping[str, Mapping[str, int]]) -> str:
    """Shares of the rounds that each source drafted, such as "suffix 80%, none 20%"."""
    rounds = Counter({name: counts.get("rounds", 0) for name, counts in sources.items()})
    whole = rounds.total() or 1
    return ", ".join(f"{name} {count / whole:.0%}" for name, count in rounds.most_common())


def drafted_positions(positions: Sequence[Position]) -> list[tuple[int, int]]:
    """Drafts that reached each position and those kept up to it, for positions that any draft reached."""
    return [(each["drafted"], each["kept"]) for each in positions if each["drafted"]]
