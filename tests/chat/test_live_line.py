"""The line below an answer that is being written: its figures, and that the text is as it would be without it."""

import io
import os
import re
from pathlib import Path

import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.chat.live_line import LiveFigures, LiveLine
from edgespec.cli.main import main
from edgespec.engine.answers import Chunk
from edgespec.system.clock import VirtualClock

_PIECES = st.lists(
    st.sampled_from(["word ", "\n", "\n\n", "世界", "a\tb", "x" * 37, "\x1b[1mbold\x1b[0m", "", "é", "- item\n"]),
    max_size=25,
)
LINE = "23 tokens/s · cpu"


def chunk(num: int, source: str = "target") -> Chunk:
    return Chunk(text="x", token_ids=(1,) * num, origins=(*[source] * (num - 1), "target"))


def line_on(stream: io.StringIO, columns: int = 30, rows: int = 8, clock: VirtualClock | None = None) -> LiveLine:
    size = os.terminal_size((columns, rows))
    return LiveLine(stream, lambda most: LINE[:most], lambda: size, clock or VirtualClock())


def screen_of(*written: str, columns: int = 30, rows: int = 8) -> list[str]:
    """The lines that a terminal has after all that was written, those above its window too; it never has two."""
    screen = pyte.HistoryScreen(columns, rows, history=1000)
    stream = pyte.Stream(screen)
    for piece in written:
        stream.feed(piece.replace("\n", "\r\n"))
        assert sum(LINE in shown for shown in screen.display) <= 1
    above = ["".join(line[i].data for i in range(columns)) for line in screen.history.top]
    return "\n".join(line.rstrip() for line in [*above, *screen.display]).rstrip().split("\n")


@pytest.mark.slow
@given(_PIECES, st.sampled_from([20, 30, 80]), st.sampled_from([4, 8]))
@settings(max_examples=60, deadline=None)
def test_the_text_is_as_it_would_be_without_the_line(pieces: list[str], columns: int, rows: int) -> None:
    stream = io.StringIO()
    line = line_on(stream, columns, rows)
    for piece in pieces:
        line.write(piece)
        line.flush()
        stream.write("\0")
        line.renew()
    line.take_away()
    written = stream.getvalue().split("\0")
    assert screen_of(*written, columns=columns, rows=rows) == screen_of(*pieces, columns=columns, rows=rows)


def test_the_line_is_below_the_text_also_at_the_end_of_the_window() -> None:
    stream = io.StringIO()
    line = line_on(stream)
    for i in range(20):
        line.write(f"line {i}\nand ")
        line.flush()
        assert screen_of(stream.getvalue())[-3:] == [f"{'and ' if i else ''}line {i}", "and", LINE]


def test_text_and_line_change_at_once() -> None:
    stream = io.StringIO()
    line = line_on(stream)
    for piece in ("one ", "two\n", "three"):
        line.write(piece)
        line.flush()
    line.take_away()
    updates = re.findall(r"\x1b\[\?2026h(.*?)\x1b\[\?2026l", stream.getvalue(), re.DOTALL)
    assert len(updates) == 4
    outside = re.sub(r"\x1b\[\?2026h.*?\x1b\[\?2026l", "", stream.getvalue(), flags=re.DOTALL)
    assert outside == "one "  # before there is a line
    assert all(update.startswith("\x1b[J") for update in updates[1:])


def test_a_window_that_changes_its_size_loses_no_text_and_keeps_no_line() -> None:
    stream, sizes = io.StringIO(), [(80, 10)]
    asked: list[int] = []

    def format_line(columns: int) -> str:
        asked.append(columns)
        return "figures " * (columns // 8)

    clock = VirtualClock()
    line = LiveLine(stream, format_line, lambda: os.terminal_size(sizes[-1]), clock)
    screen = pyte.Screen(80, 10)
    feed = pyte.Stream(screen).feed
    at = 0
    for columns in (80, 30, 12, 50):
        sizes.append((columns, 10))
        screen.resize(10, columns)
        line.write(f"in {columns}\n")
        line.flush()
        written = stream.getvalue()
        feed(written[at:].replace("\n", "\r\n"))
        at = len(written)
        shown = [row.rstrip() for row in screen.display if row.strip()]
        assert sum("figures" in row for row in shown) == (columns >= 20)
    assert asked == [79, 29, 49]
    line.take_away()
    feed(stream.getvalue()[at:])
    assert [row.rstrip() for row in screen.display if row.strip()] == ["in 80", "in 30", "in 12", "in 50"]


def test_the_line_is_not_drawn_where_a_break_is_due() -> None:
    """A terminal would forget the break, and the next character would replace the last one."""
    stream = io.StringIO()
    line = line_on(stream)
    line.write("x" * 60)
    line.flush()
    assert stream.getvalue() == "x" * 60
    line.write("y")
    line.flush()
    assert LINE in stream.getvalue()


def test_a_terminal_without_a_size_gets_the_text_alone() -> None:
    stream = io.StringIO()
    line = line_on(stream, columns=0, rows=0)
    line.write("text")
    line.flush()
    assert stream.getvalue() == "text"


def test_figures_are_asked_for_a_few_times_a_second_at_most() -> None:
    stream, clock = io.StringIO(), VirtualClock()
    asked: list[float] = []
    line = LiveLine(stream, lambda most: str(asked.append(clock())), lambda: os.terminal_size((80, 24)), clock)
    for _ in range(100):
        line.write("a ")
        line.flush()
        line.renew()
        clock.sleep(0.01)
    assert len(asked) == 4


def figures(clock: VirtualClock, devices: tuple[str, str] = ("cpu", "cpu")) -> LiveFigures:
    return LiveFigures(devices, memory_bytes=lambda: 1_230_000_000, clock=clock)


def test_figures_say_speed_who_drafted_device_and_memory() -> None:
    clock = VirtualClock()
    seen = figures(clock)
    seen.add(chunk(1))
    assert seen.format_line(100) == "first tokens · nothing drafted · cpu · memory 1.2 GB"
    for source in ("suffix", "suffix", "answers"):
        clock.sleep(0.5)
        seen.add(chunk(5, source))
    seen.add(Chunk(text="", token_ids=(), finish_reason="stop"))
    assert seen.format_line(100) == ("10 tokens/s · drafted: suffix 50%, answers 25% · cpu · memory 1.2 GB")


def test_a_drafter_model_has_a_lane() -> None:
    seen = figures(VirtualClock(), ("gpu", "cpu"))
    seen.add(chunk(2, "tiny\x1b[2J"))
    assert "drafted: tiny\\x1b[2J 50% · gpu, drafter lane cpu · " in seen.format_line(100)
    seen = figures(VirtualClock(), ("gpu", "cpu"))
    seen.add(chunk(2, "suffix"))
    assert "· gpu · " in seen.format_line(100)


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (10, ""),
        (12, "first tokens"),
        (29, "first tokens · suffix 50%"),
        (38, "first tokens · drafted: suffix 50%"),
        (200, "first tokens · drafted: suffix 50% · cpu · memory 1.2 GB"),
    ],
)
def test_figures_that_do_not_fit_are_left_out_whole(columns: int, line: str) -> None:
    seen = figures(VirtualClock())
    seen.add(chunk(2, "suffix"))
    assert seen.format_line(columns) == line


def test_a_pipe_gets_the_answer_alone(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["chat", str(tiny_model), "--prompt", "the in", "--max-tokens", "9", "--drafter", "none"]
    written = []
    for flags in ([], ["--stats"]):
        assert main([*command, *flags]) == 0
        written.append(capsys.readouterr())
    assert written[0].out == written[1].out
    assert "\x1b" not in written[1].out + written[1].err
