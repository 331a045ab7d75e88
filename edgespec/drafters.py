"""Sources of guesses: nothing, the text itself, a small model, or the first of several that has one."""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event

import numpy as np

from edgespec.types import Decoder, Drafter, Sampler, TokenIds, append


@dataclass(frozen=True, slots=True)
class NoDrafter:
    """Plain decoding: never a guess."""

    name: str = "none"

    def draft(self, tokens: TokenIds, num_tokens: int, sampler: Sampler, cancel: Event) -> TokenIds:
        return tokens[:0]


@dataclass(frozen=True, slots=True)
class NgramDrafter:
    """What followed the longest earlier match of the last tokens; of equal ones, the most recent.

    With min_match=1, `[1, 2, 3, 1, 2]` drafts `[3, 1, 2]`. Prompt lookup decoding (Saxena, 2023).
    """

    min_match: int = 2
    max_match: int = 16
    name: str = "ngram"

    def draft(self, tokens: TokenIds, num_tokens: int, sampler: Sampler, cancel: Event) -> TokenIds:
        if not len(tokens):
            return tokens
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # where a match of length one ends
        length = min(1, len(ends))
        while length < self.max_match:
            longer = ends[ends >= length]
            longer = longer[tokens[longer - length] == tokens[-1 - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        if length < self.min_match:
            return tokens[:0]
        return tokens[ends[-1] + 1 :][:num_tokens]


@dataclass(frozen=True, slots=True)
class ModelDrafter:
    """A small model, decoded token by token with the target's own sampler and noise.

    vocab_size is the target's: a drafter padded to more rows never proposes one of those, and is silent where
    the text holds a token that it does not know.
    """

    decoder: Decoder
    vocab_size: int
    name: str = "model"

    def draft(self, tokens: TokenIds, num_tokens: int, sampler: Sampler, cancel: Event) -> TokenIds:
        if len(tokens) and int(tokens.max()) >= self.decoder.vocab_size:
            return tokens[:0]
        context = tokens
        room = self.decoder.context_length - len(tokens)
        for _ in range(min(num_tokens, room)):
            if cancel.is_set():
                break
            row = self.decoder.logits(context, 1)[0, : self.vocab_size]
            context = append(context, [sampler(row, context)])
        return context[len(tokens) :]


@dataclass(frozen=True, slots=True)
class FirstOf:
    """Drafters in order; the first that has a guess is heard."""

    drafters: Sequence[Drafter]

    @property
    def name(self) -> str:
        return "+".join(drafter.name for drafter in self.drafters)

    def draft(self, tokens: TokenIds, num_tokens: int, sampler: Sampler, cancel: Event) -> TokenIds:
        for drafter in self.drafters:
            guess = drafter.draft(tokens, num_tokens, sampler, cancel)
            if len(guess):
                return guess
        return tokens[:0]
