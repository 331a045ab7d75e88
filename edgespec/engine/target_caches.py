"""The caches of a target, each of which serves one answer at a time, and the target as an answer sees it.

Several engines may share them.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from threading import Lock
from weakref import ref

import numpy as np

from edgespec.decoding.decoder import Can, Decoder, Pass, Room, Rows, reusable_prefix
from edgespec.decoding.tree import NO_DRAFT
from edgespec.draft.pool import DrafterPool
from edgespec.engine.run_ahead import RequestQueue, Ticket
from edgespec.errors import Cancelled, MemoryExhausted
from edgespec.types import TokenIds

# Fewer tokens than these are read again: to copy them is a call for each layer, to keep them a cache.
_LEAST_COPIED = 16


@dataclass(slots=True)
class _HeldText:
    """The text that a cache holds or is to hold, when it was last used, and whether it may have memory."""

    text: TokenIds = field(default_factory=lambda: np.zeros(0, np.int32))
    used_at: int = -1
    has_memory: bool = False


class TargetCaches:
    """A target and its forks, which are made when answers need them, and the queue of answers that wait for one.

    A text stays in its cache until another one takes that cache, so that a text which goes on is not read again,
    and several texts may go on by turns. Drafter models draft for the first cache: an answer has that one wherever
    it is free, and what it held then moves to another.
    """

    def __init__(
        self,
        target: Decoder,
        num_caches: int = 1,
        may_join: Room = lambda: nullcontext(True),
        report_exchange: Callable[[int, int], None] = lambda number, other: None,
        report_freed: Callable[[int], None] = lambda number: None,
    ) -> None:
        """Make no fork yet.

        Args:
            num_caches: How many answers may be made at once; 1 where the target has no forks.
            may_join: Keeps memory for what passes of several answers take.
            report_exchange: Takes the numbers of caches that exchange what they hold, once that is decided.
            report_freed: Takes the number of a cache that has no memory any more.
        """
        self.num_caches = num_caches if target.forks else 1
        self.queue = RequestQueue(num_caches=self.num_caches)
        self._can_exchange = target.forks is not None and target.forks.can_exchange
        self._may_join = may_join
        self._decoders = [target]  # as many as were needed so far
        self._slots = [_HeldText(has_memory=True)]  # at least as many
        self._num_uses = [0] * self.num_caches  # how often each was given to an answer, or exchanged
        self._exchanges: list[tuple[int, int]] = []  # of caches, which their decoders have yet to do
        self._report_exchange, self._report_freed = report_exchange, report_freed
        self._clock = count()
        self._lock = Lock()

    def choose(self, prompt: TokenIds, free: Sequence[int]) -> int:
        """A cache for a prompt: one whose text the prompt goes on, else a new one, else the longest unused one.

        Where caches can be exchanged, what it holds comes to the first cache instead, if that is free.
        """
        with self._lock:
            source = self._choose_text(prompt, free)
            while source >= len(self._slots):
                self._slots.append(_HeldText())
            number = min(free) if self._can_exchange and min(free) == 0 else source
            if number != source:
                self._exchanges.append((number, source))
                self._slots[number], self._slots[source] = self._slots[source], self._slots[number]
                self._report_exchange(number, source)
            self._slots[number].used_at = next(self._clock)
            return number

    def _choose_text(self, prompt: TokenIds, free: Sequence[int]) -> int:
        """The cache whose text a prompt goes on, or may be overwritten."""
        made = [number for number in free if number < len(self._slots)]
        if not made:
            return min(free)
        best = max(made, key=lambda number: reusable_prefix(self._slots[number].text, prompt, 0))
        num_held = len(self._slots[best].text)
        if num_held and 2 * reusable_prefix(self._slots[best].text, prompt, 0) >= num_held:
            return best
        worth_keeping = [number for number in made if len(self._slots[number].text) >= _LEAST_COPIED]
        if self._can_exchange and len(worth_keeping) < len(made):
            return min(number for number in made if number not in worth_keeping)
        if self._can_exchange and len(made) < len(free):
            return min(number for number in free if number not in made)
        return min(made, key=lambda number: self._slots[number].used_at)

    def give(self, number: int, prompt: TokenIds) -> Decoder:
        """The decoder of a cache that an answer was given, with as much of the prompt as another cache holds."""
        with self._lock:
            decoder = self._take(number)
            num_own = reusable_prefix(self._slots[number].text, prompt, 1)
            source, num_tokens, num_uses = self._find_source(number, prompt)
        if num_tokens >= num_own + _LEAST_COPIED and decoder.forks:
            has_copied = decoder.forks.copy_prefix(self._decoders[source], prompt[:num_tokens])
            with self._lock:
                # What was copied counts only if its answer had the cache all the while.
                is_same = num_uses == self._num_uses[source]
            if has_copied and not is_same and decoder.cache:
                decoder.cache.forget()
        return decoder

    def _exchange(self) -> None:
        """Exchange what decoders hold, as was decided when their caches were chosen: no answer had these then."""
        while self._exchanges:
            number, other = self._exchanges.pop(0)
            try:
                self._make(max(number, other))
            except MemoryExhausted:  # the text that was to move is overwritten
                self._slots[other] = _HeldText()
                self._report_freed(other)
                continue
            ours, theirs = self._decoders[number].forks, self._decoders[other]
            assert ours is not None
            ours.exchange(theirs)
            for each in (number, other):
                self._num_uses[each] += 1

    def _make(self, number: int) -> None:
        while number >= len(self._decoders):
            target = self._decoders[0].forks
            assert target is not None
            target.share(self.num_caches, self._may_join)
            self._decoders.append(target.fork())
        while number >= len(self._slots):
            self._slots.append(_HeldText())

    def note(self, number: int, text: TokenIds) -> None:
        """Record the text that a cache is to hold from now on."""
        self._slots[number].text = text

    def open(self, number: int) -> Decoder:
        """The decoder of a cache that no answer has; it is made if it was not needed so far."""
        with self._lock:
            return self._take(number)

    def _take(self, number: int) -> Decoder:
        """The decoder of a cache from now on in use, made if need be. Raises Cancelled: All were let go."""
        if not self._decoders:
            raise Cancelled("the engine was closed")
        self._exchange()
        self._make(number)
        self._slots[number].has_memory = True
        self._num_uses[number] += 1
        return self._decoders[number]

    def hold(self, number: int, text: TokenIds) -> None:
        """Record that a cache, which no answer has, was filled with a text."""
        with self._lock:
            self._slots[number] = _HeldText(text, next(self._clock), has_memory=True)

    def texts(self) -> dict[int, TokenIds]:
        """The tokens in each cache that no answer has, by its number, those of the longest unused cache first."""
        with self._lock:
            self._exchange()
            numbers = sorted(range(len(self._decoders)), key=lambda number: self._slots[number].used_at)
            held = {number: _held_tokens(self._decoders[number]) for number in numbers}
        return {number: text for number, text in held.items() if len(text) and not self.queue.is_held(number)}

    def watch_reading(self, ticket: Ticket, prompt: TokenIds, decoder: Decoder) -> Callable[[], int]:
        """Tells how many tokens of an answer's prompt a cache holds by now; keeps no model alive.

        decoder: That of the answer. What it runs counts where a cache does not say what it holds.
        """
        fed, running = decoder.num_fed, ref(decoder)

        def num_read() -> int:
            own, held = running(), None if ticket.cache is None else self.decoder(ticket.cache)
            if held is None:
                return 0
            num_run = own.num_fed - fed if own else 0
            return reusable_prefix(_held_tokens(held), prompt, 0) or min(num_run, len(prompt))

        return num_read

    @property
    def decoders(self) -> Sequence[Decoder]:
        """The decoders of all caches made so far; the sequence grows when another cache is made."""
        return self._decoders

    def decoder(self, number: int) -> Decoder | None:
        """The decoder of a cache; None once all were let go."""
        return self._decoders[number] if number < len(self._decoders) else None

    def grow(self, number: int, num_tokens: int) -> None:
        """Take the memory for a text of so many tokens in the cache of an answer. Raises MemoryExhausted."""
        with self._lock:
            if not self._decoders:
                return  # the engine was closed, as the next pass says
            self._exchange()
            self._make(number)
            self._slots[number].has_memory = True
            cache = self._decoders[number].cache
        if cache:
            cache.reserve(num_tokens)

    def give_up(self, first: int = 0) -> bool:
        """Free the memory of the longest unused cache that no answer has; returns False if there is none.

        first: The first number that may be it.
        """
        now = next(self._clock)  # a cache that is chosen from then on is left alone
        free = [number for number in range(first, self.num_caches) if not self.queue.is_held(number)]
        with self._lock:
            self._exchange()
            idle = [
                number
                for number, (decoder, slot) in enumerate(zip(self._decoders, self._slots, strict=False))
                if number in free and decoder.cache and slot.has_memory and slot.used_at < now
            ]
            if not idle:
                return False
            number = min(idle, key=lambda number: self._slots[number].used_at)
            self._slots[number] = _HeldText()
            self._report_freed(number)
            decoder = self._decoders[number]
            assert decoder.cache
            decoder.cache.forget()  # before an answer can choose it
        if decoder.forks:
            decoder.forks.let_go(is_whole=False)
        return True

    def take_turns(self) -> bool:
        """Free what passes of several answers as one take; returns whether they ran as one."""
        forks = self._decoders[0].forks if self._decoders else None
        return forks is not None and forks.let_go(is_whole=True)

    def forget(self) -> None:
        """Reuse nothing of the texts that no answer makes; the first cache keeps its memory."""
        while self.give_up(first=1):
            pass
        if not self.queue.is_held(0):
            self._slots[0].text = self._slots[0].text[:0]

    def close(self) -> None:
        """Let all decoders go."""
        with self._lock:
            self._decoders = []

    def _find_source(self, number: int, prompt: TokenIds) -> tuple[int, int, int]:
        """The other cache that holds most of a prompt, how many tokens that are, and how often it was given.

        A cache holds them, and will go on holding them, as its text begins with them.
        """
        num_tokens, source = 0, number
        for at, decoder in enumerate(self._decoders):
            texts = _held_tokens(decoder), self._slots[at].text
            if at != number and (num := min(reusable_prefix(text, prompt, 1) for text in texts)) >= num_tokens:
                num_tokens, source = num, at
        return source, num_tokens, self._num_uses[source]


def _held_tokens(decoder: Decoder) -> TokenIds:
    return decoder.cache.held_tokens if decoder.cache else NO_DRAFT.tokens


class AnswerDecoder(Decoder):
    """The target as one answer sees it: through the cache that the queue has given it last.

    A decoder is a function of tokens, so an answer that has lost its cache goes on in another one.
    """

    num_fed = 0  # for this answer

    def __init__(self, caches: TargetCaches, target: Decoder, ticket: Ticket, prompt: TokenIds) -> None:
        """Have the queue choose its cache by a prompt, which is to be answered."""
        self._caches, self._ticket, self._prompt = caches, ticket, prompt
        ticket.choose = partial(caches.choose, prompt)
        self.vocab_size, self.context_length = target.vocab_size, target.context_length
        self._can = target.can
        self._num_given = 0  # how often it had been given a cache at the last pass
        self._num_committed = 0

    @property
    def can(self) -> Can:
        return self._can

    def run(self, given: Pass) -> Rows:
        num_committed = len(given.text)
        decoder = self._decoder(given.text)
        if self._num_committed:
            self._ticket.caller.observe_yield(num_committed - self._num_committed)
        self._num_committed = num_committed
        fed = decoder.num_fed
        try:
            return decoder.run(given)
        finally:
            self.num_fed += decoder.num_fed - fed

    def _decoder(self, text: TokenIds) -> Decoder:
        """The decoder that has the answer's cache, which is to hold a text."""
        number = self._ticket.cache
        if number is None:  # it was cancelled before it had one
            raise Cancelled("the answer was cancelled")
        if self._ticket.num_given != self._num_given:  # the same one too: others may have had it meanwhile
            self._caches.give(number, self._prompt)
            self._num_given = self._ticket.num_given
        self._caches.note(number, text)
        found = self._caches.decoder(number)
        if found is None:
            raise Cancelled("the engine was closed")
        if found.forks:
            found.forks.serve(self._ticket.caller)  # which tells it when a pass begins
        else:
            self._ticket.caller.on_begin()
        return found


def interrupt(decoders: Sequence[Decoder], pool: DrafterPool, weak: "ref[Ticket]") -> None:
    """End the pass and the drafts that are being made for an answer, from another thread.

    Args:
        decoders: Of the target's caches, which an answer may still use when its engine has let them go.
        weak: The answer, which has this call.
    """
    ticket = weak()
    if ticket is None or ticket.cache is None:
        return
    if ticket.cache < len(decoders):
        decoders[ticket.cache].interrupt()
    if ticket.cache == 0:  # drafter models draft for the answer in the first cache
        pool.interrupt()
