"""Transcripts as files: whole or not at all, one owner, and no surprise in what is read."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgespec import EdgeSpecError, Message, UsageError
from edgespec.chat.files import AutosaveFile
from edgespec.chat.saved_chats import find_latest
from edgespec.engine.conversation import Conversation
from edgespec.engine.transcript import Transcript

TALK = Transcript(
    messages=(Message("system", "s"), Message("user", "a\n\u2028\ud800"), Message("assistant", "b")),
    model="m",
    cut_short=((2, "cancelled"),),
)
HEADER = '{"format": "edgespec conversation", "version": 1}\n'


def test_written_and_read_is_the_same_and_its_owners_alone(tmp_path: Path) -> None:
    TALK.write(tmp_path / "t")
    assert Transcript.read(tmp_path / "t") == TALK
    assert (tmp_path / "t").stat().st_mode & 0o777 == 0o600
    assert [*tmp_path.iterdir()] == [tmp_path / "t"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TALK.write(tmp_path / "t")

    def refuse(*names: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(EdgeSpecError, match="No space left"):
        Transcript().save(tmp_path / "t")
    assert Transcript.read(tmp_path / "t") == TALK
    assert len([*tmp_path.iterdir()]) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not a saved conversation"),
        (b"hello\n", "line 1 is not JSON"),
        (b"[1]\n", "line 1: wanted an object"),
        (b'{"a": 1}\n', "it does not begin as one"),
        (b'{"format": "edgespec conversation", "version": 2}\n', "is of version 2, and this edgespec reads 1"),
        (b"\xff\xfe\x00", "ends within a character of UTF-16"),
        (b"[" * 100_000, "line 1 is nested too deep"),
        ((HEADER + '{"role": "user"}').encode(), "line 2 is not a message"),
        ((HEADER + '{"role": "wizard", "content": "x"}').encode(), "line 2 is not a message"),
        ((HEADER + '{"role": "user", "content": "cut o').encode(), "line 2 is not JSON"),
        (
            (HEADER + '{"role": "assistant", "content": "x"}').encode(),
            "t is not a saved .*: message 1 is of the role",
        ),
        (HEADER.replace("1}", '1, "num_dropped": -1}').encode(), "says that -1 of 0 messages"),
    ],
)
def test_damaged_and_foreign_files_are_refused_in_words(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(UsageError, match=words):
        Transcript.read(tmp_path / "t")


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, words in [
        (tmp_path / "missing", "No such file"),
        (tmp_path, "it is not a regular file"),
        (tmp_path / "pipe", "it is not a regular file"),
        (Path("a\0b"), "null"),
    ]:
        with pytest.raises(UsageError, match=words):
            Transcript.read(path)


@pytest.mark.parametrize("roles", [("assistant",), ("user", "assistant", "assistant"), ("user", "system")])
def test_messages_that_answer_nothing_are_refused(roles: tuple[str, ...]) -> None:
    talk = Transcript(messages=tuple(Message(role, "a") for role in roles))
    with pytest.raises(UsageError, match=f"message {len(roles)} is of the role {roles[-1]}"):
        Conversation(SimpleNamespace(model_sampling=None, preset=None)).restore(talk)  # type: ignore[arg-type]


def test_a_conversation_is_saved_from_its_first_message_on(tmp_path: Path) -> None:
    file = AutosaveFile(tmp_path / "chats", pytest.fail)
    file.write(Transcript(messages=(Message("system", "s"),)))
    assert find_latest(tmp_path / "chats") is None
    file.write(TALK)
    assert file.path is not None
    assert find_latest(tmp_path / "chats") == file.path
    assert Transcript.read(file.path) == TALK
    assert (tmp_path / "chats").stat().st_mode & 0o777 == 0o700


def test_two_chats_that_continue_one_conversation_lose_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    first = AutosaveFile(tmp_path, lines.append)
    first.write(TALK)
    second = AutosaveFile(tmp_path, pytest.fail, first.path)
    longer = Transcript(messages=(*TALK.messages, Message("user", "more of the second")))
    second.write(longer)
    assert second.path == first.path
    first.write(TALK)
    assert first.path != second.path
    assert len(lines) == 1
    assert "continues in a new one" in lines[0]
    assert [Transcript.read(path) for path in (second.path, first.path) if path] == [longer, TALK]


def test_a_chat_that_goes_on_in_a_new_file_has_a_name_of_its_own(tmp_path: Path) -> None:
    lines: list[str] = []
    talk = replace(TALK, name="recipes")
    first = AutosaveFile(tmp_path, lines.append)
    assert first.write(talk) == "recipes"
    for other in range(2, 4):
        assert AutosaveFile(tmp_path, pytest.fail, first.path).write(replace(TALK, name=talk.name)) == talk.name
        talk = replace(talk, name=first.write(talk))
        assert talk.name == f"recipes ({other})"
        assert lines.pop().endswith(f"which continues in a new one, called {talk.name}")
    assert first.path
    first.path.unlink()
    assert first.write(talk) == talk.name  # which no chat has any more


def test_a_folder_that_cannot_be_written_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "chats").write_text("no folder")
    lines: list[str] = []
    file = AutosaveFile(tmp_path / "chats", lines.append)
    file.write(TALK)
    file.write(TALK)
    assert len(lines) == 1
    assert "this conversation is not saved" in lines[0]
    (tmp_path / "chats").unlink()
    file.write(TALK)
    assert not file.has_failed


def test_lines_are_ascii_so_that_any_tool_reads_them() -> None:
    assert all(line.isascii() and json.loads(line) for line in TALK.lines())
