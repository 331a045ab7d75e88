"""How a worker died: what it was doing and where, as a message and as a file for a report."""

import re
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgespec import __version__
from edgespec.errors import EdgeSpecError, MemoryExhausted

_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGSYS", "SIGTRAP")
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
                "out of memory: the system killed the worker; close other programs, use a smaller model, "
                "or bound what is held with --memory"
            )
        if self.cause == "killed":
            return f"the worker was killed ({self.name}), by somebody or by the system"
        meaning = signal.strsignal(self.number) if self.number else None
        how = f"{self.name}, {meaning.lower()}" if meaning else self.name
        if frame := _FRAME.search(self.written):
            how += f" in {frame[3]}, {Path(frame[1]).name} line {frame[2]}"
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
