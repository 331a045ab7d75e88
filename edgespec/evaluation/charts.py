"""Charts of a benchmark as SVG text. Pure: figures in, text out.

Widths are shares of the page and heights are pixels, so that letters keep their size on a phone. Colours come from
the page, by class. An XML writer escapes all text.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import floor, log10
from typing import NamedTuple
from xml.etree.ElementTree import Element, SubElement, tostring

from edgespec.evaluation.document import Work
from edgespec.system.printable import one_line, printable

_BAR, _GAP, _ROW = 14, 4, 20
_LABEL_CHARACTERS = 36
_MOST_POSITIONS = 12
_MOST_LANE_PASSES = 14
# Columns of a smaller share have no figure above them.
_LABELLED_SHARE = 0.1
# The longest bar ends here, in percent, so that its figure has room on its right.
_LONGEST = 70.0
_WHOLE = 0.25, 4.0  # intervals within these are drawn whole
_IN_PERCENT = {"x", "x1", "x2", "cx", "width"}


class Bar(NamedTuple):
    """style is the class that colours the bar; text is written beside it."""

    style: str
    value: float
    text: str


class RangeBar(NamedTuple):
    """A figure with its interval, and the range of all values."""

    label: str
    value: float
    inner_low: float
    inner_high: float
    low: float
    high: float


class Point(NamedTuple):
    """PassFigures of one width: their cost in steps, their share of all, and whether they are too few to trust."""

    width: int
    cost: float
    share: float
    is_few: bool = False


def grouped_bars(groups: Mapping[str, Sequence[Bar]], title: str) -> str:
    """A group of horizontal bars under each name, all on one scale that begins at 0."""
    chart = _chart(sum(_ROW + len(bars) * (_BAR + _GAP) + 10 for bars in groups.values()), title)
    most = max((bar.value for bars in groups.values() for bar in bars), default=0.0) or 1.0
    y = 0
    for name, bars in groups.items():
        _text(chart, _short(name), 0, y + 14, "name")
        y += _ROW
        for bar in bars:
            width = _LONGEST * bar.value / most
            _rect(chart, 0, y, width, _BAR, f"bar {bar.style}", f"{name}: {bar.text}")
            _text(chart, bar.text, width, y + _BAR - 3, "figure", dx=6)
            y += _BAR + _GAP
        y += 10
    return _svg(chart)


def ranges(rows: Sequence[RangeBar], title: str) -> str:
    """A dot at each figure, a thick line over its interval and a thin one over all values; 1 is dashed.

    An interval so wide that nothing else could be seen is cut, and ends in an arrow there.
    """
    row_height = 40
    bottom = len(rows) * row_height
    chart = _chart(bottom + 22, title)
    low = min([0.9, *(min(row.low, max(row.inner_low, _WHOLE[0])) for row in rows)])
    high = max([1.1, *(max(row.high, min(row.inner_high, _WHOLE[1])) for row in rows)])

    def across(value: float) -> float:
        return 2 + 96 * (value - low) / (high - low)

    for tick in _ticks(low, high):
        _line(chart, across(tick), 0, across(tick), bottom, "even" if tick == 1 else "grid")
        _text(chart, f"{tick:g}×", across(tick), bottom + 16, "tick", anchor="middle")
    for i, row in enumerate(rows):
        y = i * row_height + 28
        _text(chart, _short(row.label), 0, y - 13, "name")
        _line(chart, across(row.low), y, across(row.high), y, "whisker")
        _line(chart, across(max(row.inner_low, low)), y, across(min(row.inner_high, high)), y, "middle")
        if row.inner_low < low:
            _text(chart, "◀", 0, y + 4, "cut")
        if row.inner_high > high:
            _text(chart, "▶", 100, y + 4, "cut", anchor="end")
        _dot(chart, across(row.value), y, 5, "dot", f"{row.label}: {row.value:.2f}")
    return _svg(chart)


def position_bars(counts: Sequence[tuple[int, int]], title: str) -> str:
    """Bars by position in a draft: the share accepted of the drafts that reached it; paler where few did."""
    counts = [each for each in counts if each[0]][:_MOST_POSITIONS]
    plot, top = 150, 18
    chart = _chart(top + plot + 42, title)
    for share in (0.0, 0.5, 1.0):
        _level(chart, f"{share:.0%}", top + plot * (1 - share))
    most = max((reached for reached, _ in counts), default=1)
    step = 92 / max(len(counts), 4)
    for i, (reached, kept) in enumerate(counts):
        share = kept / reached
        x, y = 8 + i * step, top + plot * (1 - share)
        bar = _rect(chart, x, y, 0.72 * step, plot * share, "bar fast", f"{kept} of {reached} accepted")
        bar.set("opacity", f"{0.35 + 0.65 * reached / most:.2f}")
        _text(chart, f"{100 * share:.0f}", x + 0.36 * step, y - 4, "figure", anchor="middle")
        _text(chart, str(i + 1), x + 0.36 * step, top + plot + 16, "tick", anchor="middle")
    _text(chart, "position in the draft", 50, top + plot + 36, "tick", anchor="middle")
    return _svg(chart)


def pass_costs(curve: Sequence[tuple[int, float]], points: Sequence[Point], title: str) -> str:
    """The cost of a pass by its width, in steps of plain decoding, over how often each width was run.

    curve: Width and estimated cost; may be empty.
    points: Widths that were run.
    """
    plot, bars, top = 170, 60, 30
    chart = _chart(top + plot + bars + 90, title)
    _text(chart, "time of a pass, in passes of one token", 0, 12, "tick")
    widest = max([2, *(width for width, _ in curve), *(point.width for point in points)])
    dearest = max([2.0, *(cost for _, cost in curve), *(point.cost for point in points)]) * 1.05

    def across(width: float) -> float:
        return 9 + 88 * (width - 1) / (widest - 1)

    def down(cost: float) -> float:
        return top + plot * (1 - cost / dearest)

    for tick in _ticks(0, dearest):
        _level(chart, f"{tick:g}×", down(tick))
    end = min(float(widest), dearest)
    _line(chart, across(1), down(1), across(end), down(end), "even")
    for (width, cost), (next_width, next_cost) in pairwise(curve):
        _line(chart, across(width), down(cost), across(next_width), down(next_cost), "curve")
    base = top + plot + 44 + bars
    _text(chart, "share of the passes", 0, base - bars - 12, "tick")
    column = min(7.0, 70 / widest)
    most = max((point.share for point in points), default=1.0) or 1.0
    for point in points:
        height = bars * point.share / most
        x = across(point.width)
        hint = f"{point.width} tokens: {point.cost:.2f} steps, {point.share:.0%} of passes"
        _rect(chart, x - column / 2, base - height, column, height, "bar fast", hint)
        _dot(chart, x, down(point.cost), 4, "dot few" if point.is_few else "dot", hint)
        if point.share >= _LABELLED_SHARE:
            _text(chart, f"{point.share:.0%}", x, base - height - 4, "figure", anchor="middle")
    _line(chart, 0, base, 100, base, "axis")
    for width in range(1, widest + 1, max(1, -(-(widest - 1) // 10))):
        _text(chart, str(width), across(width), base + 16, "tick", anchor="middle")
    _text(chart, "tokens in the pass (the last one and the drafted ones)", 50, base + 36, "tick", anchor="middle")
    return _svg(chart)


def lanes(plain: Sequence[Work], fast: Sequence[Work], title: str) -> str:
    """When each lane worked on the same tokens: plain decoding above, speculation below, on one time scale.

    Each block of a target lane is a pass and holds the number of tokens that it yielded.
    """
    slow, shown, num_tokens = _window(plain, fast)
    rows: list[tuple[str, str, Sequence[Work]]] = [("plain decoding", "plain", slow)]
    for lane in dict.fromkeys(["target", *(each["lane"] for each in shown)]):
        mine = [each for each in shown if each["lane"] == lane]
        rows.append((f"speculative decoding: {lane}", "fast" if lane == "target" else "draft", mine))
    until = max([1e-9, *(each["end_s"] for _, _, row in rows for each in row)])
    chart = _chart(len(rows) * 56 + 26, title)
    for i, (label, style, row) in enumerate(rows):
        y = i * 56
        _text(chart, _short(label), 0, y + 13, "name")
        _rect(chart, 0, y + 20, 100, 26, "idle")
        for each in row:
            taken_s = each["end_s"] - each["start_s"]
            x, width = 100 * each["start_s"] / until, 100 * taken_s / until
            hint = f"{each['what']}: {each['num_tokens']} tokens, {1e3 * taken_s:.1f} ms"
            _rect(chart, x, y + 20, max(width - 0.25, 0.1), 26, f"bar {style}", hint)
            if style == "fast" and width > 3.2:
                _text(chart, str(each["num_tokens"]), x + width / 2, y + 37, "inside", anchor="middle")
    y = len(rows) * 56
    _line(chart, 0, y, 100, y, "axis")
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        _text(chart, f"{1e3 * until * share:.0f} ms", 100 * share, y + 16, "tick", anchor=anchor)
    chart.set("data-tokens", str(num_tokens))
    return _svg(chart)


def _window(plain: Sequence[Work], fast: Sequence[Work]) -> tuple[list[Work], list[Work], int]:
    """Plain decoding and a few passes of speculation, with about the mean yield of all, on the same tokens."""
    passes = [each for each in fast if each["lane"] == "target"]
    yielded = [0, *accumulate(each["num_tokens"] for each in passes)]
    length = min(_MOST_LANE_PASSES, len(passes))
    mean = yielded[-1] / max(len(passes), 1)

    def deviation(first: int) -> float:
        return abs((yielded[first + length] - yielded[first]) / max(length, 1) - mean)

    first = min(range(len(passes) - length + 1), key=deviation)
    before, num_tokens = yielded[first], yielded[first + length] - yielded[first]
    reached = [0, *accumulate(each["num_tokens"] for each in plain)]
    slow = [each for each, count in zip(plain, reached, strict=False) if before <= count < before + num_tokens]
    if not passes:
        return _from_zero(slow, 0.0), [], 0
    since_s = passes[first - 1]["end_s"] if first else 0.0
    until_s = passes[first + length - 1]["end_s"]
    shown = [each for each in fast if since_s < each["end_s"] and each["start_s"] < until_s]
    ended_s = [each["end_s"] for each in plain if slow and each["end_s"] <= slow[0]["start_s"]]
    return _from_zero(slow, max(ended_s, default=0.0)), _from_zero(shown, since_s), num_tokens


def _from_zero(works: Sequence[Work], since_s: float) -> list[Work]:
    return [
        {**each, "start_s": max(0.0, each["start_s"] - since_s), "end_s": each["end_s"] - since_s}
        for each in works
    ]


def _chart(height: float, title: str) -> Element:
    title = printable(title, keep="")
    chart = Element("svg", {"width": "100%", "height": f"{height:.0f}", "role": "img", "aria-label": title})
    SubElement(chart, "title").text = title
    return chart


def _add(chart: Element, tag: str, style: str, places: Mapping[str, float], hint: str = "") -> Element:
    element = SubElement(chart, tag, {"class": style})
    for name, value in places.items():
        element.set(name, f"{value:.3f}%" if name in _IN_PERCENT else f"{value:.1f}")
    if hint:
        SubElement(element, "title").text = printable(hint, keep="")
    return element


def _rect(chart: Element, x: float, y: float, width: float, height: float, style: str, hint: str = "") -> Element:
    return _add(chart, "rect", style, {"x": x, "y": y, "width": width, "height": height, "rx": 2}, hint)


def _line(chart: Element, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
    _add(chart, "line", style, {"x1": x1, "y1": y1, "x2": x2, "y2": y2})


def _level(chart: Element, text: str, y: float) -> None:
    _line(chart, 0, y, 100, y, "grid")
    _text(chart, text, 0, y - 4, "tick")


def _dot(chart: Element, x: float, y: float, radius: float, style: str, hint: str) -> None:
    _add(chart, "circle", style, {"cx": x, "cy": y, "r": radius}, hint)


def _text(
    chart: Element, text: str, x: float, y: float, style: str, *, anchor: str = "start", dx: float = 0
) -> None:
    element = _add(chart, "text", style, {"x": x, "y": y, "dx": dx})
    element.set("text-anchor", anchor)
    element.text = printable(text, keep="")


def _ticks(low: float, high: float) -> list[float]:
    """Four or five round numbers from low to high."""
    wanted = (high - low) / 4
    power = 10.0 ** floor(log10(wanted))
    step = next(power * each for each in (1, 2, 2.5, 5, 10, 20) if power * each >= wanted)
    first = int(low / step) + (low > 0 and int(low / step) * step < low)
    return [round(i * step, 10) for i in range(first, int(high / step + 1e-9) + 1)]


def _short(name: str) -> str:
    return one_line(name, _LABEL_CHARACTERS)


def _svg(chart: Element) -> str:
    return tostring(chart, encoding="unicode")
