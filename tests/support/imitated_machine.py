"""A machine whose memory a test sets, and a pool of drafters in it."""

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

from table_decoder import TableDecoder

from edgespec.draft.drafter import Drafter
from edgespec.draft.drafter_sets import BackgroundLoader, Candidate, OpenModel, drafter_sets
from edgespec.draft.memory_watch import MemoryWatch
from edgespec.draft.model_drafter import ModelDrafter
from edgespec.draft.ngram import NgramDrafter
from edgespec.draft.pool import ChangeLog, DrafterPool
from edgespec.draft.suffix import SuffixDrafter
from edgespec.errors import MemoryExhausted
from edgespec.memory.free_memory import HOST, FreeByPlace, FreeMemory
from edgespec.memory.pressure import NO_PRESSURE, Pressure
from edgespec.system.cancel import Cancel
from edgespec.system.clock import VirtualClock

VOCAB = 12
MIB = 1 << 20
PLENTY = 1 << 40
ROOMY = {HOST: FreeMemory(PLENTY, "a test")}


def target() -> TableDecoder:
    return TableDecoder(VOCAB, seed=1)


class AtOnce(Executor):
    """Has done what it is given when it answers."""

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        try:
            done.set_result(work(*arguments, **named))
        except Exception as error:
            done.set_exception(error)
        return done


@dataclass
class Machine:
    """Memory that a test sets, and what was opened in it."""

    free_bytes: int = PLENTY
    clock: VirtualClock = field(default_factory=VirtualClock)
    opened: list[str] = field(default_factory=list)
    watched: list["weakref.ref[TableDecoder]"] = field(default_factory=list)
    refuses: set[str] = field(default_factory=set)
    errors: dict[str, Exception] = field(default_factory=dict)
    num_closed: int = 0
    executor: Executor = field(default_factory=AtOnce)
    reported: list[str] = field(default_factory=list)
    pressure: Pressure = NO_PRESSURE

    def rooms(self) -> FreeByPlace:
        return {HOST: FreeMemory(self.free_bytes, "a test")}

    def candidate(self, name: str, needed_mib: int, drafter: Callable[[], Drafter] | None = None) -> Candidate:
        def opened(cancel: Cancel, report: Callable[[str], None]) -> OpenModel:
            if name in self.refuses:
                raise MemoryExhausted(f"no room for {name}")
            if name in self.errors:
                raise self.errors[name]
            decoder = TableDecoder(VOCAB, seed=2, near=target())
            self.watched.append(weakref.ref(decoder))
            self.opened.append(name)
            made = drafter() if drafter else ModelDrafter(decoder, VOCAB, name)
            return OpenModel(made, decoder, self)

        return Candidate(name, {HOST: needed_mib * MIB}, opened)

    @property
    def alive(self) -> int:
        """How many of the decoders that were opened anybody holds."""
        gc.collect()
        return sum(each() is not None for each in self.watched)

    def stop(self) -> None:
        self.num_closed += 1

    def pool(self, *candidates: Candidate, texts: frozenset[str] = frozenset({"suffix"})) -> DrafterPool:
        sets = drafter_sets(
            [[each] for each in candidates], texts, frozenset({"suffix"}), lambda names: len(names) * MIB
        )
        return DrafterPool(
            sets,
            VOCAB,
            self.texts,
            watch=MemoryWatch(
                [each.tier for each in sets], free=self.rooms, clock=self.clock, pressure=lambda: self.pressure
            ),
            changes=ChangeLog(self.reported.append),
            loader=BackgroundLoader(self.executor),
        )

    def texts(self, names: frozenset[str]) -> list[Drafter]:
        made: dict[str, Drafter] = {"suffix": SuffixDrafter(), "ngram": NgramDrafter()}
        return [made[name] for name in sorted(names)]

    def look(self, pool: DrafterPool, free_bytes: int, after_s: float = 1.0) -> list[str]:
        self.free_bytes = free_bytes
        self.clock.sleep(after_s)
        pool.look(10)
        return [drafter.name for drafter in pool.drafters()]
