import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.draft.timeline import Interval, chrome_trace, latest, overlap, picture

TWO = [
    Interval("target", "verify", 1.0, 2.0, 4),
    Interval("drafter", "draft", 1.5, 1.75, 1),
    Interval("drafter", "draft", 1.75, 2.5, 3),
    Interval("target", "verify", 2.5, 3.0, 1),
]

times = st.integers(0, 40).map(float)
anything = st.lists(
    st.builds(
        lambda lane, start, length: Interval(lane, "work", start, start + length),
        st.sampled_from(["a", "b", "c"]),
        times,
        times,
    )
)


def test_overlap_is_the_share_in_which_two_lanes_work() -> None:
    assert overlap(TWO) == 0.25  # from 1.5 to 2.0, of 2 seconds


def test_a_lane_does_not_overlap_itself() -> None:
    assert overlap([Interval("target", "verify", 0.0, 2.0), Interval("target", "verify", 1.0, 3.0)]) == 0.0


def test_nothing_overlaps_nothing() -> None:
    assert overlap([]) == 0.0
    assert overlap([Interval("target", "verify", 1.0, 1.0)]) == 0.0


@given(anything)
def test_overlap_is_what_counting_seconds_gives(intervals: list[Interval]) -> None:
    ends = [each.end_s for each in intervals]
    first, last = min((each.start_s for each in intervals), default=0.0), max(ends, default=0.0)
    seconds = range(int(first), int(last))
    lanes = [{each.lane for each in intervals if each.start_s <= s < each.end_s} for s in seconds]
    shared = sum(len(at_work) >= 2 for at_work in lanes)
    assert overlap(intervals) == (pytest.approx(shared / len(seconds)) if seconds else 0.0)


def test_trace_has_a_thread_for_each_lane_and_microseconds() -> None:
    events = chrome_trace(TWO)["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {0: "target", 1: "drafter"}
    spans = [
        (names[event["tid"]], event["name"], event["ts"], event["dur"], event["args"]) for event in events[2:]
    ]
    assert spans == [
        ("target", "verify", 0.0, 1e6, {"num_tokens": 4}),
        ("drafter", "draft", 0.5e6, 0.25e6, {"num_tokens": 1}),
        ("drafter", "draft", 0.75e6, 0.75e6, {"num_tokens": 3}),
        ("target", "verify", 1.5e6, 0.5e6, {"num_tokens": 1}),
    ]
    json.dumps(chrome_trace(TWO))


def test_trace_of_nothing_is_a_document() -> None:
    assert chrome_trace([])["traceEvents"] == []


def test_picture_has_a_line_for_each_lane() -> None:
    assert picture(TWO, width=8).splitlines() == [
        "target  ████··██",
        "drafter ··████··",
        "        2000 ms, 25% of it in both lanes at once",
        "        █ at work  ▒ for a part of the time  · waiting",
    ]


def test_picture_shows_parts_of_a_cell() -> None:
    assert picture(TWO, width=2).splitlines()[:2] == ["target  █▒", "drafter ▒▒"]


@given(anything, st.integers(1, 30))
def test_lines_of_a_picture_have_its_width(intervals: list[Interval], width: int) -> None:
    lines = picture(intervals, width).splitlines()[:-2]
    assert [len(line) for line in lines] == [2 + width] * len({each.lane for each in intervals})


def test_the_latest_passes_and_what_was_done_beside_them() -> None:
    assert latest(TWO, "target", 1) == [TWO[3]]
    assert latest(TWO, "target", 2) == TWO
    assert latest(TWO, "drafter", 1) == [TWO[0]._replace(start_s=1.75), *TWO[2:]]
    assert latest([], "target", 3) == []
