"""Typed keys, without a terminal."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import PipeInput, create_pipe_input

from edgespec.chat import input as chat_input
from edgespec.chat.commands import COMMANDS
from edgespec.chat.input import ChatInput, CommandCompleter, HistoryFile
from edgespec.chat.status import Status

STATUS = Status(model="m", devices=("cpu", "cpu"), drafter="none", num_context=0, context_length=9)


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[PipeInput]:
    from prompt_toolkit.output import DummyOutput

    monkeypatch.setattr(chat_input, "_create_output", DummyOutput)
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        yield pipe


def ask(keys: PipeInput, typed: str, default: str = "", *, is_multi_line: bool = False) -> str:
    user = ChatInput(None, lambda: STATUS)
    user.is_multi_line = is_multi_line
    typing = Thread(target=keys.send_text, args=(typed,))  # a pipe holds 64 kB
    typing.start()
    try:
        return user.ask(default)
    finally:
        typing.join()


@pytest.mark.parametrize(
    ("typed", "is_multi_line", "text"),
    [
        ("hello\r", False, "hello"),
        ("one\ntwo\x1b\rthree\r", False, "one\ntwo\nthree"),
        ("one\rtwo\x1b\r", True, "one\ntwo"),
        ("one\ntwo\x1b\r", True, "one\ntwo"),
        ("\x1b[200~a\rb\r\nc\x1b[201~\r", False, "a\nb\nc"),
        ("  indented\n    more\r", False, "  indented\n    more"),
        ("dropped\x03kept\r", False, "kept"),
        ("世界 👩‍👩‍👧\r", False, "世界 👩‍👩‍👧"),
        (
            "a \x1b[31mred\x1b[0m word\r",
            False,
            "a red word",
        ),  # not bracketed: as if colours were clicks of a mouse
    ],
)
def test_keys_send_and_break_lines(keys: PipeInput, typed: str, is_multi_line: bool, text: str) -> None:
    assert ask(keys, typed, is_multi_line=is_multi_line) == text


def test_a_text_to_edit_is_there_already(keys: PipeInput) -> None:
    assert ask(keys, " two\r", "one") == "one two"


@pytest.mark.parametrize(("typed", "error"), [("\x03", KeyboardInterrupt), ("\x04", EOFError)])
def test_ctrl_c_and_ctrl_d_at_an_empty_prompt_differ(
    keys: PipeInput, typed: str, error: type[BaseException]
) -> None:
    with pytest.raises(error):
        ask(keys, typed)


def test_ten_thousand_lines_are_pasted_whole(keys: PipeInput) -> None:
    text = "\n".join(f"line {i}" for i in range(10_000))
    assert ask(keys, f"\x1b[200~{text}\x1b[201~\r") == text


def test_what_was_typed_is_kept_for_its_owner_alone_and_read_newest_first(tmp_path: Path) -> None:
    file = HistoryFile(tmp_path / "home" / "history", pytest.fail)
    assert list(file.load_history_strings()) == []
    for text in ("one", "two\nlines", "\ud800 ✓"):
        file.store_string(text)
    assert list(HistoryFile(file._path, pytest.fail).load_history_strings()) == ["\ud800 ✓", "two\nlines", "one"]
    assert file._path.stat().st_mode & 0o777 == 0o600


def test_a_damaged_or_long_history_gives_what_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "history"
    lines = [json.dumps(f"{i} {'x' * 1000}") for i in range(3000)]
    path.write_text("\n".join([*lines, "{}", "not json", '"last"', '"cut o']))
    found = list(HistoryFile(path, pytest.fail).load_history_strings())
    assert found[0] == "last"
    assert 900 < len(found) < 1100
    assert all(text.endswith("x") for text in found[1:])


@pytest.mark.parametrize("place", [lambda path: path.mkdir(), lambda path: path.parent.joinpath("x").touch()])
def test_a_history_that_cannot_be_used_is_reported_once(tmp_path: Path, place: Callable[[Path], object]) -> None:
    path = tmp_path / "history"
    place(path)
    lines: list[str] = []
    file = HistoryFile(path if path.is_dir() else tmp_path / "x" / "history", lines.append)
    assert list(file.load_history_strings()) == []
    file.store_string("a")
    file.store_string("b")
    assert len(lines) == 1
    assert "what you type is not saved" in lines[0]


def complete(text: str) -> list[str]:
    found = CommandCompleter().get_completions(Document(text), CompleteEvent())
    return [text[: len(text) + each.start_position] + each.text for each in found]


def test_commands_words_models_and_paths_are_completed(tmp_path: Path) -> None:
    (tmp_path / "talk.jsonl").touch()
    assert complete("/mo") == ["/model"]
    assert complete("/") == [f"/{command.name}" for command in COMMANDS]
    assert complete("/set temp") == ["/set temperature"]
    assert complete("/set overflow d") == ["/set overflow drop-oldest"]
    assert complete("/show d") == ["/show drafted"]
    assert "/model smollm2-135m" in complete("/model smol")
    assert complete("/drafter su") == ["/drafter suffix"]
    assert complete(f"/load {tmp_path}/ta") == [f"/load {tmp_path}/talk.jsonl"]
    assert complete("/help al") == ["/help all"]
    assert complete("/help att") == ["/help attach"]
    assert complete("/nonsense x") == complete("/help x") == complete("hello /mo") == complete("//mo") == []
