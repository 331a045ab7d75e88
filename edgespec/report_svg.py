"""Charts of a benchmark as SVG text. Pure: figures in, text out.

Widths are shares of whatever room the page has and heights are pixels, so that letters keep their size on a phone;
colours come from the page, by class. Text is escaped by the XML writer.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element, SubElement, tostring

Intervals = Sequence[Mapping[str, Any]]

_BAR, _GAP, _ROW = 14, 4, 20
_LABEL_CHARACTERS = 36
_MOST_POSITIONS = 12
_MOST_LANE_PASSES = 14
# Columns of less are not told in figures.
_TOLD_SHARE = 0.1
# Bars end here, so that their figure has room beside them.
_LONGEST = 76.0


class Bar(NamedTuple):
    """A bar of a group: the class that colours it, what it is worth, and what is written beside it."""

    style: str
    value: float
    text: str


class Range(NamedTuple):
    """A figure, its quartiles and its extremes."""

    label: str
    value: float
    quartile_1: float
    quartile_3: float
    low: float
    high: float


class Point(NamedTuple):
    """Passes of a width: seconds in steps, their share of all passes, and whether they are too few to trust."""

    width: int
    cost: float
    share: float
    is_few: bool = False


def grouped_bars(groups: Mapping[str, Sequence[Bar]], title: str) -> str:
    """A group of horizontal bars under each name, all to one scale that begins at 0."""
    rows = [(name, bars) for name, bars in groups.items() if bars]
    height = sum(_ROW + len(bars) * (_BAR + _GAP) + 10 for _, bars in rows)
    chart = _chart(height, title)
    most = max((bar.value for _, bars in rows for bar in bars), default=0.0) or 1.0
    y = 0
    for name, bars in rows:
        _text(chart, _short(name), "0%", y + 14, "name")
        y += _ROW
        for bar in bars:
            width = _LONGEST * bar.value / most
            _rect(chart, 0.0, y, width, _BAR, f"bar {bar.style}", f"{name}: {bar.text}")
            _text(chart, bar.text, _percent(width), y + _BAR - 3, "figure", dx="6")
            y += _BAR + _GAP
        y += 10
    return _written(chart)


def ranges(rows: Sequence[Range], title: str) -> str:
    """A dot at each figure, a thick line over the middle half and a thin one to the extremes; 1 is marked."""
    row_height = 40
    chart = _chart(len(rows) * row_height + 22, title)
    low = min([0.9, *(row.low for row in rows)])
    high = max([1.1, *(row.high for row in rows)])

    def at(value: float) -> float:
        return 2 + 96 * (value - low) / (high - low)

    bottom = len(rows) * row_height
    for tick in _ticks(low, high):
        _line(chart, at(tick), 0, at(tick), bottom, "even" if tick == 1 else "grid")
        _text(chart, f"{tick:g}×", _percent(at(tick)), bottom + 16, "tick", anchor="middle")
    for i, row in enumerate(rows):
        y = i * row_height + 28
        _text(chart, _short(row.label), "0%", y - 13, "name")
        _line(chart, at(row.low), y, at(row.high), y, "whisker")
        _line(chart, at(row.quartile_1), y, at(row.quartile_3), y, "middle")
        dot = SubElement(chart, "circle", {"cx": _percent(at(row.value)), "cy": str(y), "r": "5", "class": "dot"})
        SubElement(dot, "title").text = f"{row.label}: {row.value:.2f}"
    return _written(chart)


def position_bars(counts: Sequence[tuple[int, int]], title: str) -> str:
    """A bar for each drafted position: the share kept of the drafts that reached it; paler where few did."""
    counts = [each for each in counts if each[0]][:_MOST_POSITIONS]
    plot, top = 150, 18
    chart = _chart(top + plot + 24, title)
    for share in (0.0, 0.5, 1.0):
        y = top + plot * (1 - share)
        _line(chart, 0, y, 100, y, "grid")
        _text(chart, f"{share:.0%}", "0%", y - 4, "tick")
    most = max((reached for reached, _ in counts), default=1)
    step = 92 / max(len(counts), 4)
    for i, (reached, kept) in enumerate(counts):
        share = kept / reached
        x = 8 + i * step
        bar = _rect(
            chart, x, top + plot * (1 - share), 0.72 * step, plot * share, "bar fast", f"{kept} of {reached} kept"
        )
        bar.set("opacity", f"{0.35 + 0.65 * reached / most:.2f}")
        centre = _percent(x + 0.36 * step)
        _text(chart, f"{100 * share:.0f}", centre, top + plot * (1 - share) - 4, "figure", anchor="middle")
        _text(chart, str(i + 1), centre, top + plot + 16, "tick", anchor="middle")
    return _written(chart)


def pass_costs(curve: Sequence[tuple[int, float]], points: Sequence[Point], title: str) -> str:
    """What a pass takes by its width, in steps of plain decoding, over how often each width was chosen.

    Args:
        curve: Width and cost as the gate holds them; may be empty.
        points: What passes took and how often each width was chosen.
    """
    plot, bars, top = 170, 60, 12
    chart = _chart(top + plot + bars + 56, title)
    widest = max([2, *(width for width, _ in curve), *(point.width for point in points)])
    dearest = max([2.0, *(cost for _, cost in curve), *(point.cost for point in points)]) * 1.05

    def across(width: float) -> float:
        return 9 + 88 * (width - 1) / (widest - 1)

    def down(cost: float) -> float:
        return top + plot * (1 - cost / dearest)

    for tick in _ticks(0, dearest):
        _line(chart, 0, down(tick), 100, down(tick), "grid")
        _text(chart, f"{tick:g}×", "0%", down(tick) - 4, "tick")
    end = min(float(widest), dearest)
    _line(chart, across(1), down(1), across(end), down(end), "even")
    for (width, cost), (next_width, next_cost) in pairwise(curve):
        _line(chart, across(width), down(cost), across(next_width), down(next_cost), "curve")
    base = top + plot + 28 + bars
    column = min(7.0, 70 / widest)
    most = max((point.share for point in points), default=1.0) or 1.0
    for point in points:
        height = bars * point.share / most
        x = across(point.width)
        hint = f"{point.width} tokens: {point.cost:.2f} steps, {point.share:.0%} of passes"
        _rect(chart, x - column / 2, base - height, column, height, "bar fast", hint)
        style = "dot few" if point.is_few else "dot"
        dot = SubElement(
            chart, "circle", {"cx": _percent(x), "cy": f"{down(point.cost):.1f}", "r": "4", "class": style}
        )
        SubElement(dot, "title").text = hint
        if point.share >= _TOLD_SHARE:
            _text(chart, f"{point.share:.0%}", _percent(x), base - height - 4, "figure", anchor="middle")
    _line(chart, 0, base, 100, base, "axis")
    for width in _whole_ticks(widest):
        _text(chart, str(width), _percent(across(width)), base + 16, "tick", anchor="middle")
    return _written(chart)


def lanes(plain: Intervals, fast: Intervals, title: str) -> str:
    """When each lane worked on the same tokens: plain decoding above, speculation below, to one time scale.

    Each block of a target lane is a pass and holds the number of tokens that it gave.
    """
    slow, shown, num_tokens = _window(plain, fast)
    rows: list[tuple[str, str, Intervals]] = [("plain decoding", "plain", slow)]
    for lane in dict.fromkeys(["target", *(each["lane"] for each in shown)]):
        mine = [each for each in shown if each["lane"] == lane]
        rows.append((f"speculation: {lane}", "fast" if lane == "target" else "draft", mine))
    until = max([1e-9, *(each["end_s"] for _, _, row in rows for each in row)])
    chart = _chart(len(rows) * 56 + 26, title)
    for i, (label, style, row) in enumerate(rows):
        y = i * 56
        _text(chart, _short(label), "0%", y + 13, "name")
        _rect(chart, 0, y + 20, 100, 26, "idle", "")
        for each in row:
            x, width = 100 * each["start_s"] / until, 100 * (each["end_s"] - each["start_s"]) / until
            hint = f"{each['what']}: {each['num_tokens']} tokens, {1e3 * (each['end_s'] - each['start_s']):.1f} ms"
            _rect(chart, x, y + 20, max(width - 0.25, 0.1), 26, f"bar {style}", hint)
            if style == "fast" and width > 3.2:
                _text(chart, str(each["num_tokens"]), _percent(x + width / 2), y + 37, "inside", anchor="middle")
    y = len(rows) * 56
    _line(chart, 0, y, 100, y, "axis")
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        _text(chart, f"{1e3 * until * share:.0f} ms", _percent(100 * share), y + 16, "tick", anchor=anchor)
    chart.set("data-tokens", str(num_tokens))
    return _written(chart)


def _window(plain: Intervals, fast: Intervals) -> tuple[Intervals, Intervals, int]:
    """A few passes of speculation that yield about what all of them do, and as many tokens of plain decoding.

    Times begin anew at 0.
    """
    passes = [each for each in fast if each["lane"] == "target"]
    given = [0, *accumulate(int(each["num_tokens"]) for each in passes)]
    length = min(_MOST_LANE_PASSES, len(passes))
    mean = given[-1] / max(len(passes), 1)

    def strange(first: int) -> float:
        return abs((given[first + length] - given[first]) / max(length, 1) - mean)

    first = min(range(len(passes) - length + 1), key=strange)
    before, num_tokens = given[first], given[first + length] - given[first]
    reached = [0, *accumulate(each["num_tokens"] for each in plain)]
    slow = [each for each, count in zip(plain, reached, strict=False) if before <= count < before + num_tokens]
    if not passes:
        return _from_zero(slow, 0.0), [], 0
    since = passes[first - 1]["end_s"] if first else 0.0
    until = passes[first + length - 1]["end_s"]
    mine = [each for each in fast if since < each["end_s"] and each["start_s"] < until]
    return _from_zero(slow, _since(plain, slow)), _from_zero(mine, since), num_tokens


def _since(plain: Intervals, shown: Intervals) -> float:
    """When the pass before those that are shown ended."""
    return max((each["end_s"] for each in plain if shown and each["end_s"] <= shown[0]["start_s"]), default=0.0)


def _from_zero(intervals: Intervals, since: float) -> Intervals:
    return [
        {**each, "start_s": max(0.0, each["start_s"] - since), "end_s": each["end_s"] - since}
        for each in intervals
    ]


def _chart(height: float, title: str) -> Element:
    chart = Element(
        "svg", {"width": "100%", "height": f"{height:.0f}", "role": "img", "aria-label": _clean(title)}
    )
    SubElement(chart, "title").text = _clean(title)
    return chart


def _rect(chart: Element, x: float, y: float, width: float, height: float, style: str, hint: str) -> Element:
    rect = SubElement(
        chart,
        "rect",
        {
            "x": _percent(x),
            "y": f"{y:.1f}",
            "width": _percent(width),
            "height": f"{height:.1f}",
            "rx": "2",
            "class": style,
        },
    )
    if hint:
        SubElement(rect, "title").text = _clean(hint)
    return rect


def _line(chart: Element, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
    places = {"x1": _percent(x1), "y1": f"{y1:.1f}", "x2": _percent(x2), "y2": f"{y2:.1f}"}
    SubElement(chart, "line", {**places, "class": style})


def _text(
    chart: Element, text: str, x: str, y: float, style: str, *, anchor: str = "start", dx: str | None = None
) -> None:
    places = {"x": x, "y": f"{y:.1f}", "class": style, "text-anchor": anchor}
    SubElement(chart, "text", {**places, **({"dx": dx} if dx else {})}).text = _clean(text)


def _percent(share: float) -> str:
    return f"{share:.3f}%"


def _ticks(low: float, high: float) -> list[float]:
    """Four or five round numbers within."""
    wanted = (high - low) / 4
    power = 10.0 ** _floor_log10(wanted)
    step = next(power * each for each in (1, 2, 2.5, 5, 10) if power * each >= wanted)
    first = int(low / step) + (low > 0 and int(low / step) * step < low)
    return [round(i * step, 10) for i in range(first, int(high / step + 1e-9) + 1)]


def _floor_log10(value: float) -> int:
    return int(f"{value:e}".partition("e")[2])


def _whole_ticks(widest: int) -> list[int]:
    step = max(1, -(-(widest - 1) // 10))
    return list(range(1, widest + 1, step))


def _short(name: str) -> str:
    return name if len(name) <= _LABEL_CHARACTERS else name[: _LABEL_CHARACTERS - 1] + "…"


def _clean(text: str) -> str:
    """XML has no control characters, not even escaped ones."""
    return "".join(each if each.isprintable() else "�" for each in text)


def _written(chart: Element) -> str:
    return tostring(chart, encoding="unicode")
