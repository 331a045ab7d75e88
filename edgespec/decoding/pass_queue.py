"""The order in which passes over one model's weights run for several texts: by turns, or several in one.

Knows neither models nor caches: a pass is a call, and passes that run as one are another object's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Condition
from time import perf_counter
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

from edgespec.errors import Cancelled
from edgespec.system.clock import Clock

# Rows of passes that run as one, beyond which a pass waits for the next one; a narrow pass still finds its place.
MAX_JOINED_ROWS = 128
# A prompt is read in pieces of so many rows while other texts wait for their passes.
MAX_SHARED_ROWS = 64
# Passes of up to so many rows say how long it pays to wait for others.
_NARROW_ROWS = 32
_SHARE = 0.3  # of the newest value in running averages

Part = TypeVar("Part")
Result = TypeVar("Result")
Given = TypeVar("Given", contravariant=True)
Made = TypeVar("Made", covariant=True)


class Beside(NamedTuple):
    """The company of a text in a pass: rows of other texts, and the tokens that these texts got from it."""

    num_rows: int = 0
    num_tokens: float = 0.0


ALONE = Beside()


@dataclass(slots=True, eq=False)
class Caller:
    """A text that passes are run for, as the queue sees it.

    priority: Passes of a higher priority go first; those of a lower one wait until that text rests.
    may_join: Its passes may run as one with those of other texts.
    is_working: Its next pass is about to come.
    num_rows: Rows that were run for it, by which turns are fair.
    waited_s: Seconds in which its passes waited for those of others.
    waited_passes: Passes that ended from when one of its own was asked for to when that had ended.
    num_joined: Of its passes, those that ran as one with passes of others.
    tokens_per_pass: What a pass yields it lately; 0 until that is known.
    beside: What shared its last pass.
    on_begin: Is called when one of its passes begins, or waits in a queue for one that runs; by any thread.
    """

    priority: int = 0
    may_join: bool = True
    is_working: bool = False
    num_rows: int = 0
    waited_s: float = 0.0
    waited_passes: int = 0
    num_joined: int = 0
    tokens_per_pass: float = 0.0
    beside: Beside = ALONE
    on_begin: Callable[[], None] = field(default=lambda: None, repr=False)
    gap_s: float = 0.0  # between the end of a pass and the next one, lately
    ended_s: float = 0.0  # when its last pass did
    _queue: "PassQueue[Any, Any] | None" = field(default=None, repr=False)

    @property
    def is_queued(self) -> bool:
        """True if its passes go through a queue."""
        return self._queue is not None

    def work(self) -> None:
        """Say that passes follow each other from now on."""
        self.is_working = True

    def rest(self) -> None:
        """Say that no pass comes soon, so that nobody waits for one."""
        self.is_working = False
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.forget(self)

    def observe_yield(self, num_tokens: int) -> None:
        """Learn how many tokens a pass has yielded."""
        before = self.tokens_per_pass or num_tokens
        self.tokens_per_pass = before + _SHARE * (num_tokens - before)


class Joiner(Protocol[Given, Made]):
    """Runs passes of several texts as one."""

    @property
    def max_parts(self) -> int:
        """How many passes it can run as one now."""

    def is_ready(self, num_texts: int) -> bool:
        """True if it can; it prepares itself for passes of so many texts if it has not."""

    def run(self, parts: Sequence[Given]) -> Sequence[Made | Exception]:
        """The result of each pass, or why that pass alone has failed."""

    def let_go(self, *, is_whole: bool) -> bool:
        """Free memory while no pass runs: caches of the last passes, and with is_whole all, for good."""


@dataclass(slots=True, eq=False)
class _Entry(Generic[Part, Result]):
    """A pass that waits or runs."""

    caller: Caller
    num_rows: int
    part: Part | None  # as a joiner takes it; None where it has to run alone
    entered_s: float
    entered_at: int = 0  # passes that had ended when it came into the queue
    is_joined: bool = False  # a joiner runs it
    is_done: bool = False
    result: Result | None = None
    error: BaseException | None = None

    def settle(self, result: Result | BaseException) -> None:
        if isinstance(result, BaseException):
            self.error = result
        else:
            self.result = result
        self.is_done = True


class PassQueue(Generic[Part, Result]):
    """Passes of several threads, one at a time.

    Whoever is first in the queue runs the next pass: its own, or with a joiner one that holds those of others that
    wait too. There is no thread of the queue's own. A text of which few rows were run so far goes first, so that a
    short prompt does not wait for the end of long ones. While there are others a single pass is the joiner's as
    well: threads of two sessions that run by turns keep each other from the cores (docs/log/server.md).
    """

    def __init__(self, joiner: Joiner[Part, Result] | None = None, clock: Clock = perf_counter) -> None:
        self._joiner, self._clock = joiner, clock
        self._changed = Condition()
        self._waiting: list[_Entry[Part, Result]] = []
        self._working: set[Caller] = set()  # whose next passes are expected
        self._is_taken = False  # a pass runs or is put together
        self._is_running = False
        self._pass_s = 0.0  # of narrow passes lately
        self.num_passes = 0

    def run(self, caller: Caller, num_rows: int, alone: Callable[[], Result], part: Part | None = None) -> Result:
        """Run a pass when it is its turn, in the calling thread if it runs alone.

        Args:
            alone: Runs the pass, and tells the caller when it begins.
            part: The pass as the joiner takes it; None where it has to run alone.

        Raises:
            Cancelled: The caller was dropped while the pass waited.
            BaseException: What the pass has raised.
        """
        part = part if caller.may_join else None
        entry = _Entry[Part, Result](caller, num_rows, part, self._clock())
        self._enter(entry)
        try:
            while batch := self._next_batch(entry):
                self._run(batch, alone)
        finally:
            if not entry.is_done:
                self._leave(entry)
        if entry.error is not None:
            try:
                raise entry.error
            finally:
                del entry  # its error's traceback holds this frame
        return cast(Result, entry.result)  # which may be None

    def drop(self, caller: Caller) -> None:
        """End the passes of a caller that wait, from any thread; one that runs goes on."""
        with self._changed:
            for entry in [each for each in self._waiting if each.caller is caller]:
                self._waiting.remove(entry)
                entry.settle(Cancelled("the pass was cancelled"))
            self._changed.notify_all()

    def forget(self, caller: Caller) -> None:
        """Expect no further pass of a caller."""
        with self._changed:
            self._working.discard(caller)
            self._changed.notify_all()

    def let_go(self, *, is_whole: bool) -> bool:
        """Have the joiner free memory between two passes; returns whether it had any."""
        if self._joiner is None:
            return False
        with self._changed:
            self._changed.wait_for(lambda: not self._is_taken)
            self._is_taken = True
        try:
            return self._joiner.let_go(is_whole=is_whole)
        finally:
            with self._changed:
                self._is_taken = False
                self._changed.notify_all()

    def is_shared(self, caller: Caller) -> bool:
        """True if passes of others wait or are expected."""
        with self._changed:
            others = {*self._working, *(each.caller for each in self._waiting)} - {caller}
            return bool(others)

    def _enter(self, entry: _Entry[Part, Result]) -> None:
        caller = entry.caller
        with self._changed:
            entry.entered_at = self.num_passes
            if caller in self._working:
                caller.gap_s += _SHARE * (entry.entered_s - caller.ended_s - caller.gap_s)
            elif caller.is_working:
                # Who comes or comes back goes before whoever had the fewest rows.
                fewest = min((each.num_rows for each in self._working), default=0)
                caller.num_rows = max(caller.num_rows, fewest - 1)
                caller._queue = self
                self._working.add(caller)
            self._waiting.append(entry)
            if self._is_running:
                caller.on_begin()
            self._changed.notify_all()

    def _leave(self, entry: _Entry[Part, Result]) -> None:
        """Take out a pass whose thread was interrupted while it waited."""
        with self._changed:
            entry.is_done = True  # if others run it as a part of theirs, nobody wants it when that fails
            if entry in self._waiting:
                self._waiting.remove(entry)
            self._changed.notify_all()

    def _next_batch(self, entry: _Entry[Part, Result]) -> list[_Entry[Part, Result]]:
        """Wait for the turn of a pass; returns the passes to run then, or none once it was run or dropped."""
        with self._changed:
            while not entry.is_done:
                if self._is_taken or not (self._is_alone(entry) or self._first() is entry):
                    self._changed.wait()
                    continue
                self._is_taken = True
                try:
                    if self._is_alone(entry):
                        batch = [entry]
                    else:
                        self._wait_for_others()
                        batch = self._batch()
                except BaseException:  # Ctrl-C, of somebody who runs passes in the main thread
                    self._is_taken = False
                    raise
                if batch and batch[0] is entry:
                    self._is_running = True
                    for each in self._waiting:
                        if entry.is_joined or each is not entry:
                            each.caller.on_begin()
                    for each in batch:
                        self._waiting.remove(each)
                    return batch
                self._is_taken = False  # a more urgent one has come
                self._changed.notify_all()
            return []

    def _is_alone(self, entry: _Entry[Part, Result]) -> bool:
        """True if no other pass waits or is expected."""
        return self._waiting == [entry] and self._working <= {entry.caller}

    def _first(self) -> _Entry[Part, Result] | None:
        """Who has the next turn; None if that is somebody whose pass does not wait yet."""
        return min(self._eligible(), key=_num_rows, default=None)

    def _eligible(self) -> list[_Entry[Part, Result]]:
        """The passes of the highest priority that waits or is expected."""
        top = self._top_priority()
        return [each for each in self._waiting if each.caller.priority == top]

    def _top_priority(self) -> int:
        callers = [*(each.caller for each in self._waiting), *(each for each in self._working if each.is_working)]
        return max((each.priority for each in callers), default=0)

    def _wait_for_others(self) -> None:
        """Let passes come that are about to, as long as one more pass would cost them and the others more."""
        if not self._can_join():
            return
        started_s = self._clock()
        while True:
            top, waiting = self._top_priority(), {each.caller for each in self._waiting}
            late = [
                each
                for each in self._working - waiting
                if each.is_working and each.may_join and each.priority == top and each.gap_s < self._pass_s
            ]
            if not late or not waiting:
                return
            # Each that waits loses the time, and each that comes gains what is left of a pass.
            left_s = started_s + self._pass_s * min(1.0, len(late) / len(waiting)) - self._clock()
            if left_s <= 0:
                return
            self._changed.wait(left_s)

    def _can_join(self) -> bool:
        first = self._first()
        if self._joiner is None or first is None or first.part is None:
            return False
        num_texts = len({*self._working, *(each.caller for each in self._waiting)})
        return num_texts > 1 and self._joiner.is_ready(num_texts)

    def _batch(self) -> list[_Entry[Part, Result]]:
        """The passes to run next: the first, and those that can run with it as one."""
        first = self._first()
        if first is None or not self._can_join():
            return [] if first is None else [first]
        assert self._joiner is not None
        first.is_joined = True
        batch, num_rows = [first], first.num_rows
        for each in sorted(self._eligible(), key=_num_rows):
            fits = len(batch) < self._joiner.max_parts and num_rows + each.num_rows <= MAX_JOINED_ROWS
            if each is not first and each.part is not None and fits:
                batch.append(each)
                num_rows += each.num_rows
        return batch

    def _run(self, batch: Sequence[_Entry[Part, Result]], alone: Callable[[], Result]) -> None:
        began_s = self._clock()
        results: Sequence[Result | BaseException] | None
        interrupt: BaseException | None = None
        if batch[0].is_joined:
            assert self._joiner is not None
            try:
                results = self._joiner.run([cast(Part, each.part) for each in batch])
            except BaseException as error:  # whose fault it is shows when each runs alone
                results, interrupt = None, None if isinstance(error, Exception) else error
        else:
            try:
                results = [alone()]
            except BaseException as error:  # passed on to the caller
                results = [error]
        with self._changed:
            self._is_taken = self._is_running = False
            self.num_passes += 1
            if results is None:
                for each in batch:
                    each.part, each.is_joined = None, False
                    if not each.is_done:
                        self._waiting.append(each)
            else:
                self._account(batch, began_s)
                for each, result in zip(batch, results, strict=True):
                    each.settle(result)
            self._changed.notify_all()
        if interrupt is not None:  # Ctrl-C, of somebody who runs passes in the main thread
            raise interrupt

    def _account(self, batch: Sequence[_Entry[Part, Result]], began_s: float) -> None:
        ended_s = self._clock()
        taken_s, num_rows = ended_s - began_s, sum(each.num_rows for each in batch)
        num_tokens = sum(each.caller.tokens_per_pass for each in batch)
        if num_rows <= _NARROW_ROWS:
            self._pass_s += (_SHARE if self._pass_s else 1.0) * (taken_s - self._pass_s)
        for each in batch:
            caller = each.caller
            caller.num_rows += each.num_rows
            caller.num_joined += len(batch) > 1
            caller.waited_s += ended_s - each.entered_s - taken_s
            caller.waited_passes += self.num_passes - each.entered_at
            caller.beside = Beside(num_rows - each.num_rows, num_tokens - caller.tokens_per_pass)
            caller.ended_s = ended_s


def _num_rows(entry: _Entry[Any, Any]) -> int:
    """Rows that were run for a caller so far: who has had the fewest has the next turn (fair queueing)."""
    return entry.caller.num_rows
