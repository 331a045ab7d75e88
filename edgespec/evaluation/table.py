"""A benchmark's document as a table for a terminal."""

from collections.abc import Iterator

from edgespec.evaluation import figures
from edgespec.evaluation.document import OWN_NAME, BenchDocument, Category, PeerCategory, RatioInterval
from edgespec.system.printable import printable

_HEAD = ("plain", "speculative", "ratio", "95% interval", "tokens/pass", "accepted", "rounds by source")
_WIDTHS = (7, 11, 5, 12, 11, 5, 0)
_MOST_POSITIONS = 12


def table(document: BenchDocument) -> str:
    """The document as lines for a terminal."""
    if not document["categories"]:
        return "nothing was decoded: no answer went beyond its first pass; allow more with --max-tokens"
    rows: list[tuple[str, ...]] = [("tokens/s", *_HEAD)]
    for name, row in document["categories"].items():
        plain, fast = row["plain_tokens_per_second"], row["speculative_tokens_per_second"]
        rows.append((name, f"{plain:.1f}", f"{fast:.1f}", *_cells(row)))
        for peer in document["peers"]:  # with its speed in the column of speculation
            if own := peer["by_category"].get(name):
                speed = f"{own['tokens_per_second']:.1f}"
                rows.append((f"  {figures.peer_label(peer)}", "", speed, *_cells(own)))
    width = max(len(name) for name, *_ in rows)
    lines = [
        "  ".join([f"{name:{width}}", *(f"{cell:>{most}}" for cell, most in zip(cells, _WIDTHS, strict=True))])
        for name, *cells in rows
    ]
    if verdict := figures.verdict_text(document):
        lines = [verdict, "", *lines]
    lines += [*_verdict_lines(document), *_peer_lines(document), *_more_lines(document)]
    return "\n".join(printable(line, keep="") for line in lines)


def _cells(row: Category | PeerCategory) -> tuple[str, ...]:
    """Its ratio to plain decoding, and how it drafted."""
    return (
        f"{row['ratio']:.3f}",
        figures.interval_text(row["ratio_interval"]),
        _number(row["tokens_per_pass"], 2),
        figures.percent_text(row["acceptance_rate"]),
        figures.rounds_by_source(row["sources"]),
    )


def _verdict_lines(document: BenchDocument) -> Iterator[str]:
    mean = f"mean ratio {_number(document['mean_ratio'], 3)}{_bracket(document['mean_ratio_interval'])}"
    worst = document["worst"]
    mean += f", worst {_number(document['worst_ratio'], 3)}{_bracket(document['worst_ratio_interval'])}"
    yield mean + (f" in {worst['category']}" if worst else "")
    if drafter := document.get("drafter"):
        yield f"speculative decoding with the drafter {drafter}"
    yield from filter(None, (figures.decided_text(document), figures.slower_prompts_text(document)))
    if found := document["ratios"]:
        half = figures.middle_half(found)
        yield f"median of {found['count']} answers {found['median']:.3f}; the middle half of them is within {half}"
    if ratio := document["ratio_in_passes"]:
        yield f"counting only passes and drafts, without text and handover: {ratio:.3f}"
    yield from filter(None, (figures.texts_text(document), figures.setup_text(document)))


def _bracket(interval: RatioInterval) -> str:
    return f" ({figures.interval_text(interval)})" if interval else ""


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _peer_lines(document: BenchDocument) -> Iterator[str]:
    for peer in document["peers"]:
        interval = _bracket(peer["mean_ratio_interval"])
        speed = (
            f"{figures.ratio_text(peer['mean_ratio'])}{interval} of plain" if peer["mean_ratio"] else "no speed"
        )
        over_it = peer["speculative_ratio"]
        if over_it and peer["name"] == OWN_NAME:
            interval = _bracket(peer["speculative_ratio_interval"])
            speed += f"; speculative is {figures.ratio_text(over_it)}{interval} of it"
        failure = f"; {peer['failure']}" if peer["failure"] else ""
        yield (
            f"{peer['name']} {peer['version']} ({peer['way']}): {speed}, {peer['same_answers']} of "
            f"{peer['answers']} answers equal, {figures.size_text(peer['peak_rss_bytes'])}{failure}"
        )
    if any(peer["name"] == OWN_NAME for peer in document["peers"]):
        # docs/log/evaluation.md
        yield "what is loaded first may take up to 12 % longer; to see it, exchange --drafter and --compare"


def _more_lines(document: BenchDocument) -> Iterator[str]:
    if (is_deterministic := document.get("deterministic")) is not None:
        mode, way = ("on", "off: --no-deterministic") if is_deterministic else ("off", "on: --deterministic")
        yield f"deterministic mode is {mode}; to measure with it {way}"
    first = document["time_to_first_token_s"]
    plain, speculative = (figures.time_text(each) for each in (first["plain"], first["speculative"]))
    yield f"time to the first token, median: {plain} plain, {speculative} speculative"
    if counts := figures.drafted_positions(document["acceptance_by_position"]):
        shares = " ".join(f"{kept / drafted:.0%}" for drafted, kept in counts[:_MOST_POSITIONS])
        yield f"drafted tokens accepted, by position in the draft: {shares}"
    if memory := document.get("memory"):
        peak = figures.size_text(memory["process_peak_rss_bytes"])
        yield f"peak memory of this process, models included: {peak}"
