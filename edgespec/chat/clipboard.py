"""Copies parts of a conversation to the clipboard: with a program of the desktop, or by the terminal (OSC 52)."""

import base64
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from edgespec import UsageError, split_reasoning
from edgespec.chat.call_text import format_turn
from edgespec.chat.session import ChatSession
from edgespec.system.printable import one_line

# Terminals refuse longer requests, some from about here on.
MAX_OSC52_BYTES = 74_994
_TIMEOUT_S = 3.0
# Not clip: what it takes as Unicode everywhere begins with a byte order mark, which it copies too.
_POWERSHELL = (
    "powershell -NoProfile -Command Set-Clipboard -Value "
    "([IO.StreamReader]::new([Console]::OpenStandardInput()).ReadToEnd())"
)


def find_commands(environment: Mapping[str, str], platform: str) -> list[str]:
    """Return the desktop's commands that take a text; none over SSH, where the user's clipboard is elsewhere."""
    if "SSH_CONNECTION" in environment:
        return []
    if platform in ("darwin", "win32"):
        return ["pbcopy" if platform == "darwin" else _POWERSHELL]
    wayland = ["wl-copy"] if environment.get("WAYLAND_DISPLAY") else []
    x11 = ["xclip -selection clipboard", "xsel --clipboard --input"] if environment.get("DISPLAY") else []
    return wayland + x11


def copy(text: str, *, is_terminal: bool) -> str | None:
    """Put text on the clipboard; return what did it, None if nothing could. A terminal on stdout may be asked."""
    for command in find_commands(os.environ, sys.platform):
        program, *arguments = command.split()
        if shutil.which(program) and _run([program, *arguments], text):
            return program
    if not is_terminal or len(text.encode(errors="replace")) > MAX_OSC52_BYTES:
        return None
    sys.stdout.write(osc52(text))
    sys.stdout.flush()
    return "the terminal (OSC 52)"


def osc52(text: str) -> str:
    """The control sequence that asks a terminal to put text on its clipboard (xterm)."""
    return f"\x1b]52;c;{base64.b64encode(text.encode(errors='replace')).decode()}\x07"


def _run(command: Sequence[str], text: str) -> bool:
    try:
        done = subprocess.run(
            command,
            input=text.encode(errors="replace"),
            stdout=subprocess.DEVNULL,  # xclip stays and would hold a pipe
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def text_to_copy(session: ChatSession, part: str) -> str:
    """The text that "all", "code" or an empty part stands for. Raises UsageError: there is none of it."""
    if part == "all":
        return "\n\n".join(f"{message.role}: {format_turn(message)}" for message in session.conversation.messages)
    if part not in ("", "code"):
        raise UsageError(f"/copy takes code, all or no argument, not '{one_line(part, 40)}'")
    answers = [each.answer for each in session.conversation.rounds if each.answer]
    if not answers:
        raise UsageError("there is no answer to copy yet")
    answer = split_reasoning(answers[-1])[1] or answers[-1]
    if not part:
        return answer
    if not (blocks := code_blocks(answer)):
        raise UsageError("the last answer has no code block; /copy copies the whole answer")
    return blocks[-1]


def code_blocks(text: str) -> list[str]:
    from markdown_it import MarkdownIt  # a pipe can do without it

    return [token.content for token in MarkdownIt().parse(f"{text}\n") if token.type == "fence"]
