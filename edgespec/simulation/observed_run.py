"""What target and drafter did in a part of a simulated run, pass by pass: for a picture."""

from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

from edgespec.drafters.lanes import VirtualLane
from edgespec.drafters.timeline import Interval
from edgespec.simulation.schedules import Scenario, decode, virtual_devices

# Before a picture begins, so that what the policy tries first is not in it.
_NUM_SKIPPED_TOKENS = 200
_NUM_STEPS = 16.0  # of plain decoding, for which a picture lasts


class Pass(NamedTuple):
    """A pass of the target, in seconds since the picture began."""

    start_s: float
    end_s: float
    num_accepted: int
    num_rejected: int


class ObservedRun(NamedTuple):
    """One schedule for some time; drafts are when the drafter worked, in order and disjoint."""

    schedule: str
    length_s: float
    passes: tuple[Pass, ...]
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
    passes: list[Pass] = []
    num_tokens, begin_s, length_s = 0, None, _NUM_STEPS * scenario.machine.target_s
    with closing(decode(scenario, schedule, devices)) as blocks:
        for block in blocks:
            num_tokens += len(block.tokens)
            end_s = block.started_s + block.verify_s
            if begin_s is not None:
                rejected = block.num_draft - block.num_accepted
                passes.append(Pass(block.started_s - begin_s, end_s - begin_s, block.num_accepted, rejected))
                if end_s - begin_s >= length_s:
                    break
            elif num_tokens >= skipped:
                begin_s = end_s
    assert begin_s is not None
    assert isinstance(devices.lane, VirtualLane)
    devices.lane.ready()  # a virtual lane works when it is asked
    devices.lane.stop()
    spans = [(each.start_s - begin_s, each.end_s - begin_s) for each in devices.lane.intervals]
    return ObservedRun(schedule, length_s, tuple(passes), tuple(_within(spans, length_s)))


def _within(spans: Sequence[tuple[float, float]], length_s: float) -> list[tuple[float, float]]:
    cut = [(max(0.0, start), min(end, length_s)) for start, end in sorted(spans)]
    return [(start, end) for start, end in cut if start < end]
