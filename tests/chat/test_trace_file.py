"""A trace is a whole document at any time, whatever it is written to."""

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from edgespec.chat.files import TraceFile
from edgespec.draft.timeline import Interval
from edgespec.errors import UsageError

ANSWER = (Interval("target", "verify", 0.0, 0.5, 2), Interval("drafter", "draft", 0.1, 0.4, 3))


def num_events(path: Path) -> int:
    events = json.loads(path.read_text())["traceEvents"]
    return sum(event["ph"] == "X" for event in events)


def test_each_answer_is_added_and_an_empty_one_shows_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    trace = TraceFile(path)
    assert num_events(path) == 0
    trace.add(())
    assert capsys.readouterr().err == ""
    trace.add(ANSWER)
    trace.add(ANSWER)
    assert num_events(path) == 4
    assert "drafter" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_finds_the_last_whole_document_while_a_new_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, found = tmp_path / "trace.json", list[int]()
    trace, replaced = TraceFile(path), os.replace

    def read_before(new: Path, place: Path) -> None:
        found.append(num_events(path))
        replaced(new, place)

    monkeypatch.setattr(os, "replace", read_before)
    trace.add(ANSWER)
    trace.add(ANSWER)
    assert found == [0, 2]


def test_a_file_that_can_no_longer_be_written_is_reported_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.json"
    trace = TraceFile(path)
    trace.add(ANSWER)

    def full(new: Path, place: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    trace.add(ANSWER)
    assert "No space left on device" in caplog.text
    assert num_events(path) == 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_refused_before_the_first_answer(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        TraceFile(tmp_path / "none" / "trace.json")


@pytest.mark.skipif(sys.platform == "win32", reason="needs symbolic links and file modes, which Windows lacks")
def test_a_link_stays_one_and_others_may_read_as_the_mask_says(tmp_path: Path) -> None:
    link, place = tmp_path / "link.json", tmp_path / "trace.json"
    link.symlink_to(place)
    mask = os.umask(0o027)
    try:
        TraceFile(link)
    finally:
        os.umask(mask)
    assert link.is_symlink()
    assert num_events(place) == 0
    assert stat.S_IMODE(place.stat().st_mode) == 0o640


@pytest.mark.skipif(not os.path.exists("/dev/null"), reason="needs the device /dev/null")
def test_a_device_is_written_and_not_replaced() -> None:
    TraceFile(Path("/dev/null"))
    assert not Path("/dev/null").is_file()
