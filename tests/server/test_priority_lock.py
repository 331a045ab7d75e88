"""Who has a lock next."""

import asyncio
from collections.abc import Coroutine
from itertools import count
from typing import Any

from edgespec.server.model_host import PriorityLock


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


def test_it_is_passed_on_by_priority_and_among_equals_by_number() -> None:
    order = list[str]()

    async def work() -> None:
        lock, may_go_on = PriorityLock(), asyncio.Event()

        async def hold(name: str, priority: int, number: int) -> None:
            async with lock.at(priority, number):
                order.append(name)
                await may_go_on.wait()

        numbers = count()
        asked = [("first", -5), ("title", -1), ("a", 0), ("tags", -1), ("b", 0)]
        tasks = [asyncio.create_task(hold(name, priority, next(numbers))) for name, priority in asked]
        tasks.append(asyncio.create_task(hold("came back", 0, -1)))
        await asyncio.sleep(0)
        assert lock.is_wanted_above(-1)
        assert not lock.is_wanted_above(0)
        may_go_on.set()
        await asyncio.gather(*tasks)
        assert not lock.is_wanted_above(-10)
        async with lock.at(0, 0):
            order.append("later")

    run(work())
    assert order == ["first", "came back", "a", "b", "title", "tags", "later"]


def test_who_is_cancelled_leaves_it_to_the_next() -> None:
    """Whether it was still waiting, or had just been passed the lock."""
    order = list[str]()

    async def work() -> None:
        lock = PriorityLock()

        async def hold(name: str) -> None:
            async with lock.at(0, 0):
                order.append(name)

        async with lock.at(0, 0):
            tasks = [asyncio.create_task(hold(name)) for name in "abc"]
            await asyncio.sleep(0)
            tasks[0].cancel()  # while it waits
        tasks[1].cancel()  # the lock is passed on to it, and it has not run yet
        await asyncio.gather(*tasks, return_exceptions=True)
        await hold("d")

    run(work())
    assert order == ["c", "d"]
