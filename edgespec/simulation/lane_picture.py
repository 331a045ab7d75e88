"""A part of a simulated run of target and drafter, and a picture of it as SVG text.

A row for target and one for drafter, on one scale of time.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from math import floor, log10
from typing import NamedTuple
from xml.etree.ElementTree import Element, SubElement, tostring

from edgespec.draft.timeline import Interval
from edgespec.simulation.schedules import Scenario, VirtualLane, decode, virtual_devices

# Before a picture begins, so that what the policy tries first is not in it.
_NUM_SKIPPED_TOKENS = 200
_NUM_STEPS = 16.0  # of plain decoding, for which a picture lasts


class ObservedPass(NamedTuple):
    """A pass of the target, in seconds since the picture began."""

    start_s: float
    end_s: float
    num_accepted: int
    num_rejected: int


class ObservedRun(NamedTuple):
    """One schedule for some time; drafts are when the drafter worked, in order and disjoint."""

    schedule: str
    length_s: float
    passes: tuple[ObservedPass, ...]
    drafts: tuple[tuple[float, float], ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the passes that ended within the picture."""
        return sum(each.num_accepted + 1 for each in self.passes if each.end_s <= self.length_s)

    def intervals(self) -> list[Interval]:
        """The intervals of a Chrome trace, with a lane for the target and one for the drafter."""
        found = [
            Interval(f"{self.schedule}: target", "verify", each.start_s, each.end_s, each.num_accepted + 1)
            for each in self.passes
        ]
        return found + [Interval(f"{self.schedule}: drafter", "draft", start, end) for start, end in self.drafts]


def observe(scenario: Scenario, schedule: str) -> ObservedRun:
    """Run one of SCHEDULES for a while in virtual time, and watch it for some passes."""
    devices = virtual_devices()
    recording = scenario.recording
    skipped = min(_NUM_SKIPPED_TOKENS, recording.num_tokens // 3 if recording else _NUM_SKIPPED_TOKENS)
    passes: list[ObservedPass] = []
    num_tokens, begin_s, length_s = 0, None, _NUM_STEPS * scenario.machine.target_s
    with closing(decode(scenario, schedule, devices)) as blocks:
        for block in blocks:
            num_tokens += len(block.tokens)
            end_s = block.started_s + block.verify_s
            if begin_s is not None:
                rejected = block.num_draft - block.num_accepted
                passes.append(
                    ObservedPass(block.started_s - begin_s, end_s - begin_s, block.num_accepted, rejected)
                )
                if end_s - begin_s >= length_s:
                    break
            elif num_tokens >= skipped:
                begin_s = end_s
    assert begin_s is not None
    assert isinstance(devices.lane, VirtualLane)
    devices.lane.steps()  # a virtual lane works when it is asked
    devices.lane.stop()
    spans = sorted((each.start_s - begin_s, each.end_s - begin_s) for each in devices.lane.intervals)
    cut = ((max(0.0, start_s), min(end_s, length_s)) for start_s, end_s in spans)
    return ObservedRun(schedule, length_s, tuple(passes), tuple(each for each in cut if each[0] < each[1]))


_WIDTH, _LEFT, _ROW, _GAP, _PANEL, _HEAD, _LEGEND = 1040, 84, 26, 6, 96, 22, 56
_PLOT = _WIDTH - _LEFT - 16
_FONT = "font: 13px system-ui, sans-serif"
_PLACE = "PICTURE"


class Kind(NamedTuple):
    """A colour and its meaning."""

    colour: str
    text: str


ACCEPTED = Kind("#2f9e62", "accepted")
REJECTED = Kind("#d6455d", "rejected")
OWN = Kind("#34495e", "the target's own token")
WAITED = Kind("#f0a63a", "drafted while the target waits")
PREFETCHED = Kind("#6ea8e0", "prefetched: drafted while the target works")
_KINDS = (ACCEPTED, REJECTED, OWN, WAITED, PREFETCHED)


def draw(runs: Sequence[ObservedRun], speeds: Mapping[str, float], title: str) -> str:
    """An SVG document; speeds are tokens a second of the whole runs, by schedule."""
    height = _LEGEND + _PANEL * len(runs) + 40
    box = f"0 0 {_WIDTH} {height}"
    svg = Element(
        "svg", xmlns="http://www.w3.org/2000/svg", viewBox=box, width=str(_WIDTH), height=str(height), style=_FONT
    )
    SubElement(svg, "title").text = title
    SubElement(svg, "rect", width="100%", height="100%", fill="#ffffff")
    _text(svg, title, 16, 20, "font-weight: 600; font-size: 15px")
    _legend(svg, 16, 36)
    length_s = max(run.length_s for run in runs)
    plain = speeds.get("plain")
    for number, run in enumerate(runs):
        top = _LEGEND + number * _PANEL
        speed = speeds[run.schedule]
        beside = f", {speed / plain:.2f} × plain" if plain else ""
        _text(svg, f"{run.schedule}: {speed:.1f} tokens/s{beside}", 16, top + 20, "font-weight: 600")
        _text(svg, f"{run.num_tokens} tokens here", _WIDTH - 16, top + 20, "", anchor="end")
        _panel(svg, run, top + _HEAD + 6, length_s)
    _axis(svg, length_s, _LEGEND + len(runs) * _PANEL + 4)
    return tostring(svg, encoding="unicode")


def page(picture: str, title: str, lines: Sequence[str]) -> str:
    """An HTML document with a picture and lines of text below it."""
    html = Element("html", lang="en")
    head, body = SubElement(html, "head"), SubElement(html, "body")
    SubElement(head, "meta", charset="utf-8")
    SubElement(head, "title").text = title
    SubElement(head, "style").text = "body { margin: 24px; font: 14px system-ui, sans-serif; color: #222 }"
    SubElement(body, "p").text = _PLACE
    SubElement(body, "pre").text = "\n".join(lines)
    document = tostring(html, encoding="unicode", method="html")
    return "<!doctype html>\n" + document.replace(f"<p>{_PLACE}</p>", picture)


def _panel(svg: Element, run: ObservedRun, top: float, length_s: float) -> None:
    drafter = top + _ROW + _GAP
    for name, y in (("target", top), ("drafter", drafter)):
        _text(svg, name, 16, y + 18, "fill: #555")
        _rect(svg, _LEFT, y, _PLOT, _ROW, "#f1f3f5", "")
    for each in run.passes:
        kinds = [ACCEPTED] * each.num_accepted + [REJECTED] * each.num_rejected + [OWN]
        step_s = (each.end_s - each.start_s) / len(kinds)
        for i, kind in enumerate(kinds):
            start_s = each.start_s + i * step_s
            if start_s < length_s:
                said = f"a pass of {len(kinds)} tokens: {each.num_accepted} accepted, {each.num_rejected} rejected"
                _span(svg, start_s, min(start_s + step_s, length_s), top, length_s, kind, said)
        _line(svg, each.start_s, top, length_s)
    for start_s, end_s, kind in _drafts(run):
        _span(svg, start_s, end_s, drafter, length_s, kind, kind.text)


def _drafts(run: ObservedRun) -> list[tuple[float, float, Kind]]:
    """The work of the drafter, cut where a pass of the target begins or ends."""
    edges = sorted({0.0, run.length_s, *(edge for each in run.passes for edge in (each.start_s, each.end_s))})
    found = []
    for start_s, end_s in run.drafts:
        inner = [start_s, *(edge for edge in edges if start_s < edge < end_s), end_s]
        for low, high in pairwise(inner):
            middle = (low + high) / 2
            is_beside = any(each.start_s <= middle < each.end_s for each in run.passes)
            found.append((low, high, PREFETCHED if is_beside else WAITED))
    return found


def _legend(svg: Element, x: float, y: float) -> None:
    for kind in _KINDS:
        _rect(svg, x, y, 13, 13, kind.colour, "")
        _text(svg, kind.text, x + 19, y + 11, "fill: #333")
        x += 42 + 6.7 * len(kind.text)


def _axis(svg: Element, length_s: float, top: float) -> None:
    length_ms = 1e3 * length_s
    unit = 10.0 ** floor(log10(length_ms / 4))
    # A round distance of which four to nine fit.
    step_ms = next(unit * factor for factor in (5, 2, 1) if length_ms / (unit * factor) >= 4)
    for i in range(int(length_ms / step_ms) + 1):
        x = _LEFT + _PLOT * i * step_ms / length_ms
        SubElement(svg, "line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=f"{top}", y2=f"{top + 6}", stroke="#888")
        _text(svg, f"{i * step_ms:g} ms", x, top + 20, "fill: #555", anchor="middle")


def _span(svg: Element, start_s: float, end_s: float, y: float, length_s: float, kind: Kind, said: str) -> None:
    left, width = _LEFT + _PLOT * start_s / length_s, _PLOT * (end_s - start_s) / length_s
    _rect(svg, left, y, max(width, 0.5), _ROW, kind.colour, said)


def _line(svg: Element, at_s: float, y: float, length_s: float) -> None:
    """Where a pass begins."""
    if at_s < length_s:
        x = f"{_LEFT + _PLOT * at_s / length_s:.1f}"
        SubElement(svg, "line", x1=x, x2=x, y1=f"{y}", y2=f"{y + _ROW}", stroke="#ffffff", style="stroke-width: 2")


def _rect(svg: Element, x: float, y: float, width: float, height: float, colour: str, said: str) -> None:
    sizes = {"x": f"{x:.1f}", "y": f"{y:.1f}", "width": f"{width:.1f}", "height": f"{height}"}
    rect = SubElement(svg, "rect", sizes, fill=colour)
    if said:
        SubElement(rect, "title").text = said


def _text(svg: Element, text: str, x: float, y: float, style: str, anchor: str = "start") -> None:
    SubElement(svg, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", "style": style, "text-anchor": anchor}).text = text
