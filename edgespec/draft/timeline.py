"""When each lane worked, and on what: as a share, as a Chrome trace, as a picture in text or in SVG. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from math import floor, log10
from statistics import median
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element, SubElement, tostring

_FULL, _PART, _IDLE = "█", "▒", "·"
_STRIP = 24  # usual works of the first lane, so that a number of tokens fits into each
_LEFT, _PLOT, _ROW = 90, 900, 24  # pixels

# Kinds of work of a drafter's lane.
DRAFT, DRAFT_AHEAD, HEDGE = "draft", "draft ahead", "hedge"
_COLOURS = {DRAFT: "#c47a12", DRAFT_AHEAD: "#2f78bd", HEDGE: "#7b5a96"}


class Interval(NamedTuple):
    """Work of a lane, in seconds of a clock that all lanes share."""

    lane: str
    work: str
    start_s: float
    end_s: float
    num_tokens: int = 0


def schedule_of(intervals: Iterable[Interval]) -> str:
    """hedged if a drafter has drafted alternatives, pipelined if it has worked ahead, otherwise serial."""
    works = {interval.work for interval in intervals}
    return "hedged" if HEDGE in works else "pipelined" if DRAFT_AHEAD in works else "serial"


def overlap(intervals: Sequence[Interval]) -> float:
    """Share of the time, from the first start to the last end, in which at least two lanes work."""
    if not intervals:
        return 0.0
    edges = sorted(
        edge for spans in _by_lane(intervals).values() for start, end in spans for edge in ((start, 1), (end, -1))
    )
    shared_s, working, before = 0.0, 0, edges[0][0]
    for time, change in edges:
        shared_s += (time - before) * (working >= 2)
        working, before = working + change, time
    whole_s = edges[-1][0] - edges[0][0]
    return shared_s / whole_s if whole_s > 0 else 0.0


def chrome_trace(intervals: Sequence[Interval]) -> dict[str, Any]:
    """A document of the Trace Event Format (chrome://tracing, Perfetto) with a thread for each lane.

    Times are microseconds from the first start.
    """
    tids = {lane: tid for tid, lane in enumerate(dict.fromkeys(each.lane for each in intervals))}
    first = min((each.start_s for each in intervals), default=0.0)
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": lane}}
        for lane, tid in tids.items()
    ]
    events += [
        {
            "name": each.work,
            "cat": each.lane,
            "ph": "X",
            "pid": 0,
            "tid": tids[each.lane],
            "ts": round(1e6 * (each.start_s - first), 1),
            "dur": round(1e6 * (each.end_s - each.start_s), 1),
            "args": {"num_tokens": each.num_tokens},
        }
        for each in sorted(intervals, key=lambda each: each.start_s)
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def latest(intervals: Sequence[Interval], lane: str, num_intervals: int) -> list[Interval]:
    """The work of all lanes since one lane began the last num_intervals of its intervals."""
    starts = sorted(each.start_s for each in intervals if each.lane == lane)[-num_intervals:]
    since = starts[0] if starts else 0.0
    return [each._replace(start_s=max(each.start_s, since)) for each in intervals if each.end_s > since]


def picture(intervals: Sequence[Interval], width: int = 72) -> str:
    """A line of width cells for each lane, one with their length and overlap, a legend; empty without intervals.

    A lane works throughout `█`, for a part of `▒` and not at all in `·`.
    """
    if not intervals:
        return ""
    first = min(each.start_s for each in intervals)
    cell_s = max((max(each.end_s for each in intervals) - first) / width, 1e-9)
    label = max(len(each.lane) for each in intervals)
    lines = []
    for lane, spans in _by_lane(intervals).items():
        shares = [0.0] * width
        for start, end in spans:
            low, high = (start - first) / cell_s, (end - first) / cell_s
            for cell in range(int(low), min(int(high) + 1, width)):
                shares[cell] += max(0.0, min(high, cell + 1) - max(low, cell))
        # Rounding errors are no pause.
        cells = (_FULL if share > 0.999 else _PART if share > 0.001 else _IDLE for share in shares)
        lines.append(f"{lane:<{label}} {''.join(cells)}")
    lines.append(
        f"{'':<{label}} {1e3 * cell_s * width:.0f} ms, {overlap(intervals):.0%} of it in both lanes at once"
    )
    lines.append(f"{'':<{label}} {_FULL} at work  {_PART} for a part of the time  {_IDLE} waiting")
    return "\n".join(lines)


def svg_picture(intervals: Sequence[Interval]) -> str:
    """An SVG document with a row for each lane, in strips of one scale of time; time without work is left out."""
    spent = [each.end_s - each.start_s for each in intervals if each.lane == intervals[0].lane]
    length_s = max(_STRIP * median(spent or [1.0]), 1e-6)
    strips: list[list[Interval]] = []
    for each in sorted(intervals, key=lambda each: each.start_s):
        if not strips or each.end_s > strips[-1][0].start_s + length_s:
            strips.append([])
        strips[-1].append(each)
    colours = {each.work: "#34495e" if each.lane == "target" else "#6ea8e0" for each in intervals}
    colours |= {work: colour for work, colour in _COLOURS.items() if work in colours}
    titled = []
    for strip in strips:
        since_ms = 1e3 * (strip[0].start_s - strips[0][0].start_s)
        title = f"from {since_ms:.0f} ms, for {1e3 * length_s:.0f} ms"
        titled.append(Strip(title, strip[0].start_s, strip))
    return draw_strips(titled, length_s, colours)


class Strip(NamedTuple):
    """A part of a picture: lanes from begin_s on, below a title."""

    title: str
    begin_s: float
    intervals: Sequence[Interval]


def draw_strips(strips: Sequence[Strip], length_s: float, colours: Mapping[str, str], title: str = "") -> str:
    """An SVG document of strips below each other, each with a row for every lane, on one scale of time.

    A piece of work has the number of its tokens in it, and says more where a pointer rests on it.

    colours: Of the kinds of work.
    """
    lanes = list(dict.fromkeys(each.lane for strip in strips for each in strip.intervals))
    height = len(lanes) * _ROW + 34
    size = {"width": f"{_LEFT + _PLOT + 10}", "height": f"{height * len(strips) + 90}"}
    svg = Element("svg", size, xmlns="http://www.w3.org/2000/svg", style="font: 12px system-ui, sans-serif")
    SubElement(svg, "title").text = title
    SubElement(svg, "rect", width="100%", height="100%", fill="#ffffff")
    _svg_text(svg, title, 10, 20, "#222222")
    left = 10.0
    for work, colour in colours.items():
        _svg_text(svg, f"■ {work}", left, 40, colour)
        left += 40 + 7 * len(work)
    for number, strip in enumerate(strips):
        top = 50 + number * height
        _svg_text(svg, strip.title, _LEFT, top + 14, "#555555")
        for row, lane in enumerate(lanes):
            _svg_text(svg, lane, 10, top + 35 + row * _ROW, "#222222")
            _svg_box(svg, _LEFT, _PLOT, top + 20 + row * _ROW, "#f1f3f5")
        for each in strip.intervals:
            left, y = _PLOT * (each.start_s - strip.begin_s) / length_s, top + 20 + lanes.index(each.lane) * _ROW
            width = min(_PLOT * (each.end_s - each.start_s) / length_s, _PLOT - left)
            box = _svg_box(svg, _LEFT + left, max(width - 1, 0.5), y, colours[each.work])
            count = f"{each.num_tokens} tokens, " if each.num_tokens else ""
            SubElement(box, "title").text = f"{each.work}: {count}{1e3 * (each.end_s - each.start_s):.1f} ms"
            if each.num_tokens and width > 16:
                _svg_text(svg, str(each.num_tokens), _LEFT + left + 4, y + 14, "#ffffff")
    _svg_axis(svg, length_s, 60 + len(strips) * height)
    return tostring(svg, encoding="unicode")


def _svg_axis(svg: Element, length_s: float, y: float) -> None:
    """Times at a round distance, of which four to nine fit."""
    length_ms = 1e3 * length_s
    unit = 10.0 ** floor(log10(length_ms / 4))
    step_ms = next(unit * factor for factor in (5, 2, 1) if length_ms / (unit * factor) >= 4)
    for i in range(int(length_ms / step_ms) + 1):
        x = _LEFT + _PLOT * i * step_ms / length_ms
        _svg_text(svg, f"╵ {i * step_ms:g} ms", x, y, "#555555")


def _svg_box(svg: Element, x: float, width: float, y: float, colour: str) -> Element:
    return SubElement(svg, "rect", x=f"{x:.1f}", y=f"{y}", width=f"{width:.1f}", height="20", fill=colour)


def _svg_text(svg: Element, text: str, x: float, y: float, colour: str) -> None:
    SubElement(svg, "text", x=f"{x:.1f}", y=f"{y:.1f}", fill=colour).text = text


def _by_lane(intervals: Iterable[Interval]) -> dict[str, list[tuple[float, float]]]:
    """Disjoint spans in which each lane works, in order of time; lanes in order of their first interval."""
    lanes: dict[str, list[tuple[float, float]]] = {}
    for each in intervals:
        lanes.setdefault(each.lane, []).append((each.start_s, each.end_s))
    for lane, spans in lanes.items():
        joined: list[tuple[float, float]] = []
        for start, end in sorted(spans):
            if joined and start <= joined[-1][1]:
                start, end = joined[-1][0], max(end, joined.pop()[1])
            joined.append((start, end))
        lanes[lane] = joined
    return lanes
