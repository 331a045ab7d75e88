"""The drafters of an engine: as many as memory has space for, without those that have failed.

Several threads may make answers, one of them with drafter models; between its rounds a thread of the pool may look
at memory. Knows protocols, and how a drafter is opened only as a call.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Event, RLock
from typing import TypeVar

from edgespec.decoding.decoder import Decoder
from edgespec.draft.drafter import Drafter
from edgespec.draft.drafter_sets import PLAIN, BackgroundLoader, Candidate, DrafterSet, Load, OpenModel
from edgespec.draft.lanes import Lane
from edgespec.draft.memory_watch import IDLE_LOOK_S, IdleWatch, MemoryWatch
from edgespec.draft.quarantine import GuardedDrafter, describe_error
from edgespec.draft.timeline import Interval
from edgespec.errors import MemoryExhausted
from edgespec.memory.free_memory import Bytes, FreeByPlace, return_freed
from edgespec.system.cancel import Cancel
from edgespec.system.context_managers import contextmanager
from edgespec.types import Report


@dataclass(slots=True)
class ChangeLog:
    """Lines that are collected while answers are made, and reported between answers."""

    report: Report = lambda line: None
    _for_stats: list[str] = field(init=False, default_factory=list)
    for_user: list[str] = field(init=False, default_factory=list)  # lines that were not reported yet

    def add(self, line: str) -> None:
        self._for_stats.append(line)
        self.for_user.append(line)

    def take(self) -> tuple[str, ...]:
        """Lines that were in the figures of no answer yet."""
        lines, self._for_stats = tuple(self._for_stats), []
        return lines

    def flush(self) -> None:
        lines, self.for_user = self.for_user, []
        for line in lines:
            self.report(line)


T = TypeVar("T")


@dataclass(slots=True, weakref_slot=True)
class DrafterPool:
    """Opens model drafters, closes them where memory is short, and quarantines drafters at fault."""

    drafter_sets: Sequence[DrafterSet] = (PLAIN,)  # largest first; the last decodes plainly
    vocab_size: int = 0  # the target's
    from_text: Callable[[frozenset[str]], Sequence[Drafter]] = lambda names: ()  # text drafters of one answer
    watch: MemoryWatch = field(default_factory=MemoryWatch)  # says which of the sets there is memory for
    changes: ChangeLog = field(default_factory=ChangeLog)
    loader: BackgroundLoader = field(default_factory=BackgroundLoader)  # opens models while answers are made
    free_caches: Callable[[], bool] = lambda: False  # empties a cache of the target that no answer has
    free_session: Callable[[], bool] = lambda: False  # closes a second session of the target, if there is one
    grow_cache: Callable[[int, int], None] = lambda cache, num_tokens: None  # takes its memory for so many tokens
    version: int = field(init=False, default=0)  # rises whenever other drafters are there
    answered_version: int = field(init=False, default=0)  # with which an answer last drafted
    _position: int = field(init=False, default=0)  # of the set that drafts: the watch's once its models are open
    _guards: dict[Candidate, GuardedDrafter] = field(init=False, default_factory=dict)  # of all that were open
    _models: dict[Candidate, OpenModel] = field(init=False, default_factory=dict)  # that are open
    _quarantined: set[str] = field(init=False, default_factory=set)
    _faults: deque[tuple[str, str]] = field(init=False, default_factory=deque)
    _is_refused: Event = field(init=False, default_factory=Event)
    _is_closed: bool = field(init=False, default=False)
    _in_round: set[int] = field(init=False, default_factory=set)  # caches of answers whose drafters are at work
    _num_holds: int = field(init=False, default=0)  # by those that run drafters without rounds
    _idle_watch: IdleWatch | None = field(init=False, default=None)
    _lock: RLock = field(init=False, default_factory=RLock)

    @property
    def _may_have_models(self) -> bool:
        return bool(self.drafter_sets[0].models)

    @property
    def drafter_set(self) -> DrafterSet:
        return self.drafter_sets[self._position]

    @property
    def has_models(self) -> bool:
        return bool(self._models)

    @property
    def decoders(self) -> dict[str, Decoder]:
        """Decoders of the models that are open, by name."""
        return {each.name: model.decoder for each, model in list(self._models.items())}

    def start(self, free: FreeByPlace, target: Bytes, downgrades: Sequence[str] = ()) -> None:
        """Open what fits beside the target, for whose bytes space is kept, and tell of earlier downgrades.

        Raises EdgeSpecError: A drafter cannot be opened, for another reason than lack of memory.
        """
        with self._lock:
            for line in downgrades:
                self.changes.add(line)
            self.watch.start(free, target)
            self._move()
            while self._may_have_models and not self._open_all():
                self.watch.fall("a drafter was refused memory")
                self._close_unused()
                self._move()
            self.changes.flush()

    def drafters(self) -> list[Drafter]:
        """The drafters of one answer, as of this moment."""
        with self._lock:
            texts = map(self._guard, self.from_text(self.drafter_set.texts))
            models = (self._guards[each] for each in self.drafter_set.models if each in self._models)
            return [each for each in (*texts, *models) if each.name not in self._quarantined]

    def look(self, num_tokens: int, cache: int = 0) -> int:
        """Handle faults and check memory for a text in a cache of the target. Returns the version of the drafters.

        Raises MemoryExhausted: The target's cache cannot grow, although all drafters were closed.
        """
        if len(self.drafter_sets) > 1 or self._faults:
            with self._lock:
                self._quarantine_faults()
                if not self._is_closed:
                    self._look(num_tokens, cache)
        self.watch.require_growth(num_tokens, self.relieve, cache, self.grow_cache)
        return self.version

    def begin_round(self, num_tokens: int, cache: int = 0) -> int:
        """Do as look() does; until the end of the round only threads in rounds open and close models."""
        with self._lock:
            self._in_round.add(cache)
        return self.look(num_tokens, cache)

    def end_round(self, cache: int) -> None:
        with self._lock:
            self._in_round.discard(cache)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Open and close no model between rounds while the block runs."""
        with self._lock:
            self._num_holds += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_holds -= 1

    def watch_while_idle(self, interval_s: float = IDLE_LOOK_S) -> None:
        """Start a thread that checks memory between answers too, until close(), if there is any model to close."""
        if self._idle_watch is None and self._may_have_models:
            self._idle_watch = IdleWatch(self.look_while_idle, interval_s)

    def look_while_idle(self) -> bool:
        """Check memory from a thread other than that of answers. Returns whether to go on checking.

        Changes are reported with the next answer, not while the user is typing.
        """
        with self._lock:
            if self._is_closed:
                return False
            if not self._in_round and not self._num_holds:
                try:
                    self._quarantine_faults()
                    self._look(0)
                except Exception as error:  # answers check memory themselves, and raise this error if it persists
                    self.changes.add(f"memory is not watched between answers any more: {describe_error(error)}")
                    return False
            return True

    def relieve(self) -> bool:
        """Free memory for a pass of the target that was refused memory. Returns whether any was freed."""
        with self._lock:
            if self.free_caches():
                return_freed()
                return True
            has_ended = self.loader.end()
            if self.free_session():
                return_freed()
                return True
            if self.watch.is_at_bottom:
                return has_ended
            self.watch.fall("a pass was refused memory")
            self._follow()
            return True

    def with_relief(self, work: Callable[[], T]) -> T:
        """The result of work, which is tried again as often as memory can be freed for it.

        Raises MemoryExhausted: There is not enough, although all drafters were closed.
        """
        while True:
            try:
                return work()
            except MemoryExhausted:
                if not self.relieve():
                    raise

    def report_refused_draft(self, num_draft: int) -> None:
        """Report that a pass over a draft was refused memory and ran without the draft."""
        with self._lock:
            self.changes.add(
                f"a pass over a draft of {num_draft} tokens was refused memory and run without the draft"
            )
            self._is_refused.set()

    def interrupt(self) -> None:
        """End the drafts that the models are making, from another thread; waits for nothing."""
        for lane in self._lanes():
            lane.cancel()

    def take_intervals(self) -> list[Interval]:
        """When the lanes of the models have worked since this was last called."""
        with self._lock:
            lanes = self._lanes()
        return [lane.intervals.popleft() for lane in lanes for _ in range(len(lane.intervals))]

    def take_changes(self) -> tuple[str, ...]:
        """Take the changes that were in no answer's figures yet."""
        with self._lock:
            self._quarantine_faults()
            return self.changes.take()

    def report_changes(self) -> None:
        with self._lock:
            self._quarantine_faults()
            self.changes.flush()

    def close(self) -> None:
        """End the work of the models; an answer that is still being made goes on, and opens none again."""
        with self._lock:
            self._is_closed = True
            for lane in self._lanes():
                lane.stop()
            self.loader.close()
        if self._idle_watch:  # which may be waiting for the lock
            self._idle_watch.close()

    def _lanes(self) -> list[Lane]:
        return [model.lane for model in list(self._models.values())]

    def _guard(self, drafter: Drafter) -> GuardedDrafter:
        faults = self._faults  # not the pool itself: the cycle would hold its models until garbage is collected
        return GuardedDrafter(drafter, self.vocab_size, lambda *fault: faults.append(fault), self._is_refused.set)

    def _quarantine_faults(self) -> None:
        while self._faults:
            name, reason = self._faults.popleft()
            if name not in self._quarantined:
                self._quarantined.add(name)
                self.changes.add(f"{name} no longer drafts in this session: {reason}")
                self.version += 1
        for candidate in list(self._models):
            if self._guards[candidate].is_quarantined:
                self._close_model(candidate)

    def _look(self, num_tokens: int, cache: int = 0) -> None:
        if self._is_refused.is_set():
            self._is_refused.clear()
            self.watch.fall("memory was refused")
        else:
            self.watch.look(num_tokens, cache)
        self._follow()

    def _follow(self) -> None:
        """Move to the set that the watch chose: down at once, up when its models are open."""
        if not self._may_have_models:
            self._move()
            return
        self._aim()
        while load := self.loader.take():
            self._admit(load)
            self._aim()

    def _aim(self) -> None:
        """Close models that the chosen set does not have, open a missing one, and move if none is missing."""
        models = self.drafter_sets[self.watch.position].models
        self._close_unused()
        if self.loader.candidate not in models:
            self.loader.give_up()
        missing = [each for each in models if self._is_missing(each)]
        if missing and not self.loader.candidate and not self._is_closed:
            self.loader.begin(missing[0])
        is_useful = not models or any(each.name not in self._quarantined for each in models)
        if self.watch.position > self._position or (is_useful and not missing):
            self._move()

    def _move(self) -> None:
        """Draft with the set that the watch chose."""
        position = self.watch.position
        if position != self._position:
            way = "down" if position > self._position else "up"
            before, after = self.drafter_sets[self._position].name, self.drafter_sets[position].name
            self.changes.add(f"drafting steps {way} from {before} to {after}: {self.watch.reason}")
            self._position = position
            self.version += 1

    def _is_missing(self, candidate: Candidate) -> bool:
        return candidate.name not in self._quarantined and candidate not in self._models

    def _close_unused(self) -> None:
        for candidate in list(self._models):
            if candidate not in self.drafter_sets[self.watch.position].models:
                self._close_model(candidate)

    def _close_model(self, candidate: Candidate) -> None:
        """Free a model, to which only the pool has a reference."""
        self._guards[candidate].take()
        self._models[candidate].lane.stop()
        del self._models[candidate]
        self.version += 1
        return_freed()

    def _open_all(self) -> bool:
        """Open the models of the set that the watch chose. Returns False if one was refused memory."""
        for candidate in self.drafter_sets[self.watch.position].models:
            if not self._is_missing(candidate):
                continue
            try:
                self._put(candidate, candidate.open(Cancel(), self.changes.report))
            except MemoryExhausted:
                return_freed()
                return False
        return True

    def _admit(self, load: Load) -> None:
        """Let an opened model draft. If loading it failed, move to a smaller set or quarantine it."""
        try:
            model = load.future.result()
        except MemoryExhausted:
            return_freed()
            self.watch.fall("a drafter was refused memory")
        except Exception as error:  # of any kind: answers can do without this drafter
            self._faults.append((load.candidate.name, describe_error(error)))
            self._quarantine_faults()
        else:
            if load.candidate not in self._guards:
                self.changes.for_user += load.lines
            self._put(load.candidate, model)

    def _put(self, candidate: Candidate, model: OpenModel) -> None:
        if guard := self._guards.get(candidate):
            guard.put_back(model.drafter)
        else:
            self._guards[candidate] = self._guard(model.drafter)
        self._models[candidate] = model
        self.version += 1
