"""Text to the clipboard: by what the desktop has for it, or by asking the terminal (OSC 52)."""

import base64
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# Terminals refuse longer requests, some from about here on.
MOST_OSC52_BYTES = 74_994
_TIMEOUT_S = 3.0


class Tool(NamedTuple):
    """A program that takes the clipboard's new content on its stdin."""

    command: tuple[str, ...]
    encoding: str = "utf-8"


def tools(environment: Mapping[str, str], platform: str) -> Sequence[Tool]:
    """Those of this desktop; none over SSH, where the clipboard that is meant is at the other end."""
    if "SSH_CONNECTION" in environment:
        return ()
    if platform == "darwin":
        return (Tool(("pbcopy",)),)
    if platform == "win32":
        return (Tool(("clip",), "utf-16"),)
    found = []
    if environment.get("WAYLAND_DISPLAY"):
        found.append(Tool(("wl-copy",)))
    if environment.get("DISPLAY"):
        found += [Tool(("xclip", "-selection", "clipboard")), Tool(("xsel", "--clipboard", "--input"))]
    return found


def copy(text: str, *, is_terminal: bool) -> str | None:
    """Put text on the clipboard; which way it went, None if there is none.

    Args:
        is_terminal: stdout is one, and may be asked.
    """
    for tool in tools(os.environ, sys.platform):
        if shutil.which(tool.command[0]) and _given(tool, text):
            return tool.command[0]
    if not is_terminal or len(text.encode(errors="replace")) > MOST_OSC52_BYTES:
        return None
    sys.stdout.write(osc52(text))
    sys.stdout.flush()
    return "the terminal (OSC 52)"


def osc52(text: str) -> str:
    """What asks a terminal to put text on its clipboard (xterm, control sequences, OSC 52)."""
    return f"\x1b]52;c;{base64.b64encode(text.encode(errors='replace')).decode()}\x07"


def _given(tool: Tool, text: str) -> bool:
    try:
        done = subprocess.run(
            tool.command,
            input=text.encode(tool.encoding, errors="replace"),
            stdout=subprocess.DEVNULL,  # xclip stays and would hold a pipe
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
