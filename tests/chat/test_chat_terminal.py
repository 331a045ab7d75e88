"""The chat in a real terminal: typed keys in, screen out."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pexpect", reason="needs a pseudo-terminal, which Windows lacks")
pytest.importorskip("termios", reason="needs a pseudo-terminal, which Windows lacks")

import tiny
from terminal import ALT_ENTER, COLUMNS, CTRL_C, CTRL_J, CTRL_U, UP, Terminal, latest_chat

from edgespec import Message
from edgespec.chat.compacting import SUMMARY_REQUEST
from edgespec.chat.saved_chats import list_chats
from edgespec.config.presets import Preset, PresetFolder
from edgespec.engine.transcript import Transcript
from edgespec.export.convert import export_model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*forkpty.*")]

SHORT = ("--max-tokens", 12, "--drafter", "none")
PROMPT_LEFT = "\x1b[?2004l"  # pasted text is no longer bracketed
RULE_CHAT = Path(__file__).parents[1] / "support" / "rule_chat.py"
EDGESPEC = f"{sys.executable} -m edgespec"


def chat(model: object, home: Path, *arguments: object, **settings: str) -> Terminal:
    terminal = Terminal("chat", model, *arguments, home=home, environment=settings)
    terminal.ready()
    return terminal


def rule_script(tmp_path: Path, answers: dict[str, Any], pause_s: float = 0.0, *, saves: bool = False) -> Path:
    """The file of a chat whose answers are given."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"answers": answers, "pause_s": pause_s, "saves": saves}))
    return script


def rule_chat(
    tmp_path: Path, answers: dict[str, Any], pause_s: float = 0.0, *, saves: bool = False, **settings: str
) -> Terminal:
    """A chat whose answers are given."""
    script = rule_script(tmp_path, answers, pause_s, saves=saves)
    terminal = Terminal(script, home=tmp_path, environment=settings, program=(sys.executable, str(RULE_CHAT)))
    if settings.get("TERM") != "dumb":
        terminal.ready()
    return terminal


def user_messages(home: Path) -> list[str]:
    """The user's messages in the last transcript."""
    path = latest_chat(home / "chats")
    assert path is not None
    return [message.content for message in Transcript.read(path).messages if message.role == "user"]


def test_a_conversation_is_typed_stopped_and_kept(tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "long.gguf", tiny.random_weights(), override={"llama.context_length": 50_000})
    export_model(tmp_path / "long.gguf", tmp_path / "long", precision="fp32")
    terminal = chat(tmp_path / "long", tmp_path, "--max-tokens", 40_000, "--drafter", "none")
    terminal.enter("the in")
    terminal.wait_for(PROMPT_LEFT)
    terminal.wait_for("\r \r")  # the mark that waits for the first word goes; the answer takes 10 s or more
    terminal.type(CTRL_C)
    terminal.ready()
    terminal.see("stopped")
    terminal.ask("/nonsense")
    terminal.see("there is no command /nonsense")
    terminal.ask("/set max-tokens 12")
    terminal.settle()
    terminal.type(f"one{CTRL_J}two{ALT_ENTER}//three")
    terminal.ask("", "drafting is off")
    terminal.settle()  # the status line says that drafting is off, too, so it may have come before the answer
    terminal.type(CTRL_C)
    terminal.wait_for("press Ctrl-C again")
    terminal.ready()
    terminal.type(CTRL_C)
    assert terminal.exit_code() == 130
    assert user_messages(tmp_path)[-1] == "one\ntwo\n//three"
    assert "/nonsense" not in user_messages(tmp_path)
    assert (tmp_path / "history").stat().st_mode & 0o777 == 0o600
    typed = [json.loads(line) for line in (tmp_path / "history").read_text().splitlines()]
    assert typed == ["the in", "/nonsense", "/set max-tokens 12", "one\ntwo\n//three"]


def test_two_hundred_lines_are_pasted_as_one_message(tmp_path: Path) -> None:
    text = "\n".join(f"line {i} of what was pasted: ✓ 世界" for i in range(200))
    terminal = rule_chat(tmp_path, {text: ["It has 200 lines."]})
    started = time.monotonic()
    terminal.paste(text)
    terminal.wait_for("line 199")
    taken_s = time.monotonic() - started
    terminal.ask("", "It has 200 lines.")
    terminal.paste("a " * 10_000)
    terminal.ask("", "Up brings back")
    assert "or use /undo, /compact, /clear or /set overflow drop-oldest" in " ".join(terminal.screen().split())
    assert "overflow=" not in terminal.screen()
    terminal.leave()
    assert taken_s < 60  # 0.1 s on an idle machine


def test_ctrl_c_stops_before_the_first_word_and_retry_asks_again(tmp_path: Path) -> None:
    terminal = rule_chat(tmp_path, {"slow": ["never", " seen"]}, pause_s=120)
    terminal.enter("slow")
    terminal.wait_for("…")
    started = time.monotonic()
    terminal.type(CTRL_C)
    terminal.wait_for("stopped before the first word; /retry")
    assert time.monotonic() - started < 60
    terminal.ready()
    terminal.enter("/retry")
    terminal.wait_for("…")
    terminal.type(CTRL_C)
    terminal.ready()
    assert "never" not in terminal.screen()
    for pause_s in (None, 0.0, 0.005, 0.01, 0.02):  # None: behind Enter in one piece
        if pause_s is None:
            terminal.type(f"slow\r{CTRL_C}")
        else:
            terminal.enter("slow")
            time.sleep(pause_s)
            terminal.type(CTRL_C)
        terminal.wait_for("stopped before the first word; /retry")
        terminal.ready()
    terminal.type(f"/history\r{CTRL_C}")
    terminal.wait_for("press Ctrl-C again")
    terminal.ready()
    terminal.leave()


def test_ctrl_c_stops_an_answer_and_keeps_what_there_was(tmp_path: Path) -> None:
    words = [f"word{i} " for i in range(1000)]
    terminal = rule_chat(tmp_path, {"count": words, "done": ["yes"]}, pause_s=0.05)
    terminal.enter("count")
    terminal.wait_for("word3")
    terminal.type(CTRL_C)
    terminal.ready()
    terminal.ask(f"/save {tmp_path / 'saved.jsonl'}", "2 messages saved")
    terminal.enter("done")
    terminal.wait_for("yes")
    saved = Transcript.read(tmp_path / "saved.jsonl")
    assert saved.messages[1].content.startswith("word0 word1 word2 word3 ")
    assert len(saved.messages[1].content) < 5000
    assert saved.cut_short == ((1, "cancelled"),)


def test_keys_typed_during_an_answer_wait_for_the_next_message(tmp_path: Path) -> None:
    is_typed = tmp_path / "typed"
    count = ["one ", {"until": str(is_typed)}, "two ", "three ", "four"]
    terminal = rule_chat(tmp_path, {"count": count, "next": ["NEXT"]})
    terminal.enter("count")
    terminal.wait_for("one")
    terminal.type("next")
    is_typed.touch()
    terminal.ready()
    assert "NEXT" not in terminal.see("one two three four")
    terminal.enter("")
    terminal.wait_for("NEXT")


def test_lines_typed_during_an_answer_are_neither_sent_nor_run(tmp_path: Path) -> None:
    is_typed = tmp_path / "typed"
    count = ["one ", {"until": str(is_typed)}, "two ", "three"]
    terminal = rule_chat(tmp_path, {"count": count, "next": ["GOT IT"], "last": ["LAST"]})
    terminal.enter("count")
    terminal.wait_for("one")
    terminal.type(f"next\r/save {tmp_path / 'talk'}\r/system\rlasd\x7ft\r")
    is_typed.touch()
    terminal.ready()
    terminal.see("what you typed meanwhile waits here")
    assert "save" not in terminal.settle()
    terminal.ask("", "GOT IT")
    assert not (tmp_path / "talk").exists()
    terminal.ask("", "messages saved")
    terminal.ask("", "no system message")
    terminal.ask("", "LAST")
    terminal.leave()


def test_lines_that_wait_are_told_and_nothing_typed_later_joins_them(tmp_path: Path) -> None:
    typed = [tmp_path / "typed first", tmp_path / "typed then"]
    first, then = (["one ", {"until": str(path)}, "two ", "three"] for path in typed)
    answers = {"count": first, "first": then, "second": ["GOT IT"], "third": ["LAST"]}
    terminal = rule_chat(tmp_path, answers)
    terminal.enter("count")
    terminal.wait_for("one")
    terminal.type("first\rsecond")
    typed[0].touch()
    terminal.ready()
    terminal.see("lines after it: 1")
    terminal.enter("")
    terminal.wait_for("one")
    terminal.type("third")
    typed[1].touch()
    terminal.ready()
    terminal.see("> second")
    assert "third" not in terminal.settle()
    terminal.ask("", "GOT IT")
    terminal.ask("", "LAST")
    terminal.leave()


def test_the_line_below_the_input_follows_lines_that_ctrl_c_drops(tmp_path: Path) -> None:
    is_typed = tmp_path / "typed"
    terminal = rule_chat(tmp_path, {"count": ["one ", {"until": str(is_typed)}, "two ", "three"]})
    terminal.enter("count")
    terminal.wait_for("one")
    terminal.type("first\rsecond\rthird")
    is_typed.touch()
    terminal.ready()
    terminal.see("lines after it: 2")
    terminal.type(CTRL_C)
    terminal.see("> second")
    terminal.see("lines after it: 1")
    terminal.type(CTRL_C)
    terminal.settle()
    terminal.type(CTRL_C)
    assert "waits here" not in terminal.settle()
    terminal.leave()


_LOADS_SLOWLY = """
import fcntl, sys, termios, time
from edgespec.cli import chat
from edgespec.cli.main import main

def echoes():
    return bool(termios.tcgetattr(0)[3] & termios.ECHO)

def load_engine(options, **settings):
    print(f"loads, echo {echoes()}", flush=True)
    while fcntl.ioctl(0, termios.FIONREAD, bytes(4))[0] < 17:
        time.sleep(0.01)
    return load(options, **settings)

load, chat.load_engine = chat.load_engine, load_engine
main(sys.argv[1:])
print(f"left, echo {echoes()}")
"""


def test_what_is_typed_while_a_model_loads_is_not_echoed_and_waits(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.py").write_text(_LOADS_SLOWLY)
    program = (sys.executable, str(tmp_path / "chat.py"))
    terminal = Terminal("chat", tiny_model, *SHORT, home=tmp_path, program=program)
    terminal.wait_for("loads, echo False")
    terminal.type("the in\r/save file\r")
    terminal.ready()
    terminal.see("> the in")
    screen = terminal.settle()
    assert screen.count("the in") == 1
    assert "/save" not in screen, "which is a message of its own"
    assert not (tmp_path / "chats").exists()
    terminal.type(CTRL_C)  # which drops that line alone
    terminal.see("> /save file")
    terminal.type(CTRL_C + "\x04")
    terminal.wait_for("left, echo True")


def test_a_paste_during_an_answer_waits_in_the_input_as_one_message(tmp_path: Path) -> None:
    lines = [f"line {i} of a paste that is longer than what a terminal keeps" for i in range(400)]
    text = "\n".join([*lines[:200], f"/save {tmp_path / 'saved'}", *lines[200:]])
    terminal = rule_chat(tmp_path, {"count": [f"n{i} " for i in range(2000)], text: ["GOT IT"]}, pause_s=0.05)
    terminal.enter("count")
    terminal.wait_for("n3")
    terminal.paste(text)
    terminal.type(CTRL_C)  # behind the paste, and once
    terminal.ready()
    terminal.see("line 399")
    assert not (tmp_path / "saved").exists()
    terminal.ask("", "GOT IT")
    terminal.leave()


def test_ten_kilobytes_pasted_during_an_answer_are_no_messages_and_one_ctrl_c_ends_the_answer(
    tmp_path: Path,
) -> None:
    terminal = rule_chat(tmp_path, {"count": [f"n{i} " for i in range(2000)]}, pause_s=0.05)
    terminal.enter("count")
    terminal.wait_for("n3")
    lines = [f"line {i} " + "x" * 100 for i in range(90)]
    terminal.paste("\n".join([*lines, f"/save {tmp_path / 'saved'}", ""]))
    terminal.type(CTRL_C)
    terminal.wait_for("stopped")
    terminal.ready()
    assert "what?" not in terminal.settle()  # the answer to any other message
    assert not (tmp_path / "saved").exists()
    terminal.process.close(force=True)


def test_a_paste_that_ends_after_the_answer_is_still_one_message(tmp_path: Path) -> None:
    is_typed = tmp_path / "typed"
    answers = {"count": ["one ", {"until": str(is_typed)}, "two"], "a\nb\nc": ["GOT IT"]}
    terminal = rule_chat(tmp_path, answers)
    terminal.enter("count")
    terminal.wait_for("one")
    terminal.tells_cursor = False  # no terminal would do that within a paste
    terminal.type("\x1b[200~a\rb")
    is_typed.touch()
    terminal.ready()
    assert "GOT IT" not in terminal.settle()
    terminal.type("\rc\x1b[201~")
    terminal.tells_cursor = True
    terminal.ask("", "GOT IT")
    assert "> a\n  b\n  c" in terminal.screen()
    terminal.leave()


def test_enter_takes_what_a_search_found_and_ctrl_c_leaves_it(tmp_path: Path) -> None:
    terminal = rule_chat(tmp_path, {"apple pie": ["APPLE"], "pear": ["PEAR"]})
    terminal.ask("apple pie", "APPLE")
    terminal.ask("pear", "PEAR")
    terminal.type("\x12app")
    terminal.settle()
    terminal.enter("")
    assert "search" not in terminal.settle()
    terminal.ask("", "APPLE")
    terminal.type("\x12pea")
    terminal.see("search")
    terminal.type(CTRL_C)
    assert "search" not in terminal.settle()
    terminal.leave()


def test_keys_are_not_echoed_after_a_stop_and_a_return(tmp_path: Path) -> None:
    words = [f"word{i} " for i in range(400)]
    script = rule_script(tmp_path, {"count": words, "hidden": ["FOUND"]}, pause_s=0.05)
    terminal = Terminal("--norc", "-i", home=tmp_path, program=("/bin/bash",), environment={"PS1": "shell$ "})
    terminal.enter(f"{sys.executable} {RULE_CHAT} {script}")
    terminal.ready()
    terminal.enter("count")
    terminal.wait_for("word3")
    terminal.type("\x1a")
    terminal.wait_for("Stopped")
    terminal.wait_for("shell$ ")
    terminal.enter("fg")
    at = terminal.wait_for("rule_chat")
    terminal.wait_for("word")
    terminal.type("hidden")
    terminal.wait_for(" word", after=terminal.wait_for(" word") + 60)
    terminal.type(CTRL_C)
    ready = terminal.ready()
    assert "hidden" not in terminal.written[at:ready]
    terminal.ask("", "FOUND")


def test_a_file_that_is_there_is_not_saved_over(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    terminal = rule_chat(tmp_path, {"hello": ["HELLO"]})
    terminal.ask("hello", "HELLO")
    terminal.ask(f"/save {tmp_path / 'notes'}", "exists already")
    assert (tmp_path / "notes").read_text() == "mine"
    terminal.ask(f"/save! {tmp_path / 'notes'}", "2 messages saved")
    terminal.ask(f"/save {tmp_path / 'notes'}", "2 messages saved")  # which this chat has written
    terminal.leave()
    assert len(Transcript.read(tmp_path / "notes").messages) == 2


def test_what_was_said_is_shown_when_a_conversation_is_loaded_and_on_demand(tmp_path: Path) -> None:
    talk = [("user", "first?"), ("assistant", "one **bold** word"), ("user", "second?"), ("assistant", "two")]
    talk += [("user", "third?"), ("assistant", "\n\n".join(["a", *(f"row {i}" for i in range(40))]))]
    messages = tuple(Message(*each) for each in talk)
    Transcript(messages=messages).save(tmp_path / "talk")
    terminal = rule_chat(tmp_path, {})
    at = terminal.position
    terminal.ask(f"/load {tmp_path / 'talk'}", "6 messages")
    shown = terminal.written[at : terminal.position]
    assert shown.index("second?") < shown.index("two") < shown.index("third?") < shown.index("row 39")
    assert "first?" not in shown
    assert "row 3\r" not in shown
    at = terminal.position
    terminal.ask("/history")
    shown = terminal.written[at : terminal.position]
    assert (
        shown.index("first?") < shown.index("\x1b[1mbold\x1b[0m") < shown.index("row 3\r") < shown.index("row 39")
    )
    terminal.ask("/history 1")
    assert "first?" not in terminal.written[at + len(shown) : terminal.position]
    terminal.ask("/history none", "/history takes the number of")
    terminal.leave()


def test_a_loop_is_said_and_ended_and_its_gain_is_not_praised(tmp_path: Path) -> None:
    words = [f"word{i} " for i in range(20)]
    terminal = rule_chat(tmp_path, {"loop": ["Well: ", *(words * 400)], "row": ["0, "] * 200})
    terminal.ask("loop", "stopped: it")
    terminal.see("/set loops keep")
    screen = " ".join(terminal.settle().split())
    assert "the answer repeated itself, so it does not tell" in screen
    assert "the answer repeated itself" in screen
    assert "/set loops keep" in screen
    assert terminal.written.count("word7") < 40
    terminal.ask("row", "drafting is off")
    assert "repeated" not in terminal.settle()[-200:]
    terminal.ask("/set loops keep")
    terminal.ask("loop", "so it does not tell")
    assert terminal.written.count("word7") > 400
    terminal.leave()


def test_a_table_that_is_made_says_so_and_keeps_words_whole(tmp_path: Path) -> None:
    long = "Jupiter is the largest of the planets and has a great red spot, a storm of centuries"
    pieces = ["Here:\n\n", "| planet | what it is known for |\n", "|---|---|\n", f"| Jupiter | {long} |\n"]
    pieces += ["| Neptune | blue |\n"] * 3
    terminal = rule_chat(tmp_path, {"go": pieces}, pause_s=0.2)
    terminal.enter("go")
    terminal.wait_for("a table, 3 rows so far")
    terminal.wait_for("a table, 6 rows so far")
    terminal.ready()
    screen = terminal.settle()
    assert "so far" not in screen
    words = set(screen.replace("│", " ").split())
    assert {*long.split()} <= words
    terminal.leave()


def test_a_wide_table_breaks_no_word_that_fits(tmp_path: Path) -> None:
    long, text = "Donaudampfschifffahrtsgesellschaft", "a storm that has been seen for some centuries"
    pieces = ["| name | one | two |\n", "|---|---|---|\n", f"| {long} | {text} | {text} |\n"]
    terminal = rule_chat(tmp_path, {"go": pieces})
    terminal.ask("go", "drafting is off")
    words = set(terminal.settle().replace("│", " ").split())
    assert {long, *text.split()} <= words
    terminal.leave()


def test_the_list_of_models_fits_80_columns(tmp_path: Path) -> None:
    terminal = Terminal("models", "list", "--all", home=tmp_path)
    assert terminal.exit_code() == 0
    lines = terminal.written.splitlines()
    assert max(map(len, lines)) <= COLUMNS
    assert any(line.split()[:1] == ["smollm2-135m"] for line in lines)
    assert "also shows" in terminal.written
    assert any(line.split()[-1:] == ["WHY"] for line in lines), "what to begin with comes with its reason"


def test_chats_are_named_listed_opened_branched_and_deleted(tmp_path: Path) -> None:
    answers = {"first": ["FIRST"], "second": ["SECOND"], "other": ["OTHER"], "more": ["MORE"]}
    terminal = rule_chat(tmp_path, answers, saves=True)
    terminal.ask("first", "FIRST")
    terminal.ask("second", "SECOND")
    terminal.ask("/name rivers", "--continue rivers opens it again")
    terminal.ask("/clear", "a new conversation")
    terminal.ask("other", "OTHER")
    terminal.ask("/chats", "/open NAME or /open NUMBER")
    rows = [line.split() for line in terminal.settle().splitlines()]
    assert any(row[:3] == ["*1", "other", "2"] for row in rows)
    assert any(row[:3] == ["2", "rivers", "4"] for row in rows)
    terminal.ask("/chats SECOND", "rivers")
    terminal.ask("/chats nowhere", "no chat contains 'nowhere'")
    terminal.ask("/open river", "second")
    terminal.ask("/branch 1", "a branch with the first 1 of 2")
    terminal.ask("more", "MORE")
    terminal.ask("/delete other", "/delete! other deletes")
    terminal.ask("/delete! other", "deleted 'other'")
    terminal.ask("/name two words", "this chat is called")
    terminal.leave()
    assert terminal.screen().endswith("edgespec chat --continue 'two words' continues this chat")
    chats = {chat.title: chat.transcript for chat in list_chats(tmp_path / "chats")}
    assert {title: len(each.messages) for title, each in chats.items()} == {"two words": 4, "rivers": 4}
    assert [each.content for each in chats["two words"].messages] == ["first", "FIRST", "more", "MORE"]


def test_ctrl_c_gives_up_an_edit_and_what_is_typed_then_is_a_new_message(tmp_path: Path) -> None:
    terminal = rule_chat(tmp_path, {"first": ["FIRST"], "second": ["SECOND"], "third": ["THIRD"]}, saves=True)
    terminal.ask("first", "FIRST")
    for command, what in (("/edit", "your last message"), ("/answer", "the answer")):
        terminal.enter(command)
        terminal.ready()
        terminal.wait_for(f"you change {what}; Ctrl-C leaves it as it was")
        terminal.type("x" + CTRL_C)
        terminal.wait_for("(nothing has changed)")
        terminal.ready()
    terminal.ask("second", "SECOND")
    terminal.type("a line" + CTRL_C)  # elsewhere it only empties the input
    terminal.ask("third", "THIRD")
    terminal.leave()
    (chat,) = list_chats(tmp_path / "chats")
    said = ["first", "FIRST", "second", "SECOND", "third", "THIRD"]
    assert [each.content for each in chat.transcript.messages] == said


def test_an_edit_that_is_refused_comes_back_and_one_that_is_emptied_changes_nothing(tmp_path: Path) -> None:
    answers = {"/first": ["FIRST"], "/first two": ["SECOND"]}
    terminal = rule_chat(tmp_path, answers, saves=True)
    terminal.ask("//first", "FIRST")
    terminal.enter("/edit")
    terminal.ready()
    terminal.ask(10_000 * " x", "tokens do not fit")
    terminal.wait_for("you change your last message; Ctrl-C leaves it as it was")
    terminal.type(CTRL_U)
    terminal.ask("//first two", "SECOND")
    terminal.enter("/edit")
    terminal.ready()
    terminal.type(CTRL_U)
    terminal.ask("", "(nothing has changed)")
    terminal.leave()
    (chat,) = list_chats(tmp_path / "chats")
    assert [each.content for each in chat.transcript.messages] == ["/first two", "SECOND"]


def test_an_answer_is_changed_continued_begun_and_exported(tmp_path: Path) -> None:
    answers = {"count": ["one "], "count|one, two,": [" three"], "list|1.": [" apples"], "list|1. apples": []}
    terminal = rule_chat(tmp_path, answers)
    terminal.ask("count", "one")
    terminal.enter("/answer")
    terminal.ready()
    terminal.type("\x7f, two,")
    terminal.ask("", "the answer is edited")
    terminal.ask("/go", "three")
    terminal.ask("/prefill 1.", "begins with")
    terminal.ask("list", "apples")
    terminal.see("1. apples")
    terminal.ask("/go", "the model ended the answer here and added nothing")
    terminal.ask(f"/export {tmp_path / 'talk.md'}", "4 messages written")
    terminal.ask(f"/export {tmp_path / 'talk.txt'}", "does not say the format")
    terminal.leave()
    written = (tmp_path / "talk.md").read_text()
    assert "## You\n\ncount\n\n## Answer\n\none, two, three\n" in written
    assert "1. apples" in written


def test_a_chat_is_continued_by_its_name(tiny_model: Path, tmp_path: Path) -> None:
    terminal = chat(tiny_model, tmp_path, *SHORT)
    terminal.ask("the in", "tokens/s")
    terminal.ask("/name mine", "called mine")
    terminal.ask("/clear")
    terminal.ask("an on", "tokens/s")
    terminal.leave()
    terminal = Terminal("chat", "--continue", "mine", *SHORT, home=tmp_path)
    terminal.ready()
    assert "the in" in terminal.written
    assert "an on" not in terminal.written
    terminal.leave()
    terminal = Terminal("chat", "--continue", "nine", home=tmp_path)
    assert terminal.exit_code() == 2
    assert "did you mean 'mine'?" in terminal.written


def test_reasoning_is_dimmed_folded_hidden_switched_off_and_bounded(tmp_path: Path) -> None:
    thought = [f"idea{i} " for i in range(40)]
    answers: dict[str, Any] = {"why": ["<think>\n", *thought, "\n</think>\n\n", "BECAUSE"], "why|off": ["BRIEF"]}
    answers["why|at most 50"] = answers["why"]
    answers["why|at most 10"] = ["<think>", *thought[:10], "\n</think>\n\n", "EARLY"]
    terminal = rule_chat(tmp_path, answers)
    terminal.ask("why", "drafting is off")
    assert "\x1b[2midea0" in terminal.written
    assert "think>" not in terminal.written.split("drafting is off")[1]
    terminal.see("BECAUSE")
    terminal.ask("/think fold")
    at = terminal.position
    terminal.ask("why", "thought for 4")
    assert "idea7" not in terminal.written[at:]
    terminal.see("BECAUSE")
    terminal.ask("/think 10")
    terminal.ask("why", "EARLY")
    terminal.see("it thought for 10 tokens, the limit that /think set")
    terminal.ask("/think 50", "at most 50 tokens")
    answers_whole = terminal.position
    terminal.ask("why", "drafting is off")
    assert "the limit that /think set" not in terminal.written[answers_whole:]
    terminal.ask("/think 0", "at most 0 tokens")
    terminal.ask("/think -1", "no limit")
    terminal.ask("/think off")
    terminal.ask("why", "BRIEF")
    terminal.ask("/think nonsense", "/think takes on, off")
    terminal.leave()


def test_a_conversation_is_shortened_to_a_summary_and_back(tmp_path: Path) -> None:
    summary = ["We ", "spoke ", "of rivers."]
    answers = {"one": ["ONE " * 50], "two": ["TWO"], "three": ["THREE"], SUMMARY_REQUEST: summary}
    terminal = rule_chat(tmp_path, answers, saves=True)
    terminal.ask("/compact", "there is nothing to shorten yet")
    terminal.ask("one", "ONE")
    terminal.ask("two", "TWO")
    terminal.ask("/compact", "tokens became")
    assert "We spoke of rivers." in terminal.written
    terminal.ask("three", "THREE")
    contents = [each.content for each in list_chats(tmp_path / "chats")[0].transcript.messages]
    assert contents == [SUMMARY_REQUEST, "We spoke of rivers.", "two", "TWO", "three", "THREE"]
    assert [each.title for each in list_chats(tmp_path / "chats")] == ["two", "one"]
    terminal.ask("/compact undo", "4 messages")
    assert user_messages(tmp_path) == ["one", "two"]
    terminal.ask("/compact undo", "was not shortened")
    terminal.leave()
    assert sorted(len(each.transcript.messages) for each in list_chats(tmp_path / "chats")) == [4, 6]


def test_a_summary_that_is_stopped_changes_nothing(tmp_path: Path) -> None:
    answers = {"one": ["ONE"], "two": ["TWO"], SUMMARY_REQUEST: [f"s{i} " for i in range(400)]}
    terminal = rule_chat(tmp_path, answers, pause_s=0.03, saves=True)
    terminal.ask("one", "ONE")
    terminal.ask("two", "TWO")
    terminal.enter("/compact")
    terminal.wait_for("s3")
    terminal.type(CTRL_C)
    terminal.wait_for("nothing has changed")
    terminal.ready()
    terminal.leave()
    assert user_messages(tmp_path) == ["one", "two"]


def test_wide_characters_are_never_broken_whatever_pieces_they_come_in(tmp_path: Path) -> None:
    text = "表情 👍🏽 と 👩‍💻 と é と 한국어 문장이 계속 이어집니다 " * 6 + "终。"
    terminal = rule_chat(tmp_path, {"wide": list(text)})
    terminal.enter("wide")
    terminal.wait_for("终")
    terminal.settle()
    shown = terminal.written.split("wide", 1)[1]
    assert "�" not in shown
    for cluster in ("👍🏽", "👩‍💻", "é", "한국어"):
        assert shown.count(cluster) == 6
    assert max(map(len, terminal.screen().splitlines())) <= COLUMNS


def test_what_would_steer_the_terminal_is_shown_escaped(tmp_path: Path) -> None:
    hostile = "a\x1b]52;c;ZXZpbA==\x07b\x1b[2Jc\rd\x9b31me `\x1b[1m` &#27;[2J\u202ex"
    terminal = rule_chat(tmp_path, {"go": [hostile], "plain": [hostile]})
    terminal.see("rule\\x1b]0;evil\\x07 on cpu")
    for view in ("markdown", "plain", "drafted"):
        terminal.ask(f"/show {view}")
        terminal.ask("go", "drafting is off")
    escaped = "a\\x1b]52;c;ZXZpbA==\\x07b\\x1b[2Jc\\x0dd\\x9b31me"
    assert (
        terminal.written.count(escaped) == 5
    )  # as Markdown, again as plain text, once more, again drafted, and once more
    assert "]52;c" not in terminal.written.replace("\\x1b]52;c", "")
    assert "\x1b]0;" not in terminal.written
    assert "\x1b[2J" not in terminal.written
    assert "\u202e" not in terminal.written


def test_markdown_is_appended_and_nothing_above_is_touched(tmp_path: Path) -> None:
    pieces = ["# Title\n\nSome **bo", "ld** text\n\n", "| a | b |\n|---|---|\n", "| 1 | 2 |\n\n"]
    pieces += ["```python\n", "def f():\n", "    return 1\n", "```\n", "\nend"]
    terminal = rule_chat(tmp_path, {"go": pieces})
    terminal.enter("go")
    begin = terminal.wait_for("…")
    end = terminal.wait_for("drafting is off")
    shown = terminal.written[begin:end]
    assert "\x1b[1mbold\x1b[0m" in shown
    assert "def" in shown
    assert "\x1b[A" not in shown
    assert "\x1b[2K" not in shown
    assert "**" not in terminal.screen()
    rows = [line.split() for line in terminal.screen().splitlines()]
    assert ["1", "│", "2"] in rows


def test_a_window_may_change_its_size_at_any_time(tmp_path: Path) -> None:
    terminal = rule_chat(tmp_path, {"go": [f"word{i} " for i in range(60)]}, pause_s=0.02)
    terminal.type("g")
    terminal.resize(40, 12)
    terminal.settle()
    terminal.enter("o")
    terminal.wait_for("word5")
    terminal.resize(25, 8)
    terminal.wait_for("word30")
    terminal.resize(100, 40)
    terminal.wait_for("word59")
    terminal.ready()
    terminal.leave()
    assert "Traceback" not in terminal.written


def test_a_message_is_edited_recalled_and_written_in_an_editor(tmp_path: Path) -> None:
    editor = tmp_path / "editor.sh"
    editor.write_text('#!/bin/sh\nprintf "from the editor" > "$1"\n')
    editor.chmod(0o755)
    answers = {"one": ["ONE"], "one two": ["TWO"], "from the editor": ["EDITED"]}
    terminal = rule_chat(tmp_path, answers, EDITOR=str(editor), VISUAL=str(editor))
    terminal.ask("one", "ONE")
    terminal.ask("/edit")
    terminal.ask(" two", "TWO")
    terminal.ask("/context", "sent to the model: 2 messages")
    terminal.type(UP)
    terminal.type(UP)
    terminal.ask("", "TWO")
    terminal.type("\x18\x05")
    terminal.wait_for("from the editor")
    terminal.enter("")
    terminal.wait_for("EDITED")
    assert terminal.written.count("TWO") >= 2, "the recalled message is answered again"


def test_commands_and_files_are_completed(tmp_path: Path) -> None:
    (tmp_path / "a-talk-of-mine.jsonl").write_text("no talk")
    terminal = rule_chat(tmp_path, {})
    terminal.type("/mu")
    terminal.settle()
    terminal.type("\t")
    terminal.settle()
    terminal.ask("", "Alt-Enter sends")
    terminal.type(f"/load {tmp_path}/a-ta")
    terminal.settle()
    terminal.type("\t")
    terminal.settle()
    terminal.type(ALT_ENTER)
    terminal.wait_for("is not JSON")
    assert "Traceback" not in terminal.written


@pytest.mark.parametrize("settings", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_without_colour_gets_text_alone(tmp_path: Path, settings: dict[str, str]) -> None:
    terminal = rule_chat(tmp_path, {"go": ["Some **bold** text\n"]}, **settings)
    terminal.wait_for(">", after=terminal.wait_for("lists the commands", after=0))
    terminal.settle()
    terminal.enter("go")
    terminal.wait_for("Some **bold** text")
    terminal.wait_for("context")
    terminal.settle()
    if "TERM" not in settings:
        terminal.ask("/HELP trace", "for example: /trace trace.svg")
        terminal.ask("/trace", "for example /trace trace.svg")
    if "TERM" in settings:
        assert "\x1b" not in terminal.written
    assert "\x1b[1mbold" not in terminal.written
    assert re.findall(r"\x1b\[[\d;]*\b3[0-8][;m]", terminal.written) == []  # colours, and no moves of the cursor


def test_code_is_shown_while_its_line_is_written(tmp_path: Path) -> None:
    pieces = ["```\n", "\tif x:\n", "        y = [", *(f"{i}, " for i in range(40)), "]\n", "```\n"]
    terminal = rule_chat(tmp_path, {"go": pieces}, 0.1)
    terminal.enter("go")
    terminal.wait_for("        y = [0, 1, 2, ")
    assert "39" not in terminal.screen()
    terminal.wait_for("39, ]")
    terminal.wait_for("context")
    terminal.see("if x:")


def test_answers_to_a_pipe_are_data_and_the_dialogue_stays_here(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = f"{EDGESPEC} chat {tiny_model} --max-tokens 12 --drafter none > {out}"
    terminal = Terminal("-c", command, home=tmp_path, program=("/bin/bash",))
    terminal.ready()
    terminal.ask("the in", "tokens/s")
    terminal.leave()
    path = latest_chat(tmp_path / "chats")
    assert path is not None
    assert out.read_text().rstrip("\n") == Transcript.read(path).messages[1].content.rstrip("\n")


def test_a_reader_that_leaves_ends_the_chat_in_peace(tiny_model: Path, tmp_path: Path) -> None:
    command = f"set -o pipefail; {EDGESPEC} chat {tiny_model} --max-tokens 300 --drafter none | head -c 5"
    terminal = Terminal("-c", command, home=tmp_path, program=("/bin/bash",))
    at = terminal.ready()
    terminal.enter("the in")
    time.sleep(1.0)
    if terminal.process.isalive():
        terminal.enter("an on")
    assert terminal.exit_code() == 0
    assert "Traceback" not in terminal.written[at:]
    command = f"set -o pipefail; {EDGESPEC} chat {tiny_model} --max-tokens 300 --prompt the | head -c 5"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, check=False)
    assert (ended.returncode, len(ended.stdout), b"Traceback" in ended.stderr) == (0, 5, False)


def test_a_stdin_that_is_closed_is_an_empty_prompt(tiny_model: Path) -> None:
    ended = subprocess.run(
        ["bash", "-c", f"{EDGESPEC} chat {tiny_model} <&-"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "the prompt is empty" in ended.stderr
    assert ended.stdout == ""


def test_a_home_that_cannot_be_written_is_reported_once_and_the_chat_goes_on(
    tiny_model: Path, tmp_path: Path
) -> None:
    for name in ("history", "chats"):
        place = tmp_path / name
        place.symlink_to("nowhere/x") if name == "history" else place.write_text("in the way")
    terminal = chat(tiny_model, tmp_path, *SHORT)
    for text in ("the in", "an on"):
        terminal.ask(text, "tokens/s")
    terminal.leave()
    flat = terminal.written.replace("\r\n", " ")
    assert flat.count("edgespec: what you type is not saved") == 1
    assert "the in\x1b" in flat.partition("edgespec: what you type")[0], "not written over what was typed"
    assert flat.count("this conversation is not saved") == 1


def test_no_history_saves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    terminal = chat(tiny_model, tmp_path, *SHORT, "--no-history")
    terminal.ask("the in", "tokens/s")
    terminal.leave()
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizers.json"]  # which tokenizers were tried


def test_two_chats_at_once_are_both_kept(tiny_model: Path, tmp_path: Path) -> None:
    terminals = [chat(tiny_model, tmp_path, *SHORT) for _ in range(2)]
    for number, terminal in enumerate(terminals):
        terminal.ask(f"the in {number}", "tokens/s")
    for terminal in terminals:
        terminal.leave()
    saved = [Transcript.read(path).messages[0].content for path in (tmp_path / "chats").iterdir()]
    assert sorted(saved) == ["the in 0", "the in 1"]
    assert len((tmp_path / "history").read_text().splitlines()) == 2


def test_a_chat_that_is_killed_goes_on_with_what_was_said(tiny_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "a model")
    terminal = chat(model, tmp_path, *SHORT, "--system", "the")
    terminal.ask("the in", "tokens/s")
    terminal.ask("/set max_tokens 600")
    terminal.enter("an on")
    terminal.wait_for("an on")
    deadline = time.monotonic() + 120
    while (path := latest_chat(tmp_path / "chats")) is None or len(Transcript.read(path).messages) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(terminal.process.pid, 9)  # the command, and its worker, which would keep what it has of the answer
    assert terminal.exit_code() == -9
    # Without a model named: the conversation says which.
    terminal = Terminal("chat", "--continue", *SHORT, home=tmp_path)
    terminal.ready()
    assert "your last message: 'an on'. Its answer was cut off" in " ".join(terminal.screen().split())
    assert "the in" in terminal.written
    killed = Transcript.read(path)
    assert (user_messages(tmp_path), killed.cut_short[-1]) == (["the in", "an on"], (4, "cancelled"))
    terminal.ask("/retry", "tokens/s")
    terminal.leave()
    assert Transcript.read(path).messages[:4] == killed.messages[:4]
    begun, again = killed.messages[4].content, Transcript.read(path).messages[4].content
    assert begun.startswith(again) or again.startswith(begun)
    assert begun
    assert len([*(tmp_path / "chats").iterdir()]) == 1


@pytest.mark.model
def test_a_real_model_stops_while_it_reads_and_while_it_answers(smollm2: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    terminal = chat(smollm2, tmp_path, "--trace", trace, "--drafter", "suffix")
    terminal.paste("A sentence that is read again and again. " * 500)
    terminal.settle()
    terminal.enter("")
    terminal.wait_for("…")
    time.sleep(0.5)
    started = time.monotonic()
    terminal.type(CTRL_C)
    terminal.ready()
    assert time.monotonic() - started < 60
    terminal.see("stopped before the first word")
    terminal.ask("/undo")
    terminal.enter("Write a long story about a river.")
    at = terminal.wait_for("\r \r")  # the mark that waits for the first word goes
    terminal.wait_until(lambda: len(terminal.written) >= at + 200)
    terminal.type(CTRL_C)
    terminal.wait_for("stopped")
    terminal.ready()
    assert sum(event["ph"] == "X" for event in json.loads(trace.read_text())["traceEvents"]) > 3
    terminal.ask("/stats", "tokens per pass")
    terminal.ask("/set max_tokens 20")
    terminal.ask("/drafter none", "drafter: none")
    terminal.ask("Name three rivers.", "drafting is off")
    terminal.leave()
    assert user_messages(tmp_path) == ["Write a long story about a river.", "Name three rivers."]


def test_a_preset_begins_with_its_system_message_and_examples(tiny_model: Path, tmp_path: Path) -> None:
    examples = (
        {"role": "user", "content": "What is the sea?"},
        {"role": "assistant", "content": "A blue that breathes."},
    )
    preset = Preset(
        name="poet", model=str(tiny_model), options={"system": "In verse.", "max-tokens": 5}, messages=examples
    )
    PresetFolder(tmp_path).write(preset)
    terminal = chat("poet", tmp_path)
    assert "poet by tiny on cpu" in terminal.written
    assert "A blue that breathes." in terminal.written
    assert "the preset begins with this" in terminal.written
    terminal.ask("/system", "system message: In verse.")
    terminal.ask("the in")
    other = Preset(name="other", model=str(tiny_model), options={"system": "In prose.", "drafter": "none"})
    PresetFolder(tmp_path).write(other)
    terminal.ask("/model other", "other by tiny: ")
    terminal.ask("/system", "system message: In prose.")
    terminal.ask("/drafter auto", "(--drafter auto)")
    assert "drafter: none (" not in terminal.written
    terminal.leave()
    assert user_messages(tmp_path) == ["What is the sea?", "the in"]
