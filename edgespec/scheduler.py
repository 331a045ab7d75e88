"""Loops of drafting and verifying, as generators of blocks; a caller stops one by closing it.

Knows protocols, not models: no tokenizer, no stop rules, no runtime.
"""

from collections.abc import Callable, Generator
from time import perf_counter
from typing import NamedTuple, Protocol

from edgespec.acceptance import equality
from edgespec.clock import Clock
from edgespec.errors import MemoryExhausted
from edgespec.types import NOTHING, Acceptance, Decoder, Draft, Logits, Sampler, TokenIds, TreeDecoder, append


class Gate(Protocol):
    """Who drafts, and how much."""

    def draft(self, tokens: TokenIds, room: int, sampler: Sampler) -> Draft:
        """A guess of at most room tokens; an empty one is plain decoding."""
        ...

    def observe(self, tokens: TokenIds, draft: Draft, logits: Logits, emitted: TokenIds, verify_s: float) -> None:
        """What the pass over a draft showed, yielded and took."""
        ...

    def close(self) -> None:
        """The answer is over."""
        ...


class Plain:
    """Never a guess."""

    def draft(self, tokens: TokenIds, room: int, sampler: Sampler) -> Draft:
        return NOTHING

    def observe(self, tokens: TokenIds, draft: Draft, logits: Logits, emitted: TokenIds, verify_s: float) -> None:
        pass

    def close(self) -> None:
        pass


class Block(NamedTuple):
    """What one pass of the target yielded: tokens, [1 … num_draft + 1], the last of them its own.

    logits are the target's, [num_draft + 1, vocab_size], until its next pass.
    """

    tokens: TokenIds
    draft: Draft
    logits: Logits
    draft_s: float
    verify_s: float
    started_s: float = 0.0  # when the pass began, by the clock

    @property
    def num_draft(self) -> int:
        return len(self.draft.tokens)

    @property
    def num_accepted(self) -> int:
        return len(self.tokens) - 1


def serial(
    tokens: TokenIds,
    target: Decoder,
    sampler: Sampler,
    gate: Gate,
    accept: Acceptance = equality,
    max_tokens: int | None = None,
    clock: Clock = perf_counter,
    relieve: Callable[[], bool] = lambda: False,
) -> Generator[Block, None, None]:
    """Draft, verify, repeat, until the context is full; never drafts beyond max_tokens.

    A pass that is refused memory is run without its draft, and once more whenever relieve says that it has freed
    some.

    Raises:
        ContextOverflow: The prompt alone does not fit.
        MemoryExhausted: Not even a pass without a draft is given memory.
    """
    num_prompt = len(tokens)
    # A pass over the whole context still gives the token that follows it.
    end = target.context_length if max_tokens is None else min(target.context_length, num_prompt + max_tokens - 1)
    try:
        while True:
            started = clock()
            draft = gate.draft(tokens, max(0, end - len(tokens)), sampler)
            drafted = clock()
            draft, logits = _verified(target, tokens, draft, relieve)
            emitted = accept(tokens, draft, logits, sampler)
            verified = clock()
            gate.observe(tokens, draft, logits, emitted, verified - drafted)
            draft_s = drafted - started + clock() - verified
            tokens = append(tokens, emitted)
            yield Block(emitted, draft, logits, draft_s, verified - drafted, drafted)
            if len(tokens) > target.context_length:
                return
    finally:
        gate.close()


def _verified(
    target: Decoder, tokens: TokenIds, draft: Draft, relieve: Callable[[], bool]
) -> tuple[Draft, Logits]:
    """The draft that memory was there for, which is all or nothing, and what _verify gives of it."""
    while True:
        try:
            return draft, _verify(target, tokens, draft)
        except MemoryExhausted:
            if not len(draft.tokens) and not relieve():
                raise
            draft = NOTHING


def _verify(target: Decoder, tokens: TokenIds, draft: Draft) -> Logits:
    """Logits behind the last committed token and behind each drafted one, [num_draft + 1, vocab_size]."""
    if not len(draft.tokens):
        return target.logits(tokens, 1)
    if draft.parents is None:
        return target.logits(append(tokens, draft.tokens), len(draft.tokens) + 1)
    assert isinstance(target, TreeDecoder)
    return target.tree_logits(tokens, draft.tokens, draft.parents)
