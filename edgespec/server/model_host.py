"""The models that are loaded: opened on first request, closed when unused or when another needs their place."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from threading import Thread
from time import monotonic
from typing import TypeVar

from edgespec.engine.engine import Engine
from edgespec.errors import MemoryExhausted
from edgespec.system.printable import one_line

T = TypeVar("T")
OpenEngine = Callable[[str], Engine]

_LOG = logging.getLogger("edgespec.server")
_LOOK_S = 5.0  # between two looks at memory


class HostedModel:
    """A model that is loaded or being loaded, and how many requests use it."""

    def __init__(self, name: str, loading: "asyncio.Future[Engine]") -> None:
        self.name = name
        self.loading = loading
        self.num_users = 0
        self.used_s = monotonic()
        self.expiry: asyncio.TimerHandle | None = None

    @property
    def engine(self) -> Engine:
        """The engine, once it is loaded."""
        return self.loading.result()

    @property
    def is_idle(self) -> bool:
        return self.num_users == 0 and self.loading.done()

    @cached_property
    def spellings(self) -> dict[int, bytes]:
        """The bytes of each token that stands for text; takes a while, once."""
        return self.engine.tokenizer.spellings


@dataclass(slots=True)
class ModelHost:
    """Lends engines by name, at most max_models at once. One thread, that of the event loop.

    Requests for a model that has no place wait in their order until the one that was used longest ago is idle.

    open_engine: Loads the model of a name; called in a thread.
    idle_s: A model that nobody has used for so long is closed; None to keep it.
    is_memory_short: Whether an idle model should be closed at once.
    """

    open_engine: OpenEngine
    max_models: int = 1
    idle_s: float | None = None
    is_memory_short: Callable[[], bool] = lambda: False
    look_s: float = _LOOK_S
    _models: dict[str, HostedModel] = field(init=False, default_factory=dict)
    _door: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)  # passed in the order of requests
    _released: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _watch: "asyncio.Task[None] | None" = field(init=False, default=None)

    @property
    def loaded(self) -> list[str]:
        """Names of the models that are loaded."""
        return [each.name for each in self._models.values() if _is_loaded(each)]

    async def start(self, name: str | None = None, engine: Engine | None = None) -> None:
        """Begin to watch memory, with a model that is loaded already, if there is one."""
        self._watch = asyncio.create_task(self._watch_memory())
        if name is not None and engine is not None:
            loading: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
            loading.set_result(engine)
            self._models[name] = HostedModel(name, loading)
            self._expire_later(self._models[name])

    @asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[HostedModel]:
        """A model that stays loaded meanwhile; raises what loading it raises."""
        model = await self._enter(name)
        try:
            await asyncio.shield(model.loading)
            yield model
        finally:
            self._leave(model)

    async def close(self) -> None:
        """Close all models."""
        if self._watch:
            self._watch.cancel()
        for model in list(self._models.values()):
            await self._close(model)

    async def _enter(self, name: str) -> HostedModel:
        async with self._door:
            model = self._models.get(name)
            if model is None:
                await self._make_place()
                model = self._models[name] = HostedModel(name, asyncio.ensure_future(self._load(name)))
                model.loading.add_done_callback(partial(self._settle, model))
            model.num_users += 1
            if model.expiry:
                model.expiry.cancel()
            return model

    def _leave(self, model: HostedModel) -> None:
        model.num_users -= 1
        model.used_s = monotonic()
        self._settle(model)

    def _settle(self, model: HostedModel, *done: object) -> None:
        """Let a model go that nobody uses: later, or at once if it could not be loaded."""
        if model.is_idle and _is_loaded(model):
            self._expire_later(model)
        elif model.is_idle and self._models.get(model.name) is model:
            del self._models[model.name]
        self._released.set()

    async def _make_place(self) -> None:
        while len(self._models) >= self.max_models:
            if (idle := self._least_used()) is not None:
                await self._close(idle)
            else:
                self._released.clear()
                await self._released.wait()

    async def _load(self, name: str) -> Engine:
        """Load a model; where memory is short, once more without the models that nobody uses."""
        _LOG.info("loading %s", one_line(name))
        try:
            return await in_daemon(lambda: self.open_engine(name))
        except MemoryExhausted:
            if self._least_used() is None:
                raise
        while (idle := self._least_used()) is not None:
            await self._close(idle)
        return await in_daemon(lambda: self.open_engine(name))

    def _least_used(self) -> HostedModel | None:
        """The idle model that was used longest ago."""
        return min((each for each in self._models.values() if each.is_idle), key=_used_s, default=None)

    def _expire_later(self, model: HostedModel) -> None:
        if self.idle_s is not None:
            if model.expiry:
                model.expiry.cancel()
            loop = asyncio.get_running_loop()
            model.expiry = loop.call_later(self.idle_s, lambda: loop.create_task(self._expire(model)))

    async def _expire(self, model: HostedModel) -> None:
        async with self._door:
            if model.is_idle and self._models.get(model.name) is model:
                await self._close(model)

    async def _watch_memory(self) -> None:
        while True:
            await asyncio.sleep(self.look_s)
            async with self._door:
                idle = self._least_used()
                if idle is not None and self.is_memory_short():
                    _LOG.info("memory is short")
                    await self._close(idle)

    async def _close(self, model: HostedModel) -> None:
        self._models.pop(model.name, None)
        if model.expiry:
            model.expiry.cancel()
        if _is_loaded(model):
            _LOG.info("closing %s", one_line(model.name))
            await in_daemon(model.engine.close)
        self._released.set()


def _used_s(model: HostedModel) -> float:
    return model.used_s


def _is_loaded(model: HostedModel) -> bool:
    return model.loading.done() and not model.loading.cancelled() and model.loading.exception() is None


def in_daemon(work: Callable[[], T]) -> "asyncio.Future[T]":
    """The result of work in a thread of its own, for which the end of the program does not wait."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            found, failed = work(), None
        except BaseException as error:
            found, failed = None, error
        try:
            loop.call_soon_threadsafe(settle, found, failed)
        except RuntimeError:  # the event loop is closed
            return

    Thread(target=run, name="edgespec models", daemon=True).start()
    return done
