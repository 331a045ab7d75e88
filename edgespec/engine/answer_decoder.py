"""The target as one answer sees it: through the cache that the queue has given to the answer."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from edgespec.decoders import Argmax, ArgmaxDecoder, ArgmaxTreeDecoder, Decoder, TreeDecoder
from edgespec.decoding.pass_queue import ForkingDecoder
from edgespec.engine.request_queue import Ticket
from edgespec.engine.target_caches import TargetCaches
from edgespec.errors import Cancelled
from edgespec.types import Logits, TokenIds


class AnswerDecoder:
    """The target as one answer sees it: through the cache that the queue has given it last.

    A decoder is a function of tokens, so an answer that has lost its cache goes on in another one.
    """

    def __init__(self, caches: TargetCaches, target: Decoder, ticket: Ticket, prompt: TokenIds) -> None:
        self._caches, self._ticket, self._prompt = caches, ticket, prompt
        self.vocab_size, self.context_length = target.vocab_size, target.context_length
        self.num_fed = 0  # for this answer
        self._given: int | None = None  # the cache that the last pass ran in
        self._num_committed = 0

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        return self._run(tokens, num_last - 1, "logits", tokens, num_last)  # type: ignore[no-any-return]

    def _run(self, tokens: TokenIds, num_draft: int, name: str, *arguments: Any) -> Any:
        """What a method of the decoder gives that has the answer's cache."""
        num_committed = len(tokens) - num_draft
        decoder = self._decoder(tokens[:num_committed])
        if self._num_committed:
            self._ticket.caller.observe_yield(num_committed - self._num_committed)
        self._num_committed = num_committed
        fed = decoder.num_fed
        try:
            return getattr(decoder, name)(*arguments)
        finally:
            self.num_fed += decoder.num_fed - fed

    def _decoder(self, text: TokenIds) -> Decoder:
        """The decoder that has the answer's cache, which is to hold a text."""
        number = self._ticket.cache
        if number is None:  # it was cancelled before it had one
            raise Cancelled("the answer was cancelled")
        if number != self._given:
            decoder = self._caches.give(number, self._prompt)
            if isinstance(decoder, ForkingDecoder):
                decoder.serve(self._ticket.caller)
            self._given = number
        self._caches.note(number, text)
        found = self._caches.decoder(number)
        if found is None:
            raise Cancelled("the engine was closed")
        return found


class _TreeAnswer(AnswerDecoder):
    """A target that runs trees, as one answer sees it."""

    def tree_logits(
        self, tokens: TokenIds, nodes: TokenIds, parents: Sequence[int], num_last: int | None = None
    ) -> Logits:
        return self._run(tokens, 0, "tree_logits", tokens, nodes, parents, num_last)  # type: ignore[no-any-return]


class _ArgmaxAnswer(AnswerDecoder):
    """A target that finds the likeliest tokens itself, as one answer sees it."""

    has_argmax = True

    def argmax(self, tokens: TokenIds, num_last: int) -> Argmax:
        return self._run(tokens, num_last - 1, "argmax", tokens, num_last)  # type: ignore[no-any-return]


class _ArgmaxTreeAnswer(_ArgmaxAnswer, _TreeAnswer):
    """A target that finds the likeliest tokens of trees too, as one answer sees it."""

    def tree_argmax(self, tokens: TokenIds, nodes: TokenIds, parents: Sequence[int]) -> Argmax:
        return self._run(tokens, 0, "tree_argmax", tokens, nodes, parents)  # type: ignore[no-any-return]


def answer_decoder(caches: TargetCaches, target: Decoder, ticket: Ticket, prompt: TokenIds) -> Decoder:
    """The target for one answer; the target itself where it has one cache."""
    if caches.num_caches == 1:
        return target
    ticket.choose = partial(caches.choose, prompt)
    has_argmax = isinstance(target, ArgmaxDecoder) and target.has_argmax
    if isinstance(target, TreeDecoder):
        has_argmax = has_argmax and isinstance(target, ArgmaxTreeDecoder)
        kind: type[AnswerDecoder] = _ArgmaxTreeAnswer if has_argmax else _TreeAnswer
    else:
        kind = _ArgmaxAnswer if has_argmax else AnswerDecoder
    return kind(caches, target, ticket, prompt)
