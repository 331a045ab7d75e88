"""The list of saved chats, and how one of them is found."""

import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from edgespec import Message
from edgespec.chat.attachments import Attachment, join_message
from edgespec.chat.files import AutosaveFile
from edgespec.chat.saved_chats import describe_chats, find_chat, find_latest, list_chats, running_mark
from edgespec.engine.transcript import Transcript
from edgespec.errors import UsageError

LONG = "How do the rivers of the north find their way to the warm sea?"
NOW = datetime(2026, 1, 2, 3, 4)


def keep(folder: Path, stem: str, text: str, time_s: int, name: str | None = None) -> Path:
    path = folder / f"{stem}.jsonl"
    messages = (Message("user", text), Message("assistant", "Yes."))
    Transcript(messages=messages, model="/home/me/models/tiny-model", name=name).save(path)
    os.utime(path, (time_s, time_s))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    keep(tmp_path, "a", LONG, 1_000)
    keep(tmp_path, "b", "Hello", 2_000, name="海と川の話")
    return tmp_path


def test_a_number_means_the_chat_that_was_seen_beside_it(folder: Path) -> None:
    seen = [each.path for each in list_chats(folder)]
    keep(folder, "c", "Newer", 3_000)
    assert find_chat(folder, "2", seen).path.stem == "a"
    assert find_chat(folder, "2").path.stem == "b"
    seen[1].unlink()
    with pytest.raises(UsageError, match="chat 2 of the list has been deleted"):
        find_chat(folder, "2", seen)


def test_a_title_may_be_given_as_the_list_cuts_it(folder: Path) -> None:
    title = list_chats(folder)[1].title
    assert title.endswith("…")
    assert find_chat(folder, title).path.stem == "a"


@pytest.mark.parametrize("columns", [25, 30, 60, 80, 120])
def test_the_list_fits_its_columns(folder: Path, columns: int) -> None:
    from rich.cells import cell_len

    lines = describe_chats(list_chats(folder), [1, 2], NOW, folder / "a.jsonl", columns)
    assert all(cell_len(line) <= columns for line in lines)
    assert lines[1].startswith("*2  How do")
    assert ("2 messages" in lines[1]) == (columns >= 60)
    assert ("tiny-model" in lines[1]) == (columns >= 80)
    assert len({cell_len(line[: line.index("1970")]) for line in lines}) == 1  # also beside wide characters


def test_an_unknown_name_is_refused_with_those_that_there_are(folder: Path) -> None:
    with pytest.raises(UsageError, match="there is no chat 'xyz'; the latest are '海と川の話', 'How do"):
        find_chat(folder, "xyz")
    with pytest.raises(UsageError, match=r"did you mean '海と川の話'\?"):
        find_chat(folder, "海の川の話")
    with pytest.raises(UsageError, match="there is no chat 'xyz'; none is saved"):
        find_chat(folder / "empty", "xyz")


def test_the_nearest_names_are_suggested_first(folder: Path) -> None:
    keep(folder, "c", "Hello", 100, name="plans of yesterday")
    keep(folder, "d", "Hello", 200, name="yestreday")
    with pytest.raises(UsageError, match=r"did you mean 'plans of yesterday' or 'yestreday'\?"):
        find_chat(folder, "Yesterda")


def test_the_latest_chat_is_none_that_another_process_writes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two chats, of which the older one has ended: --continue means that one."""
    read_bytes = Path.read_bytes

    def read_unlocked(path: Path) -> bytes:
        if path == running_mark(folder / "b.jsonl"):
            raise PermissionError("Windows lets nobody read the first byte of a lock that is held")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", read_unlocked)
    program = """
import sys
from pathlib import Path
from edgespec.chat.files import AutosaveFile
folder = Path(sys.argv[1])
file = AutosaveFile(folder, print, folder / "b.jsonl")
print("holds it", flush=True)
sys.stdin.readline()
"""
    command = [sys.executable, "-c", program, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "holds it\n"
        assert find_latest(folder) == folder / "a.jsonl"
        other.kill()
        other.wait()
    assert find_latest(folder) == folder / "b.jsonl"


def test_the_latest_chat_is_found_where_another_is_deleted_meanwhile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [folder / "deleted.jsonl", *folder.glob("*.jsonl")]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(found))
    assert find_latest(folder) == folder / "b.jsonl"


def test_a_chat_that_begins_a_new_file_leaves_the_old_one_to_others(tmp_path: Path) -> None:
    file = AutosaveFile(tmp_path / "chats", pytest.fail)
    file.write(Transcript(messages=(Message("user", "a"),)))
    assert file.path is not None
    mark = running_mark(file.path)
    assert mark.exists()
    file.start_new_file()
    assert not mark.exists()


def test_titles_are_what_was_typed_and_empty_chats_are_not_listed(tmp_path: Path) -> None:
    files = [Attachment("a.txt", "one"), Attachment("b.md", "two")]
    keep(tmp_path, "a", join_message(files, "What is new?"), 1_000)
    keep(tmp_path, "b", join_message(files, ""), 2_000)
    Transcript(messages=(Message("system", "Be brief."),), model="m").save(tmp_path / "c.jsonl")
    Transcript(messages=(), model="m", name="kept").save(tmp_path / "d.jsonl")
    titles = [chat.title for chat in list_chats(tmp_path)]
    assert titles == ["kept", "[a.txt, 1 line] [b.md, 1 line]", "What is new?"]
