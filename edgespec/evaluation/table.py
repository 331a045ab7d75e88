"""A benchmark's document as a table for a terminal."""

from collections.abc import Iterator

from edgespec.evaluation import figures
from edgespec.evaluation.document import BenchDocument
from edgespec.system.printable import printable

_HEAD = ("plain", "speculative", "ratio", "middle half", "tokens/pass", "accepted", "rounds by source")
_WIDTHS = (7, 11, 5, 11, 11, 5, 0)
_MOST_POSITIONS = 12


def table(document: BenchDocument) -> str:
    if not document["categories"]:
        return "nothing was decoded: no answer went beyond its first pass; allow more with --max-tokens"
    rows = {"tokens/s": _HEAD}
    for name, row in document["categories"].items():
        rows[name] = (
            f"{row['plain_tokens_per_second']:.1f}",
            f"{row['speculative_tokens_per_second']:.1f}",
            f"{row['ratio']:.2f}",
            figures.middle_half(row.get("ratios")),
            _number(row.get("tokens_per_pass"), 2),
            figures.percent_text(row.get("acceptance_rate")),
            figures.rounds_by_source(row.get("sources", {})),
        )
    width = max(map(len, rows))
    lines = [
        "  ".join([f"{name:{width}}", *(f"{cell:>{most}}" for cell, most in zip(row, _WIDTHS, strict=True))])
        for name, row in rows.items()
    ]
    mean = f"mean ratio {_number(document['mean_ratio'], 3)}, worst {_number(document['worst_ratio'], 3)}"
    if found := document.get("ratios"):
        half = figures.middle_half(found)
        mean += f"; median of {found['count']} answers {found['median']:.3f}, middle half {half}"
    lines += [mean, *_peer_lines(document), *_more_lines(document)]
    return "\n".join(printable(line, keep="") for line in lines)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _peer_lines(document: BenchDocument) -> Iterator[str]:
    for peer in document.get("peers", ()):
        speed = f"{figures.ratio_text(peer['mean_ratio'])} of plain" if peer["mean_ratio"] else "no answers"
        failure = f"; {peer['failure']}" if peer["failure"] else ""
        yield (
            f"{peer['name']} {peer['version']} ({peer['way']}): {speed}, {peer['same_answers']} of "
            f"{peer['answers']} answers equal, {figures.size_text(peer['peak_rss_bytes'])}{failure}"
        )


def _more_lines(document: BenchDocument) -> Iterator[str]:
    if (is_deterministic := document.get("deterministic")) is not None:
        mode, way = ("on", "off: --no-deterministic") if is_deterministic else ("off", "on: --deterministic")
        yield f"deterministic mode is {mode}; to measure with it {way}"
    if first := document.get("time_to_first_token_s"):
        plain, speculative = (figures.time_text(each) for each in (first["plain"], first["speculative"]))
        yield f"time to the first token, median: {plain} plain, {speculative} speculative"
    if counts := figures.drafted_positions(document.get("acceptance_by_position", ())):
        shares = " ".join(f"{kept / drafted:.0%}" for drafted, kept in counts[:_MOST_POSITIONS])
        yield f"drafted tokens accepted, by position in the draft: {shares}"
    if memory := document.get("memory"):
        peak = figures.size_text(memory["process_peak_rss_bytes"])
        yield f"peak memory of this process, models included: {peak}"
