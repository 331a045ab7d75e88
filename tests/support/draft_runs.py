"""Drafts of decoders that are made for drafting."""

import numpy as np

from edgespec.decoding.decoder import Decoder
from edgespec.types import Logits, TokenIds, append


def draft_greedily(decoder: Decoder, text: TokenIds, num_tokens: int) -> tuple[Logits, TokenIds]:
    """The rows of a draft behind a text, [num_tokens, vocab_size], and its tokens, the likeliest of each."""
    assert decoder.begin(text, 99)
    rows: list[Logits] = []
    tokens = text
    for _ in range(num_tokens):
        rows.append(decoder.logits(tokens, 1)[0].copy())
        tokens = append(tokens, [int(rows[-1].argmax())])
    return np.stack(rows), tokens[len(text) :]
