"""Sources of guesses: the text itself, a small model."""

from dataclasses import dataclass

import numpy as np

from edgespec.chances import position_class
from edgespec.scheduler import Gate, Plain, serial
from edgespec.speculation import Speculation
from edgespec.types import NOTHING, Ask, Decoder, Distribution, Draft, Logits, Row, Sampler, TokenIds


@dataclass(frozen=True, slots=True)
class NgramDrafter:
    """What followed the longest earlier match of the last tokens; of equal ones, the most recent.

    With min_match=1, `[1, 2, 3, 1, 2]` drafts `[3, 1, 2]`. Prompt lookup decoding (Saxena, 2023). The evidence
    for a token is how long its match is, the tokens drafted before it counted in.
    """

    min_match: int = 1
    max_match: int = 16
    name: str = "ngram"
    is_free: bool = True

    def draft(self, tokens: TokenIds, ask: Ask, sampler: Sampler) -> Draft:
        if not len(tokens) or ask.num_tokens < 1:
            return NOTHING
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # where a match of length one ends
        length = min(1, len(ends))
        while length < self.max_match:
            longer = ends[ends >= length]
            longer = longer[tokens[longer - length] == tokens[-1 - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        if length < self.min_match:
            return NOTHING
        guess = tokens[ends[-1] + 1 :][: ask.num_tokens]
        evidence = tuple(length_class(length + i) for i in range(len(guess)))
        return Draft(guess, evidence, source=self.name)

    def learn(self, tokens: TokenIds, draft: Draft, logits: Logits) -> None:
        pass


def length_class(length: int) -> int:
    """Lengths of matches that foretell about the same: 1, 2, 3–4, 5–8, 9–16, and more."""
    return min((length - 1).bit_length(), 5)


@dataclass(frozen=True, slots=True)
class ModelDrafter:
    """A small model, which decodes with the target's own sampler and noise.

    It is decoded by the same loop as a target, so that it may have drafters of its own: a cascade is a drafter
    with a speculation of its own. It stops where the product of its own probabilities falls below what was asked
    for; a token is never dropped for its own improbability, which would bias rejection sampling.

    vocab_size is the target's: a drafter padded to more rows never proposes one of those, and is silent where
    the text holds a token that it does not know.
    """

    decoder: Decoder
    vocab_size: int
    name: str = "model"
    speculation: Speculation | None = None
    is_free: bool = False

    def draft(self, tokens: TokenIds, ask: Ask, sampler: Sampler) -> Draft:
        knows_all = not len(tokens) or int(tokens.max()) < self.decoder.vocab_size
        room = self.decoder.context_length - len(tokens)
        if not knows_all or min(ask.num_tokens, room) < 1 or ask.cancel.is_set():
            return NOTHING
        own = _Trimmed(self.decoder, self.vocab_size)
        guess: list[int] = []
        distributions: list[Distribution] = []
        reached = 1.0
        gate: Gate = self.speculation.gate() if self.speculation else Plain()
        for block in serial(tokens, own, sampler, gate, max_tokens=min(ask.num_tokens, room)):
            for token, row in zip(block.tokens, block.logits, strict=False):
                if ask.with_distributions:
                    distributions.append(sampler.distribution(row, np.append(tokens, np.array(guess, np.int32))))
                guess.append(int(token))
                if ask.floor:
                    reached *= _probability(row, int(token))
            is_enough = len(guess) >= min(ask.num_tokens, room) or reached < ask.floor
            if is_enough or ask.cancel.is_set():
                break
        if self.speculation:
            self.speculation.keep(gate)
        evidence = tuple(map(position_class, range(len(guess))))
        return Draft(
            np.array(guess, np.int32),
            evidence,
            distributions=tuple(distributions) if ask.with_distributions else None,
            source=self.name,
        )

    def learn(self, tokens: TokenIds, draft: Draft, logits: Logits) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Trimmed:
    """A decoder without the rows that pad its vocabulary."""

    decoder: Decoder
    vocab_size: int

    @property
    def context_length(self) -> int:
        return self.decoder.context_length

    @property
    def num_fed(self) -> int:
        return self.decoder.num_fed

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        return self.decoder.logits(tokens, num_last)[:, : self.vocab_size]


def _probability(row: Row, token: int) -> float:
    return float(1.0 / np.exp(row - row[token]).sum())
