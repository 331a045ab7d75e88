"""Who drafts now: what memory has room for, less what has failed.

Owns the model drafters: it opens them, lets them go when memory is short, has them opened in the background when
it is back, and parks those at fault. It notes each change once. Knows protocols, and how a drafter is opened only
as a call.
"""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Event, RLock
from time import perf_counter
from typing import TypeVar

import numpy as np

from edgespec.budget import RESERVE_BYTES
from edgespec.cancel import Cancel
from edgespec.clock import Clock
from edgespec.errors import MemoryExhausted
from edgespec.footing import Candidate, Footing, OpenModel, Report
from edgespec.gate import FixedGate, MeasuredGate
from edgespec.headroom import HOST, Room, Rooms, headroom, return_freed
from edgespec.ladder import Bytes, Ladder
from edgespec.opener import Opened, Opener
from edgespec.parking import GuardedDrafter, in_words
from edgespec.speculation import Speculation
from edgespec.timeline import Interval
from edgespec.types import NOTHING, Decoder, Draft, Drafter, Logits, Sampler, TokenIds

# What must stay free of the reserve that was kept at loading.
_WANTED_BYTES = RESERVE_BYTES // 2
# A look at what is free takes 0.25 ms, a pass of a small model 4 ms.
_LOOK_S = 0.1
# What the target takes for so many tokens more is kept free beside.
_SOON_TOKENS = 256
# A pass runs no more than so many beside the text.
_PASS_TOKENS = 64

T = TypeVar("T")


def no_texts(names: frozenset[str]) -> Sequence[Drafter]:
    return ()


@dataclass(slots=True)
class _Seat:
    """Where a candidate drafts, and the candidate while it is open."""

    guard: GuardedDrafter
    model: OpenModel | None


@dataclass(slots=True)
class Roster:
    """The drafters of an engine.

    footings: With the most first; the last is plain decoding.
    vocab_size: Of the target.
    from_text: Makes those of one answer that draft from the text, of names.
    growth_bytes: What the target takes more for a text, by the longest before it and its own length.
    rooms: What is free, by place.
    place: Of the target.
    report: Takes a line for each change, between answers.
    opener: Of models that come back while answers are made.
    """

    footings: Sequence[Footing] = (Footing((), frozenset(), 0),)
    vocab_size: int = 0
    from_text: Callable[[frozenset[str]], Sequence[Drafter]] = no_texts
    growth_bytes: Callable[[int, int], int] = lambda num_held, num_tokens: 0
    rooms: Callable[[], Rooms] = lambda: {HOST: headroom()}
    place: str = HOST
    report: Report = lambda line: None
    clock: Clock = perf_counter
    opener: Opener = field(default_factory=Opener)
    version: int = field(init=False, default=0)  # of who drafts
    _ladder: Ladder = field(init=False)  # what there is memory for
    _position: int = field(init=False, default=0)  # of the footing that drafts: the ladder's once that is open
    _why: str = field(init=False, default="")  # of the ladder's last move
    _seats: dict[Candidate, _Seat] = field(init=False, default_factory=dict)
    _parked: set[str] = field(init=False, default_factory=set)
    _reopened: set[str] = field(init=False, default_factory=set)
    _faults: deque[tuple[str, str]] = field(init=False, default_factory=deque)
    _is_refused: Event = field(init=False, default_factory=Event)
    _num_held: int = field(init=False, default=0)  # tokens of the longest text so far
    _looked_s: float = field(init=False, default=float("-inf"))
    _news: list[str] = field(init=False, default_factory=list)  # for the figures of the next answer that ends
    _untold: list[str] = field(init=False, default_factory=list)  # for the user
    _is_closed: bool = field(init=False, default=False)
    _lock: RLock = field(init=False, default_factory=RLock)

    def __post_init__(self) -> None:
        self._ladder = Ladder([footing.rung for footing in self.footings])

    @property
    def footing(self) -> Footing:
        return self.footings[self._position]

    @property
    def has_models(self) -> bool:
        return bool(self.decoders)

    @property
    def decoders(self) -> dict[str, Decoder]:
        """Of the models that are open, by name."""
        return {each.name: seat.model.decoder for each, seat in self._seats.items() if seat.model}

    def start(self, rooms: Rooms, target: Bytes, news: Sequence[str] = ()) -> None:
        """Open what fits beside the target, for whose bytes room is kept.

        Args:
            news: What was given up for want of memory before.

        Raises:
            EdgeSpecError: A drafter cannot be opened, for another reason than want of memory.
        """
        with self._lock:
            for line in news:
                self._note(line)
            beside = {at: room.free_bytes - target.get(at, 0) for at, room in rooms.items()}
            if self._ladder.start(beside, dict.fromkeys(rooms, RESERVE_BYTES)):
                first = self._ladder.rungs[0].needed
                at = min(beside, key=lambda at: beside[at] - first.get(at, 0))
                sizes = f"{first.get(at, 0) + RESERVE_BYTES >> 20} MiB beside the {target.get(at, 0) >> 20}"
                self._why = f"the first needs {sizes} of the target, and {_free(rooms[at])}"
                self._stand()
            while not self._all_open():
                self._fall("a drafter was refused memory")
                self._vacate()
                self._stand()
            self.tell()

    def drafters(self) -> list[Drafter]:
        """Those of one answer, of this moment."""
        with self._lock:
            texts = map(self._guarded, self.from_text(self.footing.texts))
            seats = (self._seats[model] for model in self.footing.models if model in self._seats)
            models = (seat.guard for seat in seats if seat.model)
            return [each for each in (*texts, *models) if each.name not in self._parked]

    def look(self, num_tokens: int) -> int:
        """Take note of faults and of what is free, with num_tokens of text; the version of who drafts.

        Raises:
            MemoryExhausted: There is no room for what the target needs next, though nothing drafts any more.
        """
        growth_bytes = self.growth_bytes(self._num_held, num_tokens + _SOON_TOKENS)
        if len(self.footings) > 1 or self._faults:
            self._climb_or_fall(growth_bytes)
        if growth_bytes:
            self._expect_growth(num_tokens + _PASS_TOKENS)
        return self.version

    def _climb_or_fall(self, growth_bytes: int) -> None:
        with self._lock:
            self._park()
            if self._is_closed:
                return
            now_s, before = self.clock(), self._ladder.position
            if self._is_refused.is_set():
                self._is_refused.clear()
                self._fall("memory was refused")
            elif growth_bytes or now_s - self._looked_s >= _LOOK_S:
                self._looked_s = now_s
                rooms = self.rooms()
                wanted = {at: _WANTED_BYTES + growth_bytes * (at == self.place) for at in rooms}
                free = {at: room.free_bytes for at, room in rooms.items()}
                if self._ladder.look(free, wanted, now_s) != before:
                    at = min(rooms, key=lambda at: free[at] - wanted[at])
                    self._why = f"{_free(rooms[at])}, and {wanted[at] >> 20} MiB are to be"
            self._follow()

    def _expect_growth(self, num_tokens: int) -> None:
        """Room for what the next pass makes the target's cache grow by, which no system might refuse in time.

        Raises:
            MemoryExhausted: There is none, though nothing drafts any more.
        """
        with self._lock:
            needed_bytes = self.growth_bytes(self._num_held, num_tokens)
            while (room := self.rooms().get(self.place)) and needed_bytes > room.free_bytes:
                if not self.relieve():
                    raise MemoryExhausted(
                        f"{num_tokens} tokens need {needed_bytes >> 20} MiB more of KV cache, and {_free(room)}: "
                        f"{self._num_fitting(num_tokens, room.free_bytes)} tokens fit; use a shorter prompt or "
                        "answer or a smaller model, or raise the limit",
                        needed_bytes=needed_bytes,
                        free_bytes=room.free_bytes,
                    )
            self._num_held = max(self._num_held, num_tokens)

    def _num_fitting(self, num_tokens: int, free_bytes: int) -> int:
        """The longest text below one of num_tokens that the target's cache has room for, or can have."""
        return (
            bisect_right(range(num_tokens), free_bytes, key=lambda num: self.growth_bytes(self._num_held, num)) - 1
        )

    def relieve(self) -> bool:
        """Free memory for a pass of the target that was refused it; whether there was any to free."""
        with self._lock:
            has_ended = self.opener.end()
            if self._ladder.is_at_bottom:
                return has_ended
            self._fall("a pass was refused memory")
            self._follow()
            return True

    def relieved(self, work: Callable[[], T]) -> T:
        """What work gives, begun anew as often as memory can be freed for it.

        Raises:
            MemoryExhausted: There is not enough, though nothing drafts any more.
        """
        while True:
            try:
                return work()
            except MemoryExhausted:
                if not self.relieve():
                    raise

    def narrowed(self, num_draft: int) -> None:
        """A pass over a draft was refused memory, and one without it was not."""
        with self._lock:
            self._note(f"a pass over a draft of {num_draft} tokens was refused memory and run without the draft")
            self._is_refused.set()

    def gate(self, speculation: Speculation) -> "RosterGate":
        """Of one answer."""
        return RosterGate(self, speculation)

    def interrupt(self) -> None:
        """End the drafts that the models are making, from another thread; waits for nothing."""
        for seat in list(self._seats.values()):
            if model := seat.model:
                model.lane.cancel()

    def take_reopened(self) -> set[str]:
        """Names of the models whose caches are empty since this was last asked."""
        with self._lock:
            names, self._reopened = self._reopened, set()
            return names

    def take_intervals(self) -> list[Interval]:
        """When the lanes of the models have worked since this was last asked."""
        with self._lock:
            lanes = [seat.model.lane for seat in self._seats.values() if seat.model]
        return [lane.intervals.popleft() for lane in lanes for _ in range(len(lane.intervals))]

    def take_news(self) -> tuple[str, ...]:
        """What has changed and was in no answer's figures yet."""
        with self._lock:
            self._park()
            news, self._news = tuple(self._news), []
            return news

    def tell(self) -> None:
        """Report what has changed."""
        with self._lock:
            self._park()
            untold, self._untold = self._untold, []
        for line in untold:
            self.report(line)

    def wait(self) -> None:
        """Until what is being opened can join at the next look."""
        self.opener.wait()

    def close(self) -> None:
        """End the work of the models; an answer that is still being made goes on, and opens none again."""
        with self._lock:
            self._is_closed = True
            for seat in self._seats.values():
                if seat.model:
                    seat.model.lane.stop()
            self.opener.close()

    def _guarded(self, drafter: Drafter) -> GuardedDrafter:
        faults = self._faults  # and not this roster, or none of its models were free before garbage is collected
        return GuardedDrafter(drafter, self.vocab_size, lambda *fault: faults.append(fault), self._is_refused.set)

    def _park(self) -> None:
        while self._faults:
            name, reason = self._faults.popleft()
            if name not in self._parked:
                self._parked.add(name)
                self._note(f"{name} drafts no more in this session: {reason}")
                self.version += 1
        for model, seat in list(self._seats.items()):
            if seat.guard.is_parked:
                self._let_go(model)

    def _fall(self, why: str) -> None:
        self._ladder.fall(self.clock())
        self._why = why

    def _follow(self) -> None:
        """Go where the ladder stands: down at once, and up when what drafts there is open."""
        self._aim()
        while (opened := self.opener.take()) is not None:
            self._welcome(opened)
            self._aim()

    def _aim(self) -> None:
        """Let go what has no place any more, begin to open what has one, and stand there if nothing is missing."""
        footing = self.footings[self._ladder.position]
        self._vacate()
        if self.opener.candidate not in footing.models:
            self.opener.give_up()
        missing = [each for each in footing.models if self._is_missing(each)]
        if missing and not self.opener.candidate and not self._is_closed:
            self.opener.begin(missing[0])
        is_worth_it = not footing.models or any(each.name not in self._parked for each in footing.models)
        if self._ladder.position > self._position or (is_worth_it and not missing):
            self._stand()

    def _stand(self) -> None:
        position = self._ladder.position
        if position != self._position:
            way = "down" if position > self._position else "up"
            before, after = self.footings[self._position].name, self.footings[position].name
            self._note(f"drafting steps {way} from {before} to {after}: {self._why}")
            self._position = position
            self.version += 1

    def _is_missing(self, candidate: Candidate) -> bool:
        seat = self._seats.get(candidate)
        return candidate.name not in self._parked and not (seat and seat.model)

    def _vacate(self) -> None:
        """Let go the models that do not draft where the ladder stands."""
        for model in list(self._seats):
            if model not in self.footings[self._ladder.position].models:
                self._let_go(model)

    def _let_go(self, model: Candidate) -> None:
        """Free a model: nobody else holds it."""
        seat = self._seats[model]
        if seat.model:
            seat.guard.take()
            seat.model.lane.stop()
            seat.model = None
            self.version += 1
            return_freed()

    def _all_open(self) -> bool:
        """Open the models of where the ladder stands; False if one was refused memory."""
        for candidate in self.footings[self._ladder.position].models:
            if not self._is_missing(candidate):
                continue
            try:
                self._seat(candidate, candidate.open(Cancel(), self.report))
            except MemoryExhausted:
                return_freed()
                return False
        return True

    def _welcome(self, opened: Opened) -> None:
        """Give what is open its seat; what was refused memory, or is at fault, has none."""
        candidate, model, error, lines = opened
        if model is not None:
            if candidate not in self._seats:
                self._untold += lines
            self._seat(candidate, model)
        elif isinstance(error, MemoryExhausted):
            return_freed()
            self._fall("a drafter was refused memory")
        elif error is not None:
            self._faults.append((candidate.name, in_words(error)))
            self._park()

    def _seat(self, candidate: Candidate, model: OpenModel) -> None:
        seat = self._seats.get(candidate)
        if seat is None:
            self._seats[candidate] = _Seat(self._guarded(model.drafter), model)
        else:
            seat.guard.give(model.drafter)
            seat.model = model
            self._reopened.add(candidate.name)
        self.version += 1

    def _note(self, line: str) -> None:
        self._news.append(line)
        self._untold.append(line)


def _free(room: Room) -> str:
    return f"{max(0, room.free_bytes) >> 20} MiB are free within {room.bound}"


@dataclass(slots=True)
class RosterGate:
    """The gate of one answer, made anew from what was learned whenever another drafts.

    undrafted: Why passes had no draft, and how many.
    """

    roster: Roster
    speculation: Speculation
    undrafted: Counter[str] = field(init=False, default_factory=Counter)
    _inner: FixedGate | MeasuredGate = field(init=False)
    _version: int = field(init=False)
    _drafted: Draft = field(init=False, default=NOTHING)

    def __post_init__(self) -> None:
        self._version = self.roster.version
        self._inner = self.speculation.gate()

    def draft(self, tokens: TokenIds, room: int, sampler: Sampler) -> Draft:
        version = self.roster.look(len(tokens))
        if version != self._version:
            self._version = version
            self.close()
            for name in self.roster.take_reopened() & self.speculation.paid.keys():
                self.speculation.paid[name].read = np.zeros(0, np.int32)
            self._inner = self.speculation.gate()
        self._drafted = self._inner.draft(tokens, room, sampler)
        if not len(self._drafted.tokens):
            self.undrafted[self._inner.reason] += 1
        return self._drafted

    def observe(self, tokens: TokenIds, draft: Draft, logits: Logits, emitted: TokenIds, verify_s: float) -> None:
        if len(draft.tokens) < len(self._drafted.tokens):
            self.roster.narrowed(len(self._drafted.tokens))
        self._inner.observe(tokens, draft, logits, emitted, verify_s)

    def close(self) -> None:
        """Keep what was learned, and let the lanes rest."""
        self._inner.close()
        self.speculation.keep(self._inner)
