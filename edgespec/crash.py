"""What is known of a worker that died: how, where, what it was doing. In words, and as a file for a report."""

import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgespec import __version__
from edgespec.errors import EdgeSpecError, MemoryExhausted

Cause = Literal["crash", "memory", "killed"]
FILE_NAME = "crash.txt"
_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGSYS", "SIGTRAP")
_NOTE = re.compile(r"^edgespec (\w+) (.*)$", re.MULTILINE)
_FRAME = re.compile(r'^Current thread [^\n]*\n  File "([^"\n]*)", line (\d+) in (\S+)', re.MULTILINE)


def note_line(name: str, value: str) -> bytes:
    """What a worker writes down while it is well, in a line."""
    return f"edgespec {name} {value}\n".encode(errors="surrogateescape")


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """Of a worker.

    number: The signal that it died of.
    is_out_of_memory: The system killed a process for want of memory meanwhile.
    written: The worker's notes, and behind them what faulthandler wrote.
    """

    number: int
    is_out_of_memory: bool
    written: str

    @property
    def cause(self) -> Cause | None:
        """None where it was ended as one ends programs, and nothing needs to be told."""
        if self.number == getattr(signal, "SIGKILL", None):
            return "memory" if self.is_out_of_memory else "killed"
        return "crash" if self.name in _CRASHES else None

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name if self.number in set(signal.Signals) else f"signal {self.number}"

    @property
    def exit_code(self) -> int:
        if self.cause == "crash":
            return EdgeSpecError.exit_code
        return MemoryExhausted.exit_code if self.cause == "memory" else 128 + self.number

    def note(self, name: str) -> str | None:
        """The last value of a note."""
        found = [value for key, value in _NOTE.findall(self.written) if key == name]
        return found[-1] if found else None

    def words(self) -> str:
        """What happened, in a line."""
        if self.cause == "memory":
            return (
                "out of memory: the system killed the worker; close other programs, use a smaller model, "
                "or bound what is held with --memory"
            )
        if self.cause == "killed":
            return f"the worker was killed ({self.name}), by somebody or by the system"
        return f"the worker crashed ({self._told()}{self._place()}): a defect of native code, such as a provider's"

    def _told(self) -> str:
        told = signal.strsignal(self.number) if self.number in set(signal.Signals) else None
        return f"{self.name}, {told.lower()}" if told else self.name

    def _place(self) -> str:
        frame = _FRAME.search(self.written)
        return f" in {frame[3]}, {Path(frame[1]).name} line {frame[2]}" if frame else ""

    def write(self, folder: Path, command: str) -> Path:
        """What a report of the defect needs, in place of what an earlier one left; no prompt and no answer.

        Raises:
            OSError: It cannot be written.
        """
        import platform
        from datetime import UTC, datetime

        from edgespec.disk import replace_file

        lines = [
            f"edgespec {__version__}, Python {platform.python_version()}, {platform.platform()}",
            f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC: edgespec {command}: {self.words()}",
            _NOTE.sub("", self.written).strip(),
        ]
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE_NAME
        replace_file(path, "\n\n".join([*lines, ""]).encode(errors="surrogateescape"))
        return path
