"""The process that waits for a command: it reports a crash of native code, and begins a chat once more after one.

The command runs in a worker, a second process with the same command line. This process imports next to nothing
before the worker ends, so that it costs little more than the start of an interpreter.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import edgespec
from edgespec.system.processes import die_of, run_child
from edgespec.system.terminal import restore_terminal, terminal_modes

if TYPE_CHECKING:
    from edgespec.cli.worker import WorkerDeath

# Commands that run native code which others may have brought.
_COMMANDS = ("bench", "chat", "devices", "doctor", "export", "models pull", "pair check", "plan", "score", "serve")
_IN_THIS_PROCESS = {"-h", "--help", "--no-supervisor"}
_MOST_CHARACTERS = 1 << 20
_WINDOWS_ERRORS = 0xC0000000  # exit codes from here on are Windows' reasons for ending a process

WORKER = "EDGESPEC_WORKER"
"""The environment variable that makes a process a worker.

Three lines: its parent's process id; the name of a file in the temporary folder, for notes and stacks; and, for a
chat that is begun once more, "again" with the path of its transcript.
"""


def supervised_command(arguments: Sequence[str]) -> str | None:
    """The command that these arguments name, as in "models pull"; None where it needs no worker."""
    if not sys.executable or _IN_THIS_PROCESS & {*arguments}:
        return None
    return next((name for name in _COMMANDS if name.split() == list(arguments[: len(name.split())])), None)


def supervise(command: str) -> int:
    """Run this process's command line in a worker; its exit code.

    A chat that has begun when its worker crashes goes on in a second worker, from its transcript.
    """
    ended = _watch(command, "")
    if not isinstance(ended, int) and ended.cause == "crash" and ended.note("chat"):
        _print("the chat starts again, with drafts from the text only")
        ended = _watch(command, f"again {ended.note('transcript') or ''}")
    if isinstance(ended, int):
        return ended
    if transcript := ended.note("transcript"):
        _print(f"the conversation is saved in {transcript}; edgespec chat --continue continues it")
    return ended.exit_code if ended.cause in ("crash", "memory") else die_of(ended.number)


def _watch(command: str, again: str) -> "int | WorkerDeath":
    """Run a worker; its exit code, or how it died, which is reported."""
    notes = f"edgespec-{os.getpid()}-{os.urandom(8).hex()}"
    modes, num_kills = terminal_modes(), _num_memory_kills()
    environment = {**os.environ, WORKER: f"{os.getpid()}\n{notes}\n{again}"}
    try:
        code = run_child([sys.executable, *sys.orig_argv[1:]], environment)
    except OSError as error:
        _print(f"cannot start {sys.executable} ({error}); close other programs, or give --no-supervisor")
        return 1
    if 0 <= code < _WINDOWS_ERRORS:
        return code
    from edgespec.cli.worker import WorkerDeath
    from edgespec.config.config_file import default_home

    restore_terminal(modes)
    death = WorkerDeath(status=code, is_out_of_memory=_num_memory_kills() > num_kills, written=_take(notes))
    if log := death.note("log"):
        with suppress(OSError), open(log, "ab") as file:
            os.dup2(file.fileno(), sys.stderr.fileno())
    if death.cause:
        _print(death.message())
    if death.cause == "crash":
        with suppress(OSError, edgespec.EdgeSpecError):
            _print(f"the stack trace is in {death.write(default_home(), command)}; please attach it to a report")
    return death


def _print(message: str) -> None:
    from edgespec.system.console import print_stderr

    print_stderr(f"edgespec: {message}")


def _take(notes: str) -> str:
    """Read the worker's notes, and remove them."""
    import tempfile

    text = ""
    with suppress(OSError):  # it died before it made them
        path = os.path.join(tempfile.gettempdir(), notes)
        with open(path, encoding="utf-8", errors="surrogateescape") as file:  # Windows ends lines in its own way
            text = file.read(_MOST_CHARACTERS)
        os.unlink(path)
    return text


def _num_memory_kills() -> int:
    """How many processes Linux has killed because memory was short, of the machine or of a control group."""
    with suppress(OSError, ValueError), open("/proc/vmstat", encoding="ascii") as lines:
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    return 0
