"""The models that are loaded: opened on first request, closed when unused or when another needs their place.

A request of a low priority gives its model's place up to one of a higher priority, and never holds it from one.
"""

import asyncio
import logging
from bisect import insort
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from time import monotonic
from typing import TypeVar

from edgespec import Engine, MemoryExhausted, Preset, by_preset
from edgespec.server.answer_parts import TokenWords
from edgespec.server.kept_prefixes import KeptPrefixes
from edgespec.system.printable import one_line
from edgespec.system.threads import begin, run_settled

T = TypeVar("T")
OpenEngine = Callable[[str], Engine]

_LOG = logging.getLogger("edgespec.server")
DEFAULT_S = -1.0  # as the user of the server has it
_LOOK_S = 5.0  # between two looks at memory


class HostedModel:
    """A model that is loaded or being loaded, and the requests that use it.

    idle_s: It is closed when nobody has used it for so long; None to keep it.
    """

    def __init__(self, name: str, loading: "asyncio.Future[Engine]", idle_s: float | None) -> None:
        self.name = name
        self.loading = loading
        self.idle_s = idle_s
        self.leases: list[Lease] = []
        self.used_s = monotonic()
        self.expiry: asyncio.TimerHandle | None = None

    @property
    def engine(self) -> Engine:
        """The engine, once it is loaded."""
        return self.loading.result()

    @property
    def is_idle(self) -> bool:
        return not self.leases and self.loading.done()

    @cached_property
    def words(self) -> TokenWords:
        """How its tokens are spelled; takes a while, once."""
        return TokenWords(self.engine.tokenizer.spellings, self.engine.tokenizer.piece)


@dataclass(eq=False, slots=True)
class Lease:
    """The use of a model by one request.

    has_to_end: Set when a request of a higher priority waits for the place of the model.
    preset: By which answers are made, where the model is loaded for others too.
    """

    name: str
    priority: int
    has_to_end: asyncio.Event = field(default_factory=asyncio.Event)
    preset: Preset | None = None
    _model: HostedModel | None = field(init=False, default=None)

    @property
    def model(self) -> HostedModel:
        """The model, once there is a place for it."""
        assert self._model is not None
        return self._model

    @property
    def engine(self) -> Engine:
        """The engine of the model, which answers by the preset, if there is one."""
        return by_preset(self.model.engine, self.preset) if self.preset else self.model.engine

    @property
    def shown_name(self) -> str:
        """The name that the client knows."""
        return self.preset.name if self.preset else self.name

    def keep(self, idle_s: float | None) -> None:
        """Have the model closed when nobody has used it for so long; None for never, DEFAULT_S for as it is."""
        if idle_s != DEFAULT_S:
            self.model.idle_s = idle_s


@dataclass(slots=True)
class ModelHost:
    """Lends engines by name, at most max_models at once. One thread, that of the event loop.

    Requests for a model that has no place wait in their order, those of a higher priority first, until the model
    that was used longest ago is idle. Where all requests that use a model have a lower priority, they have to end.

    open_engine: Loads the model of a name; called in a thread.
    idle_s: A model that nobody has used for so long is closed, unless a request says otherwise; None to keep it.
    is_memory_short: Whether an idle model should be closed at once.
    prefixes: Where what a model has read is kept while it is closed; None to keep nothing.
    """

    open_engine: OpenEngine
    max_models: int = 1
    idle_s: float | None = None
    is_memory_short: Callable[[], bool] = lambda: False
    look_s: float = _LOOK_S
    prefixes: KeptPrefixes | None = None
    _models: dict[str, HostedModel] = field(init=False, default_factory=dict)
    _waiting: list[Lease] = field(init=False, default_factory=list)  # in the order in which they get their models
    _door: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)  # of who decides which models there are
    _changed: asyncio.Event = field(init=False, default_factory=asyncio.Event)  # set, and replaced, at each change
    _watch: "asyncio.Task[None] | None" = field(init=False, default=None)

    def __contains__(self, name: str) -> bool:
        """Whether a model is loaded, or being loaded, by a name."""
        return name in self._models

    @property
    def hosted(self) -> dict[str, HostedModel]:
        """The models that are loaded, by their names."""
        return {each.name: each for each in [*self._models.values()] if _is_loaded(each)}

    async def start(self, name: str | None = None, engine: Engine | None = None) -> None:
        """Begin to watch memory, with a model that is loaded already, if there is one."""
        self._watch = asyncio.create_task(self._watch_memory())
        if name is not None and engine is not None:
            await in_daemon(lambda: self._take_prefixes(name, engine))
            loading: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
            loading.set_result(engine)
            self._models[name] = HostedModel(name, loading, self.idle_s)
            self._expire_later(self._models[name])

    @asynccontextmanager
    async def lease(self, name: str, priority: int = 0) -> AsyncIterator[Lease]:
        """The use of a model, which stays loaded meanwhile; raises what loading it raises."""
        lease = Lease(name, priority)
        await self._enter(lease)
        try:
            await asyncio.wait([lease.model.loading])  # another request may want what a client no longer waits for
            lease.model.loading.result()
            yield lease
        finally:
            self._leave(lease)

    async def close(self) -> None:
        if self._watch:
            self._watch.cancel()
        for model in list(self._models.values()):
            await self._close(model)

    async def _enter(self, lease: Lease) -> None:
        """Give a lease its model when no other one is before it in the line."""
        insort(self._waiting, lease, key=lambda each: -each.priority)
        try:
            while True:
                changed = self._changed  # before the look, so that no change is missed
                async with self._door:
                    if self._waiting[0] is lease and await self._take_place(lease):
                        return
                await changed.wait()
        finally:
            self._waiting.remove(lease)
            self._note_change()

    def _note_change(self) -> None:
        """Let all who wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _take_place(self, lease: Lease) -> bool:
        """Give a lease its model; False where there is no place for it yet."""
        model = self._models.get(lease.name)
        if model is None:
            while len(self._models) >= self.max_models:
                if (idle := self._least_used()) is None:
                    self._end_lower(lease.priority)
                    return False
                await self._close(idle)
            model = HostedModel(lease.name, asyncio.ensure_future(self._load(lease.name)), self.idle_s)
            self._models[lease.name] = model
            model.loading.add_done_callback(partial(self._settle, model))
        lease._model = model
        model.leases.append(lease)
        if model.expiry:
            model.expiry.cancel()
        return True

    def _leave(self, lease: Lease) -> None:
        model = lease.model
        model.leases.remove(lease)
        model.used_s = monotonic()
        self._settle(model)

    def _settle(self, model: HostedModel, *done: object) -> None:
        """Let a model go that nobody uses: later, or at once if it could not be loaded."""
        if model.is_idle and _is_loaded(model):
            self._expire_later(model)
        elif model.is_idle and self._models.get(model.name) is model:
            del self._models[model.name]
        self._note_change()

    def _end_lower(self, priority: int) -> None:
        """Have the requests end that use one of the models, if there is one that only lower priorities use."""
        lower = [
            model for model in self._models.values() if all(lease.priority < priority for lease in model.leases)
        ]
        if lower and not any(lease.has_to_end.is_set() for model in lower for lease in model.leases):
            for lease in min(lower, key=lambda model: model.used_s).leases:
                lease.has_to_end.set()

    async def _load(self, name: str) -> Engine:
        """Load a model; where memory is short, once more without the models that nobody uses."""
        _LOG.info("loading %s", one_line(name))
        try:
            return await in_daemon(lambda: self._open(name))
        except MemoryExhausted:
            if self._least_used() is None:
                raise
        while (idle := self._least_used()) is not None:
            await self._close(idle)
        return await in_daemon(lambda: self._open(name))

    def _open(self, name: str) -> Engine:
        engine = self.open_engine(name)
        try:
            self._take_prefixes(name, engine)
        except BaseException:
            engine.close()
            raise
        return engine

    def _take_prefixes(self, name: str, engine: Engine) -> None:
        if self.prefixes is not None:
            self.prefixes.take(name, engine)

    def _least_used(self) -> HostedModel | None:
        """The idle model that was used longest ago."""
        idle = (each for each in self._models.values() if each.is_idle)
        return min(idle, key=lambda model: model.used_s, default=None)

    def _expire_later(self, model: HostedModel) -> None:
        if model.expiry:
            model.expiry.cancel()
        model.expiry = None
        if model.idle_s is not None:
            loop = asyncio.get_running_loop()
            model.expiry = loop.call_later(model.idle_s, lambda: loop.create_task(self._expire(model)))

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
            _LOG.info("unloading %s", one_line(model.name))
            await in_daemon(lambda: self._end(model))
        self._note_change()

    def _end(self, model: HostedModel) -> None:
        try:
            if self.prefixes is not None:
                self.prefixes.keep(model.name, model.engine)
        finally:
            model.engine.close()


def _is_loaded(model: HostedModel) -> bool:
    return model.loading.done() and not model.loading.cancelled() and model.loading.exception() is None


def in_daemon(work: Callable[[], T]) -> "asyncio.Future[T]":
    """The result of work in a thread of its own, for which the end of the program does not wait."""
    return asyncio.wrap_future(begin(partial(run_settled, work), "edgespec models"))
