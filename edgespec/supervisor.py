"""A command in a worker process: a crash of native code is told in words, and a chat goes on after it.

The worker is a fork, made before anything heavy is loaded. It has the terminal, the streams and the process group
of this process, which only waits: so keys, pipes and job control work as without it, at a cost of milliseconds.
What ends this process ends the worker. Knows nothing of commands. POSIX alone: Windows has no fork.
"""

import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import Thread, active_count
from time import sleep
from typing import Any

from edgespec.crash import Death, note_line

Note = Callable[[str, str], None]
"""Takes a name and a value that are to be known if this process dies."""

_GRACE_S = 30.0  # a load of a large model ends only when it is through
_MOST_BYTES = 1 << 20


def can_fork() -> bool:
    """Whether a fork is there, and sound: with other threads it is not."""
    return hasattr(os, "fork") and active_count() == 1


def supervise(work: Callable[[Note], int]) -> int | Death:
    """Let a worker do it. Returns in both processes: in the worker what work returns, or raises what it raises.

    Returns:
        The exit code of the worker, or how it died.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # which is told when the worker writes
            stream.flush()
    modes = _terminal_modes()
    heard = {signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # else some systems do not even queue it
    num_kills = _num_memory_kills()
    notes, writing = os.pipe()
    watched, life = os.pipe()  # is closed with this process
    gc.freeze()  # what both share is not touched, so not copied either: 15 of 40 ms
    worker = os.fork()
    if worker == 0:
        os.close(notes)
        os.close(life)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return work(_begun(writing, watched))
    os.close(writing)
    os.close(watched)
    code = _wait(worker, heard)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    written = _read(notes)
    os.close(notes)
    os.close(life)
    if code >= 0:
        return code
    _restore(modes)
    return Death(number=-code, is_out_of_memory=_num_memory_kills() > num_kills, written=written)


def die_of(number: int) -> int:
    """End as a worker did, so that a shell sees what it would have seen; the exit code if that is not possible."""
    with suppress(OSError, ValueError):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    return 128 + number


def _begun(writing: int, watched: int) -> Note:
    """In the worker: what is known of it if it crashes is written, and it ends with its parent."""
    os.set_blocking(writing, False)  # a full pipe drops notes rather than wait for nobody
    if not faulthandler.is_enabled():  # else the user wants it elsewhere
        faulthandler.enable(writing)

    def note(name: str, value: str) -> None:
        with suppress(OSError):
            os.write(writing, note_line(name, value))

    Thread(target=_end_with_parent, args=(watched,), name="parent's life", daemon=True).start()
    return note


def _end_with_parent(watched: int) -> None:
    os.read(watched, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    sleep(_GRACE_S)
    os._exit(128 + signal.SIGTERM)


def _wait(worker: int, heard: set[signal.Signals]) -> int:
    """Pass on what only this process was sent, until the worker ends; its exit code, or -signal."""
    while True:
        number, has_worker_got_it = _next_signal(heard)
        if number == signal.SIGCHLD:
            ended, status = os.waitpid(worker, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
        elif not has_worker_got_it:
            os.kill(worker, number)


def _next_signal(heard: set[signal.Signals]) -> tuple[int, bool]:
    """A signal, and whether it came from the terminal, which sends to the whole process group."""
    if hasattr(signal, "sigwaitinfo"):
        told = signal.sigwaitinfo(heard)
        return told.si_signo, told.si_code > 0  # by the kernel; what processes send has 0 or less
    return int(signal.sigwait(heard)), _is_in_foreground()  # a guess, on macOS


def _is_in_foreground() -> bool:
    with suppress(OSError):
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
        try:
            return os.tcgetpgrp(terminal) == os.getpgrp()
        finally:
            os.close(terminal)
    return False


def _terminal_modes() -> tuple[int, list[Any]] | None:
    """The terminal of stdin and how it is set, if it is one."""
    import termios

    with suppress(termios.error, OSError, ValueError):
        file = sys.stdin.fileno()
        return file, termios.tcgetattr(file)
    return None


def _restore(modes: tuple[int, list[Any]] | None) -> None:
    """The terminal as it was, the cursor shown and at the beginning of a line."""
    import termios

    if modes is None or not _is_in_foreground():
        return
    with suppress(termios.error):
        termios.tcsetattr(modes[0], termios.TCSADRAIN, modes[1])
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return
    for stream in (sys.stderr, sys.stdout):
        if stream.isatty():
            with suppress(OSError):
                stream.write("\x1b[0m\x1b[?25h\x1b[?2004l\n")
                stream.flush()
            return


def _read(notes: int) -> str:
    os.set_blocking(notes, False)  # the worker's own children may hold the other end
    with suppress(BlockingIOError):
        return os.read(notes, _MOST_BYTES).decode(errors="surrogateescape")
    return ""


def _num_memory_kills() -> int:
    """How many processes Linux has killed for want of memory, of the machine or of a control group."""
    with suppress(OSError, ValueError), open("/proc/vmstat", encoding="ascii") as lines:
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    return 0
