"""A chat that is left and goes on without being read again, in a real terminal."""

from pathlib import Path

import pytest

pytest.importorskip("pexpect", reason="needs a pseudo-terminal, which Windows lacks")
pytest.importorskip("termios", reason="needs a pseudo-terminal, which Windows lacks")

from terminal import Terminal

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*forkpty.*")]


def test_a_chat_goes_on_from_the_disk_if_that_was_asked_for(tiny_model: Path, tmp_path: Path) -> None:
    options = ("--max-tokens", 12, "--drafter", "none")
    terminal = Terminal("chat", tiny_model, *options, "--keep-prefix", home=tmp_path)
    terminal.ready()
    terminal.ask("the in the an " * 12)
    terminal.leave()
    shown = " ".join(terminal.screen().split())
    assert "saved the KV cache of " in shown
    assert "continues this chat" in shown
    assert len([*(tmp_path / "chats").glob("*.prefix")]) == 1
    terminal = Terminal("chat", "--continue", *options, home=tmp_path)
    terminal.ready()
    assert "loaded the KV cache: " in " ".join(terminal.screen().split())
    terminal.ask("the in")
    terminal.ask("/clear", "a new conversation")
    terminal.ask("/delete! 1", "deleted")
    terminal.leave()
    assert "saved the KV cache" not in terminal.written
    assert [*(tmp_path / "chats").iterdir()] == []
