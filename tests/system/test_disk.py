"""Files that are written whole or not at all."""

import os
import stat
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from edgespec.cli.chat import _log_rounds
from edgespec.errors import UsageError
from edgespec.system import disk
from edgespec.system.disk import install_folder, replace_file

unix_only = pytest.mark.skipif(
    sys.platform == "win32", reason="needs file modes, links and pipes, which Windows lacks"
)


@unix_only
def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        replace_file(pipe, b"words")
        assert os.read(reader, 100) == b"words"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@unix_only
def test_a_device_is_written_to_and_stays_one() -> None:
    main, terminal = os.openpty()
    try:
        replace_file(Path(os.ttyname(terminal)), b"words")
        assert os.read(main, 100) == b"words"
        assert stat.S_ISCHR(os.stat(os.ttyname(terminal)).st_mode)
    finally:
        os.close(main)
        os.close(terminal)


@unix_only
def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    file, link = tmp_path / "folder" / "file", tmp_path / "link"
    file.write_bytes(b"old")
    link.symlink_to("folder/file")
    replace_file(link, b"new")
    assert link.is_symlink()
    assert file.read_bytes() == b"new"


@unix_only
def test_a_link_to_a_file_that_is_not_there_yet_makes_it(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("file")
    replace_file(link, b"new")
    assert link.is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"


@unix_only
def test_a_link_to_itself_is_replaced(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("link")
    replace_file(link, b"new")
    assert link.read_bytes() == b"new"


@unix_only
@pytest.mark.parametrize(("before", "asked"), [(0o600, 0o666), (0o644, 0o600), (0o400, 0o666)])
def test_nobody_else_may_read_who_might_not_before(tmp_path: Path, before: int, asked: int) -> None:
    (path := tmp_path / "file").touch()
    path.chmod(before)
    replace_file(path, b"new", asked)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@unix_only
def test_a_pipe_that_nobody_reads_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(OSError, match="nobody reads"):
        replace_file(pipe, b"x")
    with pytest.raises(UsageError, match="nobody reads"):
        _log_rounds(pipe)


def open_elsewhere(monkeypatch: pytest.MonkeyPatch, num_failing: int) -> None:
    """The next attempts to rename something fail, as on Windows where another program has it open."""
    failures = [*range(num_failing)]

    def failing(rename: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
        def call(new: Path, place: Path) -> None:
            if failures:
                failures.pop()
                raise PermissionError(13, "it is open")
            rename(new, place)

        return call

    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    monkeypatch.setattr(disk, "sleep", lambda seconds: None)


@pytest.mark.parametrize(("platform", "num_failing", "is_written"), [
    ("win32", 3, True), ("win32", 9, False), ("linux", 1, False),
])  # fmt: skip
def test_a_file_that_another_program_has_open_on_windows_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, num_failing: int, is_written: bool
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    open_elsewhere(monkeypatch, num_failing)
    monkeypatch.setattr(sys, "platform", platform)
    with nullcontext() if is_written else pytest.raises(PermissionError):
        replace_file(path, b"new")
    assert path.read_bytes() == (b"new" if is_written else b"old")
    assert [*tmp_path.iterdir()] == [path]


def test_a_folder_that_a_virus_scanner_reads_on_windows_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "weights").write_bytes(b"x")
    open_elsewhere(monkeypatch, num_failing=5)
    monkeypatch.setattr(sys, "platform", "win32")
    install_folder(tmp_path / "new", tmp_path / "model")
    assert (tmp_path / "model" / "weights").read_bytes() == b"x"
