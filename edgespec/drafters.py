"""Sources of guesses: the text itself, a small model."""

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

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


class Guess(NamedTuple):
    """A drafted token.

    probability: The drafter's own, where a floor was asked for.
    distribution: What it was drawn from, where that was asked for.
    after: Of those drafted since, which it follows; -1 for the text.
    """

    token: int
    probability: float = 1.0
    distribution: Distribution | None = None
    after: int = -1


def drafted(guesses: Sequence[Guess], ask: Ask, source: str) -> Draft:
    """Guesses, each behind the one before it, as a draft of as many as were asked for."""
    guesses = guesses[: ask.num_tokens]
    distributions = tuple(guess.distribution for guess in guesses if guess.distribution is not None)
    return Draft(
        np.array([guess.token for guess in guesses], np.int32),
        tuple(map(position_class, range(len(guesses)))),
        distributions=distributions if ask.with_distributions else None,
        source=source,
    )


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
        reached, made = 1.0, []
        with closing(self.guesses(tokens, ask, sampler)) as guesses:
            for guess in guesses:
                made.append(guess)
                reached *= guess.probability
                if reached < ask.floor or ask.cancel.is_set():
                    break
        return drafted(made, ask, self.name)

    def guesses(self, tokens: TokenIds, ask: Ask, sampler: Sampler) -> Generator[Guess, None, None]:
        """One after the other, ask.num_tokens of them at most; of those that one pass gives, each comes alone."""
        num_tokens = min(ask.num_tokens, self.decoder.context_length - len(tokens))
        own = _Trimmed(self.decoder, self.vocab_size)
        gate: Gate = self.speculation.gate() if self.speculation else Plain()
        text = tokens
        try:
            for block in serial(tokens, own, sampler, gate, max_tokens=num_tokens):
                for token, row in zip(block.tokens, block.logits, strict=False):
                    yield Guess(
                        int(token),
                        _probability(row, int(token)) if ask.floor else 1.0,
                        sampler.distribution(row, text) if ask.with_distributions else None,
                    )
                    text = np.append(text, token)
                    if len(text) - len(tokens) >= num_tokens:
                        return
        finally:
            if self.speculation:
                self.speculation.keep(gate)

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
