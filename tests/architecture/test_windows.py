"""Windows, imitated: what it lacks is needed by no import, and by none of the branches that it takes."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Everything is imported once, so that other packages are there, and edgespec's modules again as on Windows.
PROGRAM = """
import importlib, os, signal, sys

names = sys.argv[1:]
for name in names:
    importlib.import_module(name)
for name in [*sys.modules]:
    if name.partition(".")[0] == "edgespec":
        del sys.modules[name]
for name in ("fcntl", "termios", "resource", "pwd", "grp", "pty", "tty", "syslog"):
    sys.modules[name] = None
for place, prefixes in ((os, ("fork", "killpg", "getppid", "getpg", "tcget", "setsid", "getuid", "wait")),
                        (signal, ("SIGHUP", "SIGCHLD", "SIGKILL", "SIGALRM", "pthread_", "sigwait", "setitimer"))):
    for name in [name for name in vars(place) if name.startswith(prefixes)]:
        delattr(place, name)
sys.platform = "win32"
for name in names:
    importlib.import_module(name)

from edgespec.memory import free_memory
from edgespec.system import processes, signals, terminal
signals.exit_on_signals()
with signals.defer_signals(), terminal.unseen_keys():
    processes.follow_parent(os.getpid())
terminal.restore_terminal(terminal.terminal_modes())
assert not terminal.has_unread_data(sys.stdin)
assert free_memory._address_space_limit() is None
assert processes.die_of(2) == 130
from edgespec.cli.worker import WorkerDeath
assert WorkerDeath(status=0xC0000005, is_out_of_memory=False, written="").exit_code == 1
print(len(names))
"""


def test_nothing_needs_what_windows_lacks() -> None:
    folders = {
        "edgespec": ROOT / "edgespec",
        "edgespec.export": ROOT / "export",
        "edgespec.runtimes": ROOT / "runtimes",
    }
    names = [
        ".".join([package, *path.relative_to(folder).with_suffix("").parts]).removesuffix(".__init__")
        for package, folder in folders.items()
        for path in sorted(folder.rglob("*.py"))
    ]
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == ""
    assert done.stdout == f"{len(names)}\n"
