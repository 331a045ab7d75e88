"""Which models are loaded when, with engines that are nothing but their names."""

import asyncio
from collections.abc import Callable, Coroutine
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

from edgespec import Engine
from edgespec.errors import EdgeSpecError, MemoryExhausted
from edgespec.server.model_host import ModelHost


def _engine(close: Callable[[], object]) -> Engine:
    """What a host asks of an engine."""
    made = SimpleNamespace(close=close, manifest=SimpleNamespace(pooling=None))
    return cast(Engine, made)


class Engines:
    """Opens engines, and says what was opened and closed in which order."""

    def __init__(self, fails: Callable[[str], Exception | None] = lambda name: None) -> None:
        self.done: list[str] = []
        self.may_open = Event()
        self.may_open.set()
        self._fails = fails

    def open(self, name: str) -> Engine:
        assert self.may_open.wait(120)
        if error := self._fails(name):
            self.done.append(f"{name}!")
            raise error
        self.done.append(f"+{name}")
        return _engine(lambda: self.done.append(f"-{name}"))


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


async def use(host: ModelHost, name: str) -> None:
    async with host.lease(name) as model:
        assert model.name == name


async def settled(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def test_a_model_is_loaded_once_for_all_who_want_it() -> None:
    engines = Engines()

    async def work() -> None:
        host = ModelHost(engines.open)
        await asyncio.gather(*(use(host, "a") for _ in range(9)))
        await use(host, "a")
        assert [*host.hosted] == ["a"]
        await host.close()

    run(work())
    assert engines.done == ["+a", "-a"]


def test_the_model_used_longest_ago_makes_place() -> None:
    engines = Engines()

    async def work() -> None:
        host = ModelHost(engines.open, max_models=2)
        for name in ("a", "b", "a", "c"):
            await use(host, name)
        assert engines.done == ["+a", "+b", "-b", "+c"]
        assert sorted(host.hosted) == ["a", "c"]

    run(work())


def test_who_wants_another_model_waits_for_its_users_and_is_not_overtaken() -> None:
    engines, order = Engines(), list[str]()

    async def ask(host: ModelHost, name: str) -> None:
        async with host.lease(name):
            order.append(name)

    async def work() -> None:
        host = ModelHost(engines.open)
        async with host.lease("a"):
            waiting = [asyncio.create_task(ask(host, name)) for name in ("b", "a", "b")]
            await asyncio.sleep(0.01)
            assert order == []
        await asyncio.gather(*waiting)

    run(work())
    assert order == ["b", "a", "b"]
    assert engines.done == ["+a", "-a", "+b", "-b", "+a", "-a", "+b"]


def test_an_idle_model_is_closed_and_one_in_use_is_not() -> None:
    engines = Engines()

    async def work() -> None:
        host = ModelHost(engines.open, idle_s=0.02)
        async with host.lease("a"):
            await asyncio.sleep(0.05)
            assert [*host.hosted] == ["a"]
        await settled(lambda: engines.done == ["+a", "-a"])
        assert not host.hosted
        await use(host, "a")

    run(work())
    assert engines.done[:3] == ["+a", "-a", "+a"]


def test_a_model_that_everybody_has_left_while_it_loaded_is_closed_too() -> None:
    engines = Engines()
    engines.may_open.clear()

    async def work() -> None:
        host = ModelHost(engines.open, idle_s=0.01)
        waiting = asyncio.create_task(use(host, "a"))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        engines.may_open.set()
        await settled(lambda: engines.done == ["+a", "-a"])
        assert not host.hosted

    run(work())


def test_who_comes_while_an_idle_model_is_closed_gets_a_new_one() -> None:
    """Never one that is being closed, and never two at once."""
    done: list[str] = []
    is_closing, may_close = Event(), Event()

    def close() -> None:
        is_closing.set()
        assert may_close.wait(120)
        done.append("-")

    def open_engine(name: str) -> Engine:
        done.append("+")
        return _engine(close)

    async def work() -> None:
        host = ModelHost(open_engine, idle_s=0.001)
        await use(host, "a")
        await settled(is_closing.is_set)
        coming = [asyncio.create_task(use(host, "a")) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert (done, [*host.hosted]) == (["+"], [])
        host.idle_s = None
        may_close.set()
        await asyncio.gather(*coming)
        assert (done, [*host.hosted]) == (["+", "-", "+"], ["a"])

    run(work())


def test_short_memory_closes_idle_models() -> None:
    engines = Engines()

    async def work() -> None:
        host = ModelHost(engines.open, is_memory_short=lambda: True, look_s=0.005)
        await host.start()
        async with host.lease("a"):
            await asyncio.sleep(0.02)
            assert [*host.hosted] == ["a"]
        await settled(lambda: not host.hosted)
        await host.close()

    run(work())


def test_a_model_that_lacks_memory_is_tried_again_without_the_others() -> None:
    engines = Engines(
        lambda name: MemoryExhausted("short") if name == "big" and "-a" not in engines.done else None
    )

    async def work() -> None:
        host = ModelHost(engines.open, max_models=3)
        await use(host, "a")
        await use(host, "big")
        assert [*host.hosted] == ["big"]

    run(work())
    assert engines.done == ["+a", "big!", "-a", "+big"]


def test_all_who_wait_hear_that_loading_failed_and_the_next_one_tries_again() -> None:
    failures = [EdgeSpecError("a file is missing")]
    engines = Engines(lambda name: failures.pop() if failures else None)

    async def work() -> None:
        host = ModelHost(engines.open)
        found = await asyncio.gather(*(use(host, "a") for _ in range(3)), return_exceptions=True)
        assert [str(each) for each in found] == ["a file is missing"] * 3
        await use(host, "a")

    run(work())
    assert engines.done == ["a!", "+a"]


def test_a_model_that_was_loaded_before_is_lent() -> None:
    engines = Engines()

    async def work() -> None:
        host = ModelHost(engines.open)
        await host.start("first", engines.open("x"))
        await use(host, "first")
        await host.close()

    run(work())
    assert engines.done == ["+x", "-x"]


async def use_until_ended(host: ModelHost, name: str, priority: int, order: list[str]) -> None:
    async with host.lease(name, priority) as lease:
        order.append(f"+{name}{priority}")
        await lease.has_to_end.wait()
    order.append(f"-{name}{priority}")


def test_a_request_of_a_low_priority_gives_the_place_of_its_model_up() -> None:
    engines, order = Engines(), list[str]()

    async def work() -> None:
        host = ModelHost(engines.open)
        title = asyncio.create_task(use_until_ended(host, "a", -1, order))
        await settled(lambda: order == ["+a-1"])
        await use(host, "a")  # which needs no other place
        assert order == ["+a-1"]
        await use(host, "b")
        await title

    run(work())
    assert engines.done == ["+a", "-a", "+b"]


def test_a_model_that_somebody_of_the_same_priority_uses_is_waited_for() -> None:
    """Its other users end only once they would be the last to hold the place."""
    engines, order = Engines(), list[str]()

    async def work() -> None:
        host = ModelHost(engines.open)
        title = asyncio.create_task(use_until_ended(host, "a", -1, order))
        async with host.lease("a") as person:
            waiting = asyncio.create_task(use(host, "b"))
            await asyncio.sleep(0.02)
            assert order == ["+a-1"]
            assert not person.has_to_end.is_set()
        await asyncio.gather(title, waiting)

    run(work())
    assert engines.done == ["+a", "-a", "+b"]


def test_who_waits_for_a_place_with_a_low_priority_holds_nobody_up() -> None:
    engines, order = Engines(), list[str]()

    async def ask(host: ModelHost, name: str, priority: int) -> None:
        async with host.lease(name, priority):
            order.append(f"{name}{priority}")

    async def work() -> None:
        host = ModelHost(engines.open)
        async with host.lease("a"):
            titles = [asyncio.create_task(ask(host, "b", -2)), asyncio.create_task(ask(host, "c", -1))]
            await asyncio.sleep(0.01)
            await ask(host, "a", 0)
            other = asyncio.create_task(ask(host, "d", 0))
            await asyncio.sleep(0.01)
            assert order == ["a0"]
        await asyncio.gather(other, *titles)

    run(work())
    assert order == ["a0", "d0", "c-1", "b-2"]


def test_only_as_many_requests_have_to_end_as_make_one_place() -> None:
    engines, order = Engines(), list[str]()

    async def work() -> None:
        host = ModelHost(engines.open, max_models=2)
        titles = [asyncio.create_task(use_until_ended(host, name, -1, order)) for name in "ab"]
        await settled(lambda: len(order) == 2)
        await use(host, "c")
        assert order[2:] == ["-a-1"]
        titles[1].cancel()
        await asyncio.gather(*titles, return_exceptions=True)

    run(work())


def test_places_go_by_priority_and_among_equals_in_the_order_of_requests() -> None:
    """Who leaves the line, while waiting or as its turn comes, holds nobody up."""
    engines, order = Engines(), list[str]()

    async def ask(host: ModelHost, name: str, priority: int) -> None:
        async with host.lease(name, priority):
            order.append(name)

    async def work() -> None:
        host = ModelHost(engines.open)
        async with host.lease("held"):
            asked = [
                ("low", -5),
                ("gone", 0),
                ("ending", 0),
                ("title", -1),
                ("first", 0),
                ("tags", -1),
                ("second", 0),
            ]
            tasks = {name: asyncio.create_task(ask(host, name, priority)) for name, priority in asked}
            await asyncio.sleep(0.01)
            tasks["gone"].cancel()
            await asyncio.sleep(0)
        tasks["ending"].cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    run(work())
    assert order == ["first", "second", "title", "tags", "low"]
