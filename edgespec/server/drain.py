"""The end of the server: answers may end by themselves for a while, then they are cut short and told so."""

import asyncio
from dataclasses import dataclass, field


@dataclass(slots=True)
class Drain:
    """is_closing is set when the time that answers have to end is over."""

    drain_s: float
    is_closing: asyncio.Event = field(default_factory=asyncio.Event)
    _timer: asyncio.TimerHandle | None = field(init=False, default=None)

    def begin(self) -> None:
        """Start the time; called again, end it at once."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.drain_s, self.is_closing.set)
        else:
            self.is_closing.set()

    def cancel(self) -> None:
        """Nothing is left to end."""
        if self._timer is not None:
            self._timer.cancel()
