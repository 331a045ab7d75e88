"""The target as one answer sees it: through the cache that the queue has given to the answer."""

from functools import partial

from edgespec.decoders import Can, Decoder, Pass, Rows
from edgespec.engine.request_queue import Ticket
from edgespec.engine.target_caches import TargetCaches
from edgespec.errors import Cancelled
from edgespec.types import TokenIds


class AnswerDecoder(Decoder):
    """The target as one answer sees it: through the cache that the queue has given it last.

    A decoder is a function of tokens, so an answer that has lost its cache goes on in another one.
    """

    num_fed = 0  # for this answer

    def __init__(self, caches: TargetCaches, target: Decoder, ticket: Ticket, prompt: TokenIds) -> None:
        self._caches, self._ticket, self._prompt = caches, ticket, prompt
        self.vocab_size, self.context_length = target.vocab_size, target.context_length
        self._can = target.can
        self._given: int | None = None  # the cache that the last pass ran in
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
        if number != self._given:
            decoder = self._caches.give(number, self._prompt)
            if decoder.forks:
                decoder.forks.serve(self._ticket.caller)
            self._given = number
        self._caches.note(number, text)
        found = self._caches.decoder(number)
        if found is None:
            raise Cancelled("the engine was closed")
        return found


def answer_decoder(caches: TargetCaches, target: Decoder, ticket: Ticket, prompt: TokenIds) -> Decoder:
    """The target for one answer; the target itself where it has one cache."""
    if caches.num_caches == 1:
        return target
    ticket.choose = partial(caches.choose, prompt)
    return AnswerDecoder(caches, target, ticket, prompt)
