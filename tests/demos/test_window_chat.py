"""The demo with a window: the events of its thread and, where there is a display, the texts of its widgets."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import background_chat
import pytest
import tiny
from background_chat import BackgroundChat, Event
from stuck import StuckDecoder, engine_of
from table_decoder import TableDecoder

from edgespec import EdgeSpecError, Engine, Message
from edgespec.decoding.decoder import Decoder


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_chat, "MAX_TOKENS", 60)


def table() -> TableDecoder:
    return TableDecoder(tiny.VOCAB, seed=3, context_length=tiny.CONTEXT)


@contextmanager
def chatting(folder: Path, decoder: Decoder) -> Iterator[BackgroundChat]:
    """Chat with a decoder, and check that no thread is left behind."""
    chat = BackgroundChat(lambda report: engine_of(folder, decoder))
    try:
        assert chat.events.get(timeout=120) == Event("ready", "tiny")
        yield chat
    finally:
        chat.close()
    assert "background chat" not in [each.name for each in threading.enumerate()]


def until_over(chat: BackgroundChat) -> tuple[str, Event]:
    """Wait for an answer to end; its text, and the event that ended it."""
    text = ""
    while (event := chat.events.get(timeout=120)).kind in ("text", "stage"):
        text += event.text
    return text, event


def test_answers_are_those_of_the_engine_with_all_messages(tiny_model: Path) -> None:
    engine = engine_of(tiny_model, table())
    messages: list[Message] = []
    with chatting(tiny_model, table()) as chat:
        for question in ("the in", "an the"):
            messages.append(Message("user", question))
            whole = engine.generate(messages, max_tokens=60)
            chat.ask(question)
            text, event = until_over(chat)
            assert (text, event.kind, event.text) == (whole.text, "done", whole.finish_reason)
            assert event.stats is not None
            messages.append(Message("assistant", text))


def test_stop_ends_an_answer_before_its_first_token_and_forgets_the_question(tiny_model: Path) -> None:
    decoder = StuckDecoder()
    with chatting(tiny_model, decoder) as chat:
        chat.ask("the in")
        assert decoder.has_begun.wait(120)
        chat.stop()
        assert until_over(chat)[1].text == "cancelled"
        assert decoder.is_interrupted.is_set()


def test_stop_right_after_the_question_is_not_lost(tiny_model: Path) -> None:
    with chatting(tiny_model, StuckDecoder()) as chat:
        for _ in range(5):
            chat.ask("the in")
            chat.stop()
            assert until_over(chat)[1].text == "cancelled"


def test_closing_ends_an_answer(tiny_model: Path) -> None:
    decoder = StuckDecoder()
    with chatting(tiny_model, decoder) as chat:
        chat.ask("the in")
        assert decoder.has_begun.wait(120)
    assert decoder.is_interrupted.is_set()


def test_closing_ends_loading_at_its_next_stage() -> None:
    reports = 0

    def load_for_ever(report: Callable[[str], None]) -> Engine:
        nonlocal reports
        while True:
            report("still loading")
            reports += 1
            time.sleep(0.001)

    chat = BackgroundChat(load_for_ever)
    assert chat.events.get(timeout=120) == Event("stage", "still loading")
    chat.close()
    assert reports > 0


def test_errors_are_reported() -> None:
    def fail(report: Callable[[str], None]) -> Engine:
        raise EdgeSpecError("no such model")

    chat = BackgroundChat(fail)
    assert chat.events.get(timeout=120) == Event("failed", "no such model")
    chat.close()


def test_question_that_does_not_fit_is_reported_and_the_next_is_answered(tiny_model: Path) -> None:
    with chatting(tiny_model, table()) as chat:
        chat.ask("the in " * 2000)
        text, event = until_over(chat)
        assert (text, event.kind) == ("", "failed")
        assert "do not fit the context" in event.text
        chat.ask("the in")
        assert until_over(chat)[1].kind == "done"


def test_dropped_messages_are_reported(tiny_model: Path) -> None:
    with chatting(tiny_model, table()) as chat:
        shown = ""
        for _ in range(6):
            chat.ask("the in an " * 40)
            text, event = until_over(chat)
            assert event.kind == "done", event
            shown += text
    assert "2 earlier messages no longer fit the context" in shown


@contextmanager
def window_of(folder: Path, decoder: Decoder) -> Iterator[Any]:
    import tkinter

    from window_chat import Window

    gc.collect()  # Tk ends a process where another thread frees a window that was closed before
    window = Window(tkinter.Tk(), lambda report: engine_of(folder, decoder))
    try:
        run_until(window, lambda: str(window.button["state"]) == "normal")
        yield window
    finally:
        window.close()
    assert "background chat" not in [each.name for each in threading.enumerate()]


def run_until(window: Any, has_come: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not has_come():
        assert time.monotonic() < deadline, window.log.get("1.0", "end")
        window.root.update()
        time.sleep(0.01)


def test_window_shows_question_answer_and_figures(display: None, tiny_model: Path) -> None:
    whole = engine_of(tiny_model, table()).generate([Message("user", "the in")], max_tokens=60)
    with window_of(tiny_model, table()) as window:
        window.entry.insert("1.0", "the in")
        window.entry.event_generate("<Return>")
        window.root.update()
        if window.entry.get("1.0", "end").strip():
            window.button.invoke()  # without a window manager the entry may have no focus
        run_until(window, lambda: window.button["text"] == "Stop" or "per pass" in window.log.get("1.0", "end"))
        run_until(window, lambda: window.button["text"] == "Send")
        shown = window.log.get("1.0", "end")
    assert shown.startswith(f"the in\n{whole.text}")
    assert f"{whole.stats.tokens_per_pass:.2f} tokens per pass" in shown


def test_stop_button_and_closing_end_answers(display: None, tiny_model: Path) -> None:
    decoder = StuckDecoder()
    with window_of(tiny_model, decoder) as window:
        window.entry.insert("1.0", "the in")
        window.button.invoke()
        run_until(window, decoder.has_begun.is_set)
        assert window.button["text"] == "Stop"
        window.button.invoke()
        run_until(window, lambda: window.button["text"] == "Send")
        assert "stopped" in window.log.get("1.0", "end")
        decoder.has_begun.clear()
        decoder.is_interrupted.clear()
        window.entry.insert("1.0", "the in")
        window.button.invoke()
        run_until(window, decoder.has_begun.is_set)
    assert decoder.is_interrupted.is_set()


def test_code_is_shown_without_its_fences_in_letters_of_one_width(display: None, tiny_model: Path) -> None:
    from tkinter import font

    with window_of(tiny_model, table()) as window:
        for text in ("See:\n``", "`py\nx = 1\n", "```\nDone."):
            window._show(Event("text", text))
        window._show(Event("done", "stop"))
        assert window.log.get("1.0", "end").startswith("See:\nx = 1\nDone.")
        begin, end = map(str, window.log.tag_ranges("code"))
        assert window.log.get(begin, end) == "x = 1\n"
        assert font.Font(font=window.log.tag_cget("code", "font")).metrics("fixed")
