"""Figures of an answer while it is written, in one line: speed, who drafted, devices, memory. Prints nothing."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

import psutil
from rich.cells import cell_len

from edgespec.config.byte_size import format_bytes
from edgespec.config.drafter_names import TEXT
from edgespec.config.speed import format_speed
from edgespec.engine.answers import Chunk
from edgespec.system.clock import Clock
from edgespec.system.printable import one_line

_TARGET = "target"
# Drafters that run no model, and so have no device of their own.
_WITHOUT_MODEL = (*TEXT, "answers", "lookahead", _TARGET)


def process_bytes() -> int:
    """Resident memory of this process, which holds the model."""
    return int(psutil.Process().memory_info().rss)


@dataclass
class LiveFigures:
    """A fold over the chunks of an answer. What drafting gains is not in it: that is known at the end.

    devices: Of the target and of a drafter model.
    """

    devices: tuple[str, str]
    memory_bytes: Callable[[], int] = process_bytes
    clock: Clock = monotonic
    _counts: Counter[str] = field(default_factory=Counter)
    _began_s: float | None = None  # when the first tokens came, which read the prompt
    _num_first: int = 0
    _last_s: float = 0.0

    def add(self, chunk: Chunk) -> None:
        if not chunk.token_ids:
            return
        self._counts.update(chunk.origins)
        self._last_s = self.clock()
        if self._began_s is None:
            self._began_s, self._num_first = self._last_s, len(chunk.token_ids)

    def format_line(self, columns: int) -> str:
        """The figures in at most so many columns; the parts that matter most come first, and are whole."""
        memory = f"memory {format_bytes(self.memory_bytes())}"
        line = ""
        for forms in ((self._speed(),), self._drafted(), (self._devices(),), (memory,)):
            longer = [f"{line} · {part}" if line else part for part in forms]
            fitting = [each for each in longer if cell_len(each) <= columns]
            if not fitting:
                break
            line = fitting[0]
        return line

    def _speed(self) -> str:
        taken_s = self._last_s - (self._began_s or 0.0)
        num = self._counts.total() - self._num_first
        return f"{format_speed(num / taken_s, 0)} tokens/s" if num and taken_s > 0 else "first tokens"

    def _drafted(self) -> tuple[str, ...]:
        """Who drafted which share of the tokens; a second form is shorter."""
        total = self._counts.total()
        shares = [
            f"{one_line(name, 20)} {count / total:.0%}"
            for name, count in self._counts.most_common()
            if name != _TARGET
        ]
        names = ", ".join(shares)
        return (f"drafted: {names}", names) if shares else ("nothing drafted",)

    def _devices(self) -> str:
        has_lane = any(name not in _WITHOUT_MODEL for name in self._counts)
        return f"{self.devices[0]}, drafter lane {self.devices[1]}" if has_lane else self.devices[0]
