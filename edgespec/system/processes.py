"""Two processes of one command, the one that waits and the one that works and ends with it.

The child has the terminal, the streams and the process group of its parent, so that keys, pipes and job control
(Ctrl-Z) work as in a single process. It is a new interpreter and no fork: libraries of macOS break in a fork, and
Windows has none.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from threading import Thread
from time import sleep

from edgespec.system.context_managers import contextmanager
from edgespec.system.signals import ENDING
from edgespec.system.terminal import is_in_foreground

_POLL_S = 0.5
_GRACE_S = 30.0  # a large model that is being loaded cannot be stopped before it is there


def run_child(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command and wait until it ends; signals that only this process is sent are passed on.

    They stay blocked in this process, and the child starts with them blocked, until it calls follow_parent: so
    none is lost, and none ends one process without the other. The exit code is -n after signal n on POSIX.

    Raises OSError: The command cannot be started.
    """
    if sys.platform == "win32":
        signal.signal(signal.SIGINT, lambda *_: None)  # every process of the console is sent Ctrl-C
        return subprocess.Popen(command, env=environment).wait()
    signal.signal(signal.SIGCHLD, lambda *_: None)  # some systems do not queue a signal that is ignored by default
    signal.pthread_sigmask(signal.SIG_BLOCK, [*ENDING, signal.SIGCHLD])
    child = subprocess.Popen(command, env=environment)
    while (code := child.poll()) is None:
        number, has_child_got_it = _next_signal()
        if number != signal.SIGCHLD and not has_child_got_it:
            child.send_signal(number)
    return code


def follow_parent(parent: int) -> None:
    """In the child: take the signals passed on; when `parent` has ended, stop with SIGTERM, 30 s later at once."""

    def watch() -> None:
        while _has_parent(parent):
            sleep(_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)
        sleep(_GRACE_S)
        os._exit(128 + signal.SIGTERM)

    Thread(target=watch, name="parent's life", daemon=True).start()
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [*ENDING, signal.SIGCHLD])


def die_of(number: int) -> int:
    """End by a signal, as the child did, so that the shell sees it. Returns the exit code if that fails."""
    if sys.platform != "win32":
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    return 128 + number


def _has_parent(parent: int) -> bool:
    if sys.platform == "win32":  # where getppid also names a process that has ended, or the launcher of a venv
        import psutil

        return psutil.pid_exists(parent)
    return os.getppid() == parent


def _next_signal() -> tuple[int, bool]:
    """The next signal, and whether it came from the terminal, which sends it to the child as well."""
    awaited = [*ENDING, signal.SIGCHLD]
    if hasattr(signal, "sigwaitinfo"):
        found = signal.sigwaitinfo(awaited)
        return found.si_signo, found.si_code > 0  # the kernel sends codes above 0, processes 0 or less
    number = int(signal.sigwait(awaited))
    return number, number == signal.SIGINT and is_in_foreground()  # macOS does not say who sent it


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Set a variable of this process within the block; other threads see it meanwhile."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
