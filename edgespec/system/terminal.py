"""The terminal that this process was started in: how it is set, who may use it, and whether stdin has input."""

import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TextIO

from edgespec.system.context_managers import contextmanager

if sys.platform != "win32":  # whose programs set the console again before each use
    import fcntl
    import termios

Modes = tuple[int, list[Any]]
"""A file number and how its terminal is set."""


def terminal_modes() -> Modes | None:
    """How the terminal on stdin is set; None where stdin is no terminal, and on Windows."""
    if sys.platform != "win32":
        with suppress(termios.error, OSError, ValueError, AttributeError):
            file = sys.stdin.fileno()
            return file, termios.tcgetattr(file)
    return None


def restore_terminal(modes: Modes | None) -> None:
    """Set the terminal as it was, with the cursor shown and at the beginning of a line."""
    if modes is None or not is_in_foreground():
        return
    _set(modes, termios.TCSADRAIN)
    _tell_terminal("\x1b[0m\x1b[?25h\x1b[?2004l\n")


def _tell_terminal(codes: str) -> None:
    """Write codes for the terminal, if there is one that knows any."""
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return
    for stream in (sys.stderr, sys.stdout):
        if stream.isatty():
            with suppress(OSError):
                stream.write(codes)
                stream.flush()
            return


def is_in_foreground() -> bool:
    """True if this process has a terminal whose keys it gets, and not another job of the shell."""
    with suppress(OSError):
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
        try:
            return os.tcgetpgrp(terminal) == os.getpgrp()
        finally:
            os.close(terminal)
    return False


@contextmanager
def unseen_keys() -> Iterator[Callable[[], None]]:
    """Keys that are typed meanwhile are not echoed; whoever reads next gets them, key by key.

    Yields a function that hides them again, for a process that was stopped: the shell sets the terminal meanwhile.

    Enter stays a carriage return: a prompt would take a line feed for Ctrl-J, and all that was typed for one
    message of several lines. Line editing is off as well: Ctrl-U would delete all of these lines. What is pasted
    comes in brackets.
    """
    modes = terminal_modes()
    if modes is None:  # Windows echoes only where somebody reads
        yield lambda: None
        return
    file, before = modes
    silent = [*before]
    silent[0] &= ~termios.ICRNL
    silent[3] &= ~(termios.ECHO | termios.ICANON)
    silent[3] |= termios.NOFLSH  # else Ctrl-C deletes what was typed before it
    silent[6] = [*before[6]]
    silent[6][termios.VMIN], silent[6][termios.VTIME] = 1, 0

    def hide() -> None:
        _set((file, silent), termios.TCSANOW)

    hide()
    _tell_terminal("\x1b[?2004h")
    try:
        yield hide
    finally:
        _tell_terminal("\x1b[?2004l")
        _set(modes, termios.TCSANOW)


def is_terminal(stream: TextIO) -> bool:
    """True if a terminal shows what a stream writes; false for None, which a program without a console has."""
    with suppress(AttributeError, ValueError):  # the latter of a closed one
        return stream.isatty()
    return False


def terminal_width(stream: TextIO) -> int | None:
    """Columns of the terminal that a stream writes to; None where it writes elsewhere."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def has_unread_data(stream: TextIO) -> bool:
    """True if a pipe or a regular file has bytes to read, found without reading: a pipe may never end."""
    try:
        file = stream.fileno()
        found = os.fstat(file)
        if stat.S_ISREG(found.st_mode):
            return os.lseek(file, 0, os.SEEK_CUR) < found.st_size
        if not stat.S_ISFIFO(found.st_mode) or sys.platform == "win32":  # which does not say
            return False
        return int.from_bytes(fcntl.ioctl(file, termios.FIONREAD, bytes(4)), sys.byteorder) > 0
    except (OSError, ValueError):  # it is closed, or no file
        return False


def _set(modes: Modes, when: int) -> None:
    with suppress(termios.error):
        termios.tcsetattr(modes[0], when, modes[1])
