"""Files and messages of several lines in a chat in a real terminal."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pexpect", reason="needs a pseudo-terminal, which Windows lacks")
pytest.importorskip("termios", reason="needs a pseudo-terminal, which Windows lacks")

from terminal import Terminal

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*forkpty.*")]


def rule_chat(tmp_path: Path, answers: dict[str, Any]) -> Terminal:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"answers": answers}))
    program = (sys.executable, str(Path(__file__).parents[1] / "support" / "rule_chat.py"))
    terminal = Terminal(script, home=tmp_path, program=program)
    terminal.ready()
    return terminal


def test_a_file_is_completed_attached_dropped_and_sent(tmp_path: Path) -> None:
    (tmp_path / "notes-of-mine.md").write_text("# Notes\n")
    (tmp_path / "talk.bin").write_bytes(b"\0\1")
    message = "File: notes-of-mine.md\n```markdown\n# Notes\n```\n\nread it"
    terminal = rule_chat(tmp_path, {message: ["READ"], "read it": ["NO FILE"]})
    terminal.type(f"/attach {tmp_path}/not")
    terminal.settle()
    terminal.type("\t")
    terminal.settle()
    terminal.ask("", "attached notes-of-mine.md: 6 tokens")
    terminal.see("1 file attached")
    terminal.ask("/detach", "no longer attached: notes-of-mine.md")
    terminal.ask("read it", "NO FILE")
    terminal.ask(f"/attach {tmp_path}/talk.bin", "binary")
    terminal.ask(f"/attach {tmp_path}/notes-of-mine.md", "attached")
    terminal.ask("/attach", "sent with your next message")
    terminal.ask("read it", "READ")
    assert "file attached" not in terminal.settle().splitlines()[-1]
    terminal.ask(f"/save {tmp_path}/saved.jsonl", "4 messages saved")
    terminal.leave()
    lines = (tmp_path / "saved.jsonl").read_text().splitlines()
    assert json.loads(lines[3])["content"] == message
    assert terminal.written.count("NO FILE") == 1


def test_a_file_that_is_too_long_is_refused_before_the_message(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("word " * 12_000)
    terminal = rule_chat(tmp_path, {"read it": ["NO FILE"]})
    terminal.ask(
        f"/attach {tmp_path}/long.txt", "too long: 12004 tokens (long.txt 12004), and there is room for 9999"
    )
    assert "file attached" not in terminal.settle()
    terminal.ask("read it", "NO FILE")
    assert "NO FILE" in terminal.screen()
    terminal.leave()


def test_lines_between_three_quotes_are_one_message_and_no_command(tmp_path: Path) -> None:
    terminal = rule_chat(tmp_path, {f"one\n/save {tmp_path}/saved\n\ntwo": ["GOT IT"]})
    for line in ('"""one', f"/save {tmp_path}/saved", ""):
        terminal.enter(line)
        terminal.settle()
    terminal.ask('two"""', "GOT IT")
    terminal.ask('"""/save here"""', "what?")
    terminal.ask('""""""')
    terminal.leave()
    assert not (tmp_path / "saved").exists()
    assert terminal.written.count("what?") == 1
