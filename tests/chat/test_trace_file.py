"""A trace is a whole document at any time, whatever it is written to."""

import json
import os
import stat
import sys
from pathlib import Path
from xml.etree import ElementTree

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


def test_a_name_that_ends_in_svg_gives_a_picture_of_all_work(tmp_path: Path) -> None:
    path = tmp_path / "trace.SVG"
    trace = TraceFile(path)
    trace.add(ANSWER)
    trace.add([each._replace(start_s=each.start_s + 3600, end_s=each.end_s + 3600) for each in ANSWER])
    svg = ElementTree.fromstring(path.read_text())
    name = "{http://www.w3.org/2000/svg}"
    boxes = {each.find(f"{name}title").text: each for each in svg.iter(f"{name}rect") if len(each)}
    assert set(boxes) == {"verify: 2 tokens, 500.0 ms", "draft: 3 tokens, 300.0 ms"}
    widths = [float(each.attrib["width"]) + 1 for each in boxes.values()]
    assert widths[0] / widths[1] == pytest.approx(0.5 / 0.3)
    texts = [each.text for each in svg.iter(f"{name}text")]
    assert texts.count("target") == 2, "an hour without work takes no room"
    assert "from 3600000 ms, for 12000 ms" in texts


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
