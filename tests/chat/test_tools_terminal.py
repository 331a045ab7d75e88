"""Tools in a chat in a real terminal: questions, answers to them, and what is typed beside."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pexpect", reason="needs a pseudo-terminal, which Windows lacks")
pytest.importorskip("termios", reason="needs a pseudo-terminal, which Windows lacks")

from terminal import CTRL_C, CTRL_D, Terminal, latest_chat

from edgespec.engine.transcript import Transcript
from edgespec.system.command_line import join_words

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*forkpty.*")]

TOOLS = '''
import time


def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"sunny in {city}"


def wait() -> str:
    time.sleep(600)
'''
CALL = {"call": "weather", "arguments": {"city": "Rome\x1b[2J"}}
RESULT = "sunny in Rome\x1b[2J"
ASKED = "Run it? [y/N/a]"


def rule_chat(
    tmp_path: Path, answers: dict[str, Any], pause_s: float = 0.0, prompt: str = "", mcp: str = ""
) -> Terminal:
    (tmp_path / "tools.py").write_text(TOOLS)
    script = {"answers": answers, "pause_s": pause_s, "tools": str(tmp_path / "tools.py"), "saves": True}
    script |= ({"prompt": prompt} if prompt else {}) | ({"mcp": [mcp]} if mcp else {})
    (tmp_path / "script.json").write_text(json.dumps(script))
    program = (sys.executable, str(Path(__file__).parents[1] / "support" / "rule_chat.py"))
    terminal = Terminal(tmp_path / "script.json", home=tmp_path, program=program)
    if not prompt:
        terminal.ready()
    return terminal


def test_a_call_is_asked_for_and_run(tmp_path: Path) -> None:
    terminal = rule_chat(tmp_path, {"Rain?": ["I look.", CALL], RESULT: ["No ", "rain."]})
    terminal.enter("Rain?")
    terminal.wait_for(ASKED)
    shown = terminal.settle()
    assert 'the model calls weather(city="Rome\\x1b[2J")' in shown.replace("\\u001b", "\\x1b")
    terminal.enter("maybe")
    terminal.wait_for("please answer y, n or a")
    terminal.wait_for(ASKED)
    terminal.enter("y")
    terminal.wait_for("No rain.")
    terminal.ready()
    terminal.see("result: sunny in Rome")
    terminal.enter("Rain?")
    terminal.wait_for(ASKED)
    terminal.enter("a")
    terminal.ready()
    at = terminal.position
    terminal.ask("Rain?", "No rain.")
    assert ASKED not in terminal.written[at:]
    terminal.ask("/tools", "weather(city): Tell the weather of a city. (runs without asking)")
    terminal.ask("/history 1", "called weather(")
    terminal.leave()
    path = latest_chat(tmp_path / "chats")
    assert path is not None
    roles = [message.role for message in Transcript.read(path).messages]
    assert roles == ["user", "assistant", "tool", "assistant"] * 3


@pytest.mark.skipif(find_spec("mcp") is None, reason="needs the package mcp")
def test_a_tool_of_an_mcp_server_is_asked_for_too_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    program = Path(__file__).parents[1] / "support" / "mcp_program.py"
    pid = str(tmp_path / "pid")
    answers = {
        "Add.": [{"call": "add", "arguments": {"a": 2, "b": 40}}],
        "Hang.": [{"call": "hang", "arguments": {"path": pid}}],
        "42": ["It is 42."],
        "error: the user ended this call while it ran": ["I stop."],
    }
    terminal = rule_chat(tmp_path, answers, mcp=join_words([sys.executable, program]))
    terminal.ask("/tools", "add(a, b): Add two whole numbers. (asks before each call)")
    terminal.enter("Add.")
    terminal.wait_for(ASKED)
    terminal.enter("y")
    terminal.wait_for("It is 42.")
    terminal.ready()
    terminal.enter("Hang.")
    terminal.wait_for(ASKED)
    terminal.enter("y")
    terminal.wait_until(Path(pid).exists)
    terminal.type(CTRL_C)
    terminal.wait_for("I stop.")
    terminal.ready()
    terminal.leave()
    path = latest_chat(tmp_path / "chats")
    assert path is not None
    results = [message.content for message in Transcript.read(path).messages if message.role == "tool"]
    assert results == ["42", "error: the user ended this call while it ran"]


def test_enter_ctrl_d_and_ctrl_c_run_nothing(tmp_path: Path) -> None:
    terminal = rule_chat(tmp_path, {"Rain?": [CALL]})
    for keys in ("\r", CTRL_D):
        terminal.enter("Rain?")
        terminal.wait_for(ASKED)
        terminal.type(keys)
        terminal.wait_for("not run; the model is told that you refused")
        terminal.ready()
    terminal.enter("Rain?")
    terminal.wait_for(ASKED)
    terminal.type(CTRL_C)
    terminal.wait_for("the answer ends here; /retry asks again")
    terminal.ready()
    assert "result: " not in terminal.written
    terminal.leave()


def test_what_is_typed_before_the_question_is_no_yes(tmp_path: Path) -> None:
    is_typed = tmp_path / "typed"
    answers = {"Rain?": ["One ", {"until": str(is_typed)}, "moment.", CALL], RESULT: ["No rain."]}
    terminal = rule_chat(tmp_path, answers)
    terminal.enter("Rain?")
    terminal.wait_for("One")
    terminal.type("y\ry\r")
    is_typed.touch()
    terminal.wait_for("You were typing, so write the word:")
    terminal.enter("y")
    terminal.wait_for("please answer yes, no or always")
    terminal.enter("yes")
    terminal.wait_for("No rain.")
    terminal.ready()
    terminal.see("> y")
    screen = terminal.see("lines after it: 1")
    assert "\n  y" not in screen, "which waits as a message of its own"
    terminal.type(CTRL_C * 2)  # one for the line that is shown, one for the next
    terminal.leave()


def test_ctrl_c_ends_a_call_that_hangs_and_the_chat_goes_on(tmp_path: Path) -> None:
    hang = {"call": "wait", "arguments": {}}
    terminal = rule_chat(tmp_path, {"wait": [hang], "error: the user ended this call while it ran": ["I see."]})
    terminal.enter("wait")
    terminal.wait_for(ASKED)
    terminal.enter("y")
    terminal.wait_for("wait is running; Ctrl-C ends it")
    terminal.type(CTRL_C)
    terminal.wait_for("wait was ended; the model is told so")
    terminal.wait_for("I see.")
    terminal.ready()
    screen = terminal.settle()
    assert "wait was ended; the model is told so" in screen
    assert "result: " not in screen
    terminal.ask("again?", "what?")
    terminal.leave()


def test_one_prompt_asks_too_and_takes_nothing_that_was_typed_before(tmp_path: Path) -> None:
    is_typed = tmp_path / "typed"
    answers = {"Rain?": ["One ", {"until": str(is_typed)}, "moment.", CALL, CALL], RESULT: ["No rain."]}
    terminal = rule_chat(tmp_path, answers, prompt="Rain?")
    terminal.wait_for("One")
    terminal.type("y\ny\n")
    is_typed.touch()
    terminal.wait_for(ASKED)
    terminal.settle()
    assert "result: " not in terminal.written
    terminal.type("y\n")
    terminal.wait_for("result: sunny in Rome")
    terminal.wait_for(ASKED)
    terminal.type("n\n")
    terminal.wait_for("not run; the model is told that you refused")
    assert terminal.exit_code() == 0


def test_ctrl_c_at_the_question_of_one_prompt_ends_it(tmp_path: Path) -> None:
    terminal = rule_chat(tmp_path, {"Rain?": [CALL]}, prompt="Rain?")
    terminal.wait_for(ASKED)
    terminal.type(CTRL_C)
    assert terminal.exit_code() != 0
    assert "result: " not in terminal.written
