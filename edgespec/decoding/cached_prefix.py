"""The arithmetic of a KV cache: which positions can be reused, and how far it grows."""

from edgespec.decoding.decoder import Decoder
from edgespec.types import TokenIds


def reusable_prefix(held: TokenIds, tokens: TokenIds, num_last: int) -> int:
    """How many cached positions a call for the logits of the last num_last tokens can reuse.

    The common prefix without the last num_last tokens, which are fed again even when held.
    """
    limit = max(0, min(len(held), len(tokens) - num_last))
    differs = held[:limit] != tokens[:limit]
    return int(differs.argmax()) if differs.any() else limit


def empty_cache(decoder: Decoder, tokens: TokenIds) -> None:
    """Run one token with which tokens do not begin, so that no prefix of tokens stays cached."""
    decoder.logits((tokens[:1] + 1) % decoder.vocab_size, 1)
