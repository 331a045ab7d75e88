"""The process that runs a command for a supervisor; its notes, by which its death is explained."""

import argparse
import atexit
import faulthandler
import os
import re
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Literal

from edgespec import EdgeSpecError, MemoryExhausted, __version__
from edgespec.cli.supervisor import WORKER
from edgespec.system.processes import follow_parent
from edgespec.system.signals import defer_signals

_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGSYS", "SIGTRAP")
_LOST_PAGES = ("SIGBUS", "0xC0000006")  # a page of a mapped file that is no longer there
_WINDOWS_CTRL_C = 0xC000013A
_NOTE = re.compile(r"^edgespec (\w+) (.*)$", re.MULTILINE)
_FRAME = re.compile(r'^Current thread [^\n]*\n  File "([^"\n]*)", line (\d+) in (\S+)', re.MULTILINE)


def note_line(name: str, value: str) -> bytes:
    """A note of a worker as its line in the file of notes."""
    return f"edgespec {name} {value}\n".encode(errors="surrogateescape")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDeath:
    """The end of a worker that did not exit by itself."""

    status: int  # -n for signal n; on Windows the exit code that the system gave it, such as 0xC0000005
    is_out_of_memory: bool  # the system killed a process meanwhile because memory was short
    written: str  # the worker's notes, and after them what faulthandler wrote

    @property
    def number(self) -> int:
        """The signal that ended it; 0 for another reason of Windows'."""
        return signal.SIGINT if self.status == _WINDOWS_CTRL_C else max(0, -self.status)

    @property
    def name(self) -> str:
        with suppress(ValueError):  # Python has no name for some signals, and Windows' codes are none
            return signal.Signals(self.number).name
        return f"signal {self.number}" if self.number else f"0x{self.status:X}"

    @property
    def cause(self) -> Literal["crash", "memory", "killed"] | None:
        """None where it was ended as one ends programs, and nothing needs to be reported."""
        if self.name == "SIGKILL":
            return "memory" if self.is_out_of_memory else "killed"
        return "crash" if self.name in _CRASHES or not self.number else None

    @property
    def exit_code(self) -> int:
        codes = {"crash": EdgeSpecError.exit_code, "memory": MemoryExhausted.exit_code}
        return codes.get(self.cause or "", 128 + self.number)

    def note(self, name: str) -> str | None:
        """The last value of a note."""
        return dict(_NOTE.findall(self.written)).get(name)

    def message(self) -> str:
        if self.cause == "memory":
            return (
                "out of memory: the system killed the worker; close other programs or use a smaller model; chat, "
                "serve and bench keep to a limit with --memory, and export --no-check takes less"
            )
        if self.cause == "killed":
            return f"the worker was killed ({self.name}) by a user or the system"
        meaning = signal.strsignal(self.number) if self.number else None
        how = f"{self.name}, {meaning.lower()}" if meaning else self.name
        if frame := _FRAME.search(self.written):
            how += f" in {frame[3]}, {Path(frame[1]).name} line {frame[2]}"
        if self.name in _LOST_PAGES:
            return (
                f"the worker crashed ({how}): most likely a file that it reads as memory was cut short, or its "
                "disk fails; edgespec models verify MODEL checks the model's weights"
            )
        return f"the worker crashed ({how}): a defect of native code, such as a provider's"

    def write(self, folder: Path, command: str) -> Path:
        """Write what a report of the defect needs, over what an earlier crash left; no prompt and no answer.

        Raises OSError: It cannot be written.
        """
        import platform
        from datetime import UTC, datetime

        from edgespec.system.disk import replace_file

        lines = [
            f"edgespec {__version__}, Python {platform.python_version()}, {platform.platform()}",
            f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC: edgespec {command}: {self.message()}",
            _NOTE.sub("", self.written).strip(),
        ]
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "crash.txt"
        replace_file(path, "\n\n".join([*lines, ""]).encode(errors="surrogateescape"))
        return path


Note = Callable[[str, str], None]
"""Takes a name and a value that are to be known if this process dies."""


def run_worker() -> int:
    """Run the command that this process was started with; its exit code."""
    parent, name, again = os.environ.pop(WORKER).split("\n", 2)
    note = _open_notes(name)
    follow_parent(int(parent))
    from edgespec.cli.main import main

    return main(prepare=partial(prepare, note=note, again=again))


def prepare(options: argparse.Namespace, note: Note, again: str) -> None:
    """Give the command options.note, and make a chat that is begun once more go on where it was.

    note takes "chat" once a user may type, "transcript" with a file, and "log" with the one that messages go to;
    again is the third line of WORKER.
    """
    with defer_signals():  # else Ctrl-C within it is reported as a broken installation
        import_module("numpy")
    options.note = note
    if not again:
        return
    if options.drafter != "none":
        options.drafter = "suffix"  # most likely a device has crashed it
    options.overwrite = True  # the files that the first worker began
    if transcript := again.partition(" ")[2]:
        options.transcript = Path(transcript)
        options.model = options.parser.get_default("model")  # the transcript has it, as /model may have changed it


def _open_notes(name: str) -> Note:
    """Make the file that the supervisor reads if this process dies; faulthandler adds the stacks of a crash."""
    try:
        path = os.path.join(tempfile.gettempdir(), name)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    except OSError:  # no temporary folder: no notes
        return lambda name, value: None
    if not faulthandler.is_enabled():  # else the user wants the stacks elsewhere
        faulthandler.enable(file)

    def note(name: str, value: str) -> None:
        with suppress(OSError):
            os.write(file, note_line(name, value))

    def remove() -> None:
        faulthandler.disable()
        with suppress(OSError):
            os.close(file)
            os.unlink(path)

    atexit.register(remove)
    return note
