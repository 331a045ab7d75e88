"""The chat in a real terminal: typed keys in, screen out."""

import json
import time
from pathlib import Path

import pytest

pytest.importorskip("pexpect", reason="pseudo-terminals are POSIX")
pytest.importorskip("termios", reason="pseudo-terminals are POSIX")

from terminal import ALT_ENTER, CTRL_C, CTRL_J, Terminal

from edgespec.transcript import latest, read_transcript

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*forkpty.*")]


def chat(model: object, home: Path, *arguments: object, **settings: str) -> Terminal:
    return Terminal("chat", model, *arguments, home=home, environment=settings)


def test_a_conversation_is_typed_stopped_and_kept(tiny_model: Path, tmp_path: Path) -> None:
    terminal = chat(tiny_model, tmp_path, "--max-tokens", 600, "--drafter", "none")
    at = terminal.ready()
    terminal.enter("the in")
    at = terminal.wait_for("the in", after=at)
    time.sleep(0.3)
    terminal.type(CTRL_C)
    at = terminal.ready(after=at)
    assert "stopped" in terminal.settle()
    terminal.enter("/nonsense")
    at = terminal.ready(after=at)
    assert "there is no command /nonsense" in terminal.settle()
    terminal.type(f"one{CTRL_J}two{ALT_ENTER}//three")
    terminal.enter("")
    at = terminal.wait_for("tokens/s", after=at)
    at = terminal.ready(after=at)
    terminal.type(CTRL_C)
    terminal.wait_for("Ctrl-C once more", after=at)
    at = terminal.ready(after=at)
    terminal.type(CTRL_C)
    assert terminal.exit_code() == 130
    path = latest(tmp_path / "chats")
    assert path is not None
    kept = read_transcript(path)
    said = [message.content for message in kept.messages if message.role == "user"]
    assert said[-1] == "one\ntwo\n//three"
    assert "/nonsense" not in said
    assert (tmp_path / "history").stat().st_mode & 0o777 == 0o600
    assert [json.loads(line) for line in (tmp_path / "history").read_text().splitlines()][-1] == said[-1]
