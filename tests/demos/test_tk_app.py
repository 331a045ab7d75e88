"""The program of a window: what it shows, and that stopping and closing end what its thread does."""

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
from stuck import StuckDecoder, engine_of
from table_decoder import TableDecoder

from edgespec import EdgeSpecError, Engine, LoadProgress, Message

DEMOS = Path(__file__).parents[2] / "demos"
WAIT_S = 120.0
pytestmark = pytest.mark.usefixtures("display")


def table_engine(folder: Path) -> Engine:
    return engine_of(folder, TableDecoder(tiny.VOCAB, seed=3, context_length=tiny.CONTEXT))


@contextmanager
def window_of(open_engine: Callable[[Callable[[LoadProgress], None]], Engine]) -> Iterator[Any]:
    import tkinter

    from tk_app import Window

    gc.collect()  # Tk ends a process where another thread frees a window that was closed before
    before = set(threading.enumerate())
    window = Window(tkinter.Tk(), open_engine)
    try:
        yield window
    finally:
        window.close()
    assert [each for each in threading.enumerate() if each not in before] == []


def run_until(window: Any, has_come: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not has_come():
        assert time.monotonic() < deadline, window.log.get("1.0", "end")
        window.root.update()
        time.sleep(0.005)


def shown(window: Any) -> str:
    return str(window.log.get("1.0", "end"))


def printable(text: str) -> str:
    """Without control characters, of which Tk drops some."""
    return "".join(each for each in text if each.isprintable() or each == "\n")


def ask(window: Any, question: str) -> None:
    run_until(window, lambda: str(window.button["state"]) == "normal" and window.button["text"] == "Send")
    window.entry.insert(0, question)
    window.button.invoke()


def test_questions_and_answers_are_shown_and_go_on(tiny_model: Path) -> None:
    engine = table_engine(tiny_model)
    first = engine.generate([Message("user", "the in")], max_tokens=500).text
    turns = [Message("user", "the in"), Message("assistant", first), Message("user", "an")]
    second = engine.generate(turns, max_tokens=500).text
    with window_of(lambda progress: table_engine(tiny_model)) as window:
        ask(window, "the in")
        ask(window, "an")
        run_until(window, lambda: window.reply is None)
        assert printable(shown(window)) == printable(f"> the in\n{first}\n\n> an\n{second}\n\n\n")


def test_the_window_lives_while_an_answer_is_made_and_the_button_stops_it(tiny_model: Path) -> None:
    decoder = StuckDecoder()
    with window_of(lambda progress: engine_of(tiny_model, decoder)) as window:
        ask(window, "the in")
        run_until(window, decoder.has_begun.is_set)
        window.entry.insert(0, "typed meanwhile")
        run_until(window, lambda: window.button["text"] == "Stop")
        assert not decoder.is_interrupted.is_set()
        window.button.invoke()
        run_until(window, lambda: window.button["text"] == "Send")
        assert decoder.is_interrupted.is_set()
        assert window.entry.get() == "typed meanwhile"


def test_closing_ends_an_answer(tiny_model: Path) -> None:
    decoder = StuckDecoder()
    with window_of(lambda progress: engine_of(tiny_model, decoder)) as window:
        ask(window, "the in")
        run_until(window, decoder.has_begun.is_set)
    assert decoder.is_interrupted.is_set()


def test_progress_of_loading_is_shown_and_closing_ends_it() -> None:
    is_over = threading.Event()

    def load_for_ever(progress: Callable[[LoadProgress], None]) -> Engine:
        try:
            while True:
                progress(LoadProgress("open", "tiny", 1, 4))
                time.sleep(0.001)
        finally:
            is_over.set()

    with window_of(load_for_ever) as window:
        run_until(window, lambda: float(window.bar["value"]) == 25)
    assert is_over.is_set()


def test_errors_are_shown(tiny_model: Path) -> None:
    def fail(progress: Callable[[LoadProgress], None]) -> Engine:
        raise EdgeSpecError("no such model")

    with window_of(fail) as window:
        run_until(window, lambda: "could not be loaded: no such model" in shown(window))
    with window_of(lambda progress: table_engine(tiny_model)) as window:
        ask(window, "the in " * 4000)
        assert "do not fit the context" in shown(window)
        assert window.reply is None


def test_the_program_runs_as_it_is_printed(tiny_model: Path) -> None:
    """With a user who types a question into its window when it can be sent, and closes it behind the answer."""
    user = """
import runpy, sys, tkinter

def act(root):
    log, entry, button, bar = root.winfo_children()
    if str(button["state"]) == "normal" and button["text"] == "Send":
        if log.get("1.0", "end").strip():
            print(log.get("1.0", "end"))
            root.tk.eval(root.protocol("WM_DELETE_WINDOW"))
            return
        entry.insert(0, "the in")
        button.invoke()
    root.after(20, act, root)

def mainloop(root, run=tkinter.Tk.mainloop):
    root.after(20, act, root)
    run(root)

tkinter.Tk.mainloop = mainloop
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    command = [sys.executable, "-c", user, str(DEMOS / "tk_app.py"), "--model", str(tiny_model)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("> the in\n")
    assert len(ran.stdout.strip()) > len("> the in")
