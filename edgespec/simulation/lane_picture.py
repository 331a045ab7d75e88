"""A part of a simulated run of target and drafter, and a picture of it as SVG text.

A row for target and one for drafter, on one scale of time.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from html import escape
from itertools import pairwise
from typing import NamedTuple

from edgespec.draft.timeline import Interval, Strip, draw_strips
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


# Kinds of work in a picture.
ACCEPTED, REJECTED, OWN = "accepted", "rejected", "the target's own token"
WAITED, PREFETCHED = "drafted while the target waits", "prefetched: drafted while the target works"
COLOURS = {ACCEPTED: "#2f9e62", REJECTED: "#d6455d", OWN: "#34495e", WAITED: "#f0a63a", PREFETCHED: "#6ea8e0"}


def draw(runs: Sequence[ObservedRun], speeds: Mapping[str, float], title: str) -> str:
    """An SVG document; speeds are tokens a second of the whole runs, by schedule."""
    plain = speeds.get("plain")
    strips = []
    for run in runs:
        speed = speeds[run.schedule]
        beside = f", {speed / plain:.2f} × plain" if plain else ""
        said = f"{run.schedule}: {speed:.1f} tokens/s{beside}; {run.num_tokens} tokens here"
        strips.append(Strip(said, 0.0, [*_tokens(run), *_drafts(run)]))
    return draw_strips(strips, max(run.length_s for run in runs), COLOURS, title)


def _tokens(run: ObservedRun) -> Iterator[Interval]:
    """The tokens of each pass, one after the other."""
    for each in run.passes:
        works = [ACCEPTED] * each.num_accepted + [REJECTED] * each.num_rejected + [OWN]
        step_s = (each.end_s - each.start_s) / len(works)
        for i, work in enumerate(works):
            if (start_s := each.start_s + i * step_s) < run.length_s:
                yield Interval("target", work, start_s, min(start_s + step_s, run.length_s))


def _drafts(run: ObservedRun) -> Iterator[Interval]:
    """The work of the drafter, cut where a pass of the target begins or ends."""
    edges = sorted({0.0, run.length_s, *(edge for each in run.passes for edge in (each.start_s, each.end_s))})
    for start_s, end_s in run.drafts:
        for low, high in pairwise([start_s, *(edge for edge in edges if start_s < edge < end_s), end_s]):
            middle = (low + high) / 2
            is_beside = any(each.start_s <= middle < each.end_s for each in run.passes)
            yield Interval("drafter", PREFETCHED if is_beside else WAITED, low, high)


def page(picture: str, title: str, lines: Sequence[str]) -> str:
    """An HTML document with a picture and lines of text below it."""
    style = "body { margin: 24px; font: 14px system-ui, sans-serif; color: #222 }"
    named, text = (escape(each, quote=False) for each in (title, "\n".join(lines)))
    head = f'<head><meta charset="utf-8"><title>{named}</title><style>{style}</style></head>'
    return f'<!doctype html>\n<html lang="en">{head}<body>{picture}<pre>{text}</pre></body></html>'
