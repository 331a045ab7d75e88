"""A lock that is passed on by priority. Knows nothing of requests and of models."""

import asyncio
from bisect import insort
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, order=True)
class _Waiter:
    """Sorted by who has the lock first."""

    rank: int  # the priority, negated
    number: int
    turn: "asyncio.Future[None]" = field(compare=False)


@dataclass(slots=True)
class PriorityLock:
    """Passed to whoever waits with the highest priority, among equals to the one with the lowest number.

    One thread, that of the event loop.
    """

    _is_held: bool = field(init=False, default=False)
    _waiting: list[_Waiter] = field(init=False, default_factory=list)

    @asynccontextmanager
    async def at(self, priority: int, number: int) -> AsyncIterator[None]:
        """Hold the lock.

        Args:
            number: A place among those of the same priority, such as the order of arrival.
        """
        await self._acquire(priority, number)
        try:
            yield
        finally:
            self._pass_on()

    def is_wanted_above(self, priority: int) -> bool:
        """Whether somebody of a higher priority waits."""
        return bool(self._waiting) and -self._waiting[0].rank > priority

    async def _acquire(self, priority: int, number: int) -> None:
        if not self._is_held:
            self._is_held = True
            return
        waiter = _Waiter(-priority, number, asyncio.get_running_loop().create_future())
        insort(self._waiting, waiter)
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if not waiter.turn.cancelled():  # it was passed on to a task that is being cancelled
                self._pass_on()
            self._waiting = [each for each in self._waiting if each is not waiter]
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            waiter = self._waiting.pop(0)
            if not waiter.turn.cancelled():
                waiter.turn.set_result(None)
                return
        self._is_held = False
