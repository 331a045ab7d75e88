"""Live figures below an answer in a real terminal: wide, narrow, and of a size that changes."""

import json
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("pexpect", reason="needs a pseudo-terminal, which Windows lacks")
pytest.importorskip("termios", reason="needs a pseudo-terminal, which Windows lacks")

from terminal import CTRL_C, Terminal

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*forkpty.*")]
WORDS = [f"word{i} " for i in range(20_000)]


def rule_chat(tmp_path: Path, pause_s: float = 0.02, **environment: str) -> Terminal:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"answers": {"go": WORDS, "brief": ["Done."]}, "pause_s": pause_s}))
    program = (sys.executable, str(Path(__file__).parents[1] / "support" / "rule_chat.py"))
    terminal = Terminal(script, home=tmp_path, environment=environment, program=program)
    terminal.ready()
    return terminal


def figures(terminal: Terminal, word: str, was_resized: bool = False) -> str:
    """The line of figures, once it is on the screen behind a word of the answer.

    A line that was drawn as the window shrank may be broken and partly scrolled out of reach.
    """
    terminal.wait_for(word)
    while True:
        shown = terminal.screen().splitlines()
        lines = [line for line in shown if re.match(r"(first tokens|[\d.]+ tokens/s)( ·|$)", line)]
        assert len(lines) <= 1 + was_resized, terminal.screen()
        if lines and shown[-1] == lines[-1]:
            return lines[-1]
        terminal.wait_for("word")


def test_figures_are_shown_while_an_answer_is_written_and_go_with_it(tmp_path: Path) -> None:
    terminal = rule_chat(tmp_path)
    terminal.ask("/stats on", "figures are shown below answers now")
    terminal.enter("go")
    assert "tokens/s · drafted: suffix 100% · cpu · memory " in figures(terminal, "word20")
    terminal.resize(30, 20)
    terminal.wait_for("word40")
    line = figures(terminal, "word45", was_resized=True)
    assert len(line) < 30
    assert line.endswith(" tokens/s · suffix 100%")
    terminal.resize(100, 40)
    terminal.wait_for("word60")
    assert "memory " in figures(terminal, "word70", was_resized=True)
    terminal.type(CTRL_C)
    terminal.ready()
    screen = terminal.settle()
    assert "memory " not in screen
    words = re.findall(r"word(\d+)", terminal.written)
    assert words == [str(i) for i in range(len(words))]
    terminal.leave()


def test_no_figures_are_shown_unless_asked_for(tmp_path: Path) -> None:
    terminal = rule_chat(tmp_path, pause_s=0.0)
    at = terminal.position
    terminal.ask("brief", "Done.")
    terminal.ask("/stats on", "figures are shown")
    terminal.ask("/stats off", "figures are no longer shown")
    terminal.ask("brief", "Done.")
    terminal.ask("/stats maybe", "takes on, off or no argument")
    terminal.leave()
    assert "?2026h" not in terminal.written[at:]
    assert "memory " not in terminal.written[at:]


def test_a_terminal_without_colour_gets_no_figures(tmp_path: Path) -> None:
    terminal = rule_chat(tmp_path, pause_s=0.0, NO_COLOR="1")
    terminal.ask("/stats on", "figures are shown")
    terminal.ask("brief", "Done.")
    terminal.leave()
    assert "?2026h" not in terminal.written
