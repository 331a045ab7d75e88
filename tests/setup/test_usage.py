"""Counts of answers in the model home: none is lost, none is written in an answer's way."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from threading import Thread
from threading import enumerate as all_threads

import pytest

from edgespec.errors import EdgeSpecError
from edgespec.setup.usage import Usage, UsageCounter, UsageFile, UsageKey

TODAY = date(2026, 11, 27)
ONE = Usage(answers=1, measured=1, tokens=10, accepted=4, decode_s=2.0, saved_s=0.5)


def key(day: date = TODAY, model: str = "m") -> UsageKey:
    return UsageKey(str(day), model, "cpu")


def together(work: Callable[[int], None], num: int) -> None:
    threads = [Thread(target=work, args=(i,)) for i in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_writers_that_work_at_once_lose_no_counts(tmp_path: Path) -> None:
    def write(number: int) -> None:
        for _ in range(5):
            UsageFile(tmp_path).add({key(): ONE, key(model=f"own{number}"): ONE}, TODAY)

    together(write, 4)
    table = UsageFile(tmp_path).read()
    assert table[key()] == Usage(20, 20, 200, 80, 40.0, 10.0)
    assert {table[key(model=f"own{i}")].answers for i in range(4)} == {5}


def test_early_days_are_added_up_by_month(tmp_path: Path) -> None:
    file, early = UsageFile(tmp_path), TODAY - timedelta(120)
    file.add({key(early): ONE, key(early - timedelta(1)): ONE, key(TODAY - timedelta(90)): ONE}, early)
    assert len(file.read()) == 3
    file.add({key(): ONE}, TODAY)
    assert {each.day: usage.answers for each, usage in file.read().items()} == {
        "2026-07": 2,
        "2026-08-29": 1,
        "2026-11-27": 1,
    }


def test_to_count_does_not_touch_the_disk(tmp_path: Path) -> None:
    lines: list[str] = []
    counter = UsageCounter(UsageFile(tmp_path), "m", "cpu", lines.append)
    together(lambda i: counter.count(ONE), 4)
    assert not any(tmp_path.iterdir())
    counter.close()
    (usage,) = UsageFile(tmp_path).read().values()
    assert usage.answers == 4
    assert [each.name for each in tmp_path.iterdir()] == ["usage.json"]
    assert lines == []


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"version": 2, "counts": []}', '{"version": 1, "counts": [[["d", "m", "cpu"], {"tokens": -1}]]}'],
)
def test_a_damaged_file_is_kept_and_reported_once(tmp_path: Path, content: str) -> None:
    file, lines = UsageFile(tmp_path), list[str]()
    file.path.write_text(content)
    counter = UsageCounter(file, "m", "cpu", lines.append)
    for _ in range(2):
        counter.count(ONE)
        counter.close()
    assert file.path.read_text() == content
    assert len(lines) == 1
    assert "edgespec stats --delete" in lines[0]
    assert file.delete()
    counter.close()
    assert [each.answers for each in file.read().values()] == [2]


_WRITER = """
import sys
from datetime import date
from pathlib import Path
from edgespec.setup.usage import Usage, UsageFile, UsageKey
for _ in range(10):
    UsageFile(Path(sys.argv[1])).add({UsageKey("2026-11-27", "m", "cpu"): Usage(answers=1)}, date(2026, 11, 27))
"""


@pytest.mark.slow
def test_two_processes_that_write_at_once_lose_no_counts(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)]) for _ in range(2)]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    assert [usage.answers for usage in UsageFile(tmp_path).read().values()] == [20]


def test_a_full_disk_keeps_the_file_and_what_was_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, lines = UsageFile(tmp_path), list[str]()
    file.add({key(): ONE}, TODAY)
    counter = UsageCounter(file, "m", "cpu", lines.append)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        for _ in range(2):
            counter.count(ONE)
            counter.close()
        for thread in all_threads():
            if thread.name == "usage":
                thread.join()
    assert len(lines) == 1
    assert "usage.json cannot be written (No space left on device)" in lines[0]
    assert file.read() == {key(): ONE}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["usage.json"], "nothing is left half written"
    counter.close()
    assert sum(usage.answers for usage in file.read().values()) == 3


def test_a_clock_that_goes_back_loses_no_counts(tmp_path: Path) -> None:
    file, early = UsageFile(tmp_path), TODAY - timedelta(200)
    for today in (early, TODAY, early, TODAY - timedelta(1)):
        file.add({key(today): ONE}, today)
    assert {each.day: usage.answers for each, usage in file.read().items()} == {
        "2026-05": 2,
        "2026-11-26": 1,
        "2026-11-27": 1,
    }


def test_a_home_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(EdgeSpecError, match=r"usage\.json cannot be written"):
        UsageFile(tmp_path / "home").add({key(): ONE}, TODAY)
