"""Loops of drafting and verifying, as generators of blocks; a caller stops one by closing it.

Knows protocols, not models: no tokenizer, no stop rules, no runtime.
"""

from collections.abc import Iterator
from threading import Event
from time import perf_counter
from typing import NamedTuple

from edgespec.acceptance import accept
from edgespec.draft_length import DraftLength
from edgespec.types import Decoder, Drafter, Sampler, TokenIds, append


class Block(NamedTuple):
    """What one pass of the target yielded: tokens, [1 … num_draft + 1], the last of them its own."""

    tokens: TokenIds
    num_draft: int
    draft_s: float
    verify_s: float

    @property
    def num_accepted(self) -> int:
        return len(self.tokens) - 1


def serial(
    tokens: TokenIds, drafter: Drafter, target: Decoder, sampler: Sampler, draft_length: DraftLength
) -> Iterator[Block]:
    """Draft, verify, repeat, until the context is full.

    Raises:
        ContextOverflow: The prompt alone does not fit.
    """
    never = Event()
    while True:
        started = perf_counter()
        # A pass over the whole context still gives the token that follows it.
        room = target.context_length - len(tokens)
        num_tokens = min(draft_length.choose(), room)
        draft = drafter.draft(tokens, num_tokens, sampler, never) if num_tokens > 0 else tokens[:0]
        drafted = perf_counter()
        sequence = append(tokens, draft) if len(draft) else tokens
        logits = target.logits(sequence, len(draft) + 1)
        emitted = accept(sequence, len(draft), logits, sampler)
        block = Block(emitted, len(draft), drafted - started, perf_counter() - drafted)
        draft_length.observe(block.num_draft, block.num_accepted, block.draft_s, block.verify_s)
        tokens = append(tokens, emitted)
        yield block
        if len(tokens) > target.context_length:
            return
