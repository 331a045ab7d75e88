"""The demo that answers questions from a folder of notes."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import ask_notes
import pytest
import tiny
from passages import Index, Passage, read_folder
from stuck import StuckDecoder, engine_of
from table_decoder import TableDecoder

DEMOS = Path(__file__).parents[2] / "demos"


@pytest.fixture
def table_model(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = TableDecoder(tiny.VOCAB, seed=3, context_length=tiny.CONTEXT)
    monkeypatch.setattr(ask_notes, "load", lambda model, report: engine_of(tiny_model, decoder))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, typed: Sequence[str] = ()) -> int:
    lines = iter(typed)

    def read(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(sys, "argv", ["ask_notes.py", *arguments])
    monkeypatch.setattr("builtins.input", read)
    return ask_notes.main()


def test_question_is_answered_and_the_notes_are_named(
    table_model: None, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, str(DEMOS / "notes"), "What leaks?") == 0
    printed = capsys.readouterr().out
    engine = engine_of(tiny_model, TableDecoder(tiny.VOCAB, seed=3, context_length=tiny.CONTEXT))
    found = Index(read_folder(DEMOS / "notes")).best("What leaks?", 1)
    whole = engine.generate(
        ask_notes.prompt(found, "What leaks?"), system=ask_notes.SYSTEM, max_tokens=ask_notes.MAX_TOKENS
    )
    assert printed == f"{ask_notes.replace_control_characters(whole.text)}\nfrom boat-club.md:10\n"


def test_questions_are_taken_until_the_end(
    table_model: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, str(DEMOS / "notes"), typed=["What leaks?", "  ", "quux?"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("from ")] == ["from boat-club.md:10"]
    assert lines[-1] == "None of the notes shares a word with this question."


def test_folder_without_notes_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, str(tmp_path), "What?") == 2
    assert "contains no notes" in capsys.readouterr().err
    assert run(monkeypatch, str(tmp_path / "nowhere"), "What?") == 2
    assert "is not a folder" in capsys.readouterr().err


def test_notes_are_left_out_until_the_rest_fits_the_context(tiny_model: Path) -> None:
    engine = engine_of(tiny_model, TableDecoder(tiny.VOCAB, seed=3, context_length=tiny.CONTEXT))
    notes = [Passage(f"{i}.md", 1, "", "x" * 100) for i in range(9)]
    room = tiny.CONTEXT - ask_notes.MAX_TOKENS
    fitting = ask_notes.fit_context(engine, notes, "why?")
    assert 0 < len(fitting) < 9
    assert fitting[::-1] == notes[: len(fitting)]
    counts = [
        engine.count(ask_notes.prompt(notes[:n], "why?"), system=ask_notes.SYSTEM)
        for n in (len(fitting), len(fitting) + 1)
    ]
    assert counts[0] <= room < counts[1]


def test_ctrl_c_ends_an_answer_before_its_first_token(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decoder = StuckDecoder(context_length=tiny.CONTEXT)

    def interrupt() -> None:
        assert decoder.has_begun.wait(120)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    thread = Thread(target=interrupt)
    thread.start()
    ask_notes.answer(engine_of(tiny_model, decoder), Index(read_folder(DEMOS / "notes")), "What leaks?")
    thread.join()
    assert capsys.readouterr().out == " … (stopped)\nfrom boat-club.md:10\n"
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("text", "shown"), [("a\nb\tc é 猫", "a\nb\tc é 猫"), ("\x1b[2J\r\x07\x9b", "�[2J���"), ("a\u2028b", "a�b")]
)
def test_control_characters_are_replaced(text: str, shown: str) -> None:
    assert ask_notes.replace_control_characters(text) == shown


@pytest.mark.model
def test_a_real_model_answers_from_the_notes(smollm2: Path) -> None:
    command: list[Any] = [sys.executable, DEMOS / "ask_notes.py", DEMOS / "notes", "When does the boat club meet?"]
    done = subprocess.run([*command, "--model", smollm2], capture_output=True, text=True, check=True)
    assert "Tuesday" in done.stdout
    assert "from boat-club.md:3" in done.stdout
