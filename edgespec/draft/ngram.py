"""Prompt lookup: drafts copied from where the last tokens occurred before."""

from dataclasses import dataclass

import numpy as np

from edgespec.decoding.tree import NO_DRAFT, Tree
from edgespec.draft.drafter import Drafter, DraftRequest
from edgespec.types import Sampler, TokenIds


@dataclass(frozen=True, slots=True)
class NgramDrafter(Drafter):
    """Copies what followed the longest earlier match of the last tokens, of equally long matches the most recent.

    With min_match=1, `[1, 2, 3, 1, 2]` drafts `[3, 1, 2]` (Saxena, 2023). The bucket of a token is the length of
    its match, which counts the tokens drafted before it.
    """

    min_match: int = 1
    max_match: int = 16
    name: str = "ngram"

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        if not len(tokens) or request.num_tokens < 1:
            return NO_DRAFT
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # where a match of length one ends
        length = min(1, len(ends))
        while length < self.max_match:
            longer = ends[ends >= length]
            longer = longer[tokens[longer - length] == tokens[-1 - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        if length < self.min_match:
            return NO_DRAFT
        guess = tokens[ends[-1] + 1 :][: request.num_tokens]
        buckets = tuple(length_bucket(length + i) for i in range(len(guess)))
        return Tree(guess, buckets, source=self.name)


def length_bucket(length: int) -> int:
    """Match lengths that are accepted about equally often share a bucket: 1, 2, 3–4, 5–8, 9–16, and more."""
    return min((length - 1).bit_length(), 5)
