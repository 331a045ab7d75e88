"""Sources of guesses: the text itself, a small model."""

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from edgespec import trees
from edgespec.acceptance import equality
from edgespec.chances import position_class
from edgespec.scheduler import Gate, Plain, serial
from edgespec.speculation import Speculation
from edgespec.types import (
    NOTHING,
    Acceptance,
    Ask,
    Decoder,
    Distribution,
    Draft,
    Interruptible,
    Logits,
    Row,
    Sampler,
    TokenIds,
    TreeDecoder,
    append,
)


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
    others: What would have been drafted in its place, the likeliest first, as far as that was asked for.
    after: Of those drafted since, which it follows; -1 for the text.
    """

    token: int
    probability: float = 1.0
    distribution: Distribution | None = None
    others: tuple[int, ...] = ()
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
        if ask.num_tokens < 1 or not self.knows(tokens) or ask.cancel.is_set():
            return NOTHING
        reached, made = 1.0, []
        with closing(self.guesses(tokens, ask, sampler)) as guesses:
            for guess in guesses:
                made.append(guess)
                reached *= guess.probability
                if reached < ask.floor or ask.cancel.is_set():
                    break
        return drafted(made, ask, self.name)

    def knows(self, tokens: TokenIds) -> bool:
        """It has all of a text's tokens, and room for one more."""
        is_known = not len(tokens) or int(tokens.max()) < self.decoder.vocab_size
        return is_known and len(tokens) < self.decoder.context_length

    def guesses(self, tokens: TokenIds, ask: Ask, sampler: Sampler) -> Generator[Guess, None, None]:
        """One after the other, ask.num_tokens of them at most; of those that one pass gives, each comes alone."""
        num_tokens = min(ask.num_tokens, self.decoder.context_length - len(tokens))
        own = _Trimmed(self.decoder, self.vocab_size)
        gate: Gate = self.speculation.gate() if self.speculation else Plain()
        told: list[Distribution] = []
        accept = _telling(told) if ask.with_distributions else equality
        text = tokens
        try:
            for block in serial(tokens, own, sampler, gate, accept, num_tokens):
                for token, row in zip(block.tokens, block.logits, strict=False):
                    q = told[len(text) - len(tokens)] if told else None
                    yield _guess(row, int(token), q, text, ask, sampler)
                    text = append(text, [token])
                    if len(text) - len(tokens) >= num_tokens:
                        return
        finally:
            if self.speculation:
                self.speculation.keep(gate)

    def tree_guesses(
        self, tokens: TokenIds, tree: Sequence[Guess], tips: Sequence[int], ask: Ask, sampler: Sampler
    ) -> list[Guess]:
        """What follows each of some nodes of a tree behind tokens, from one pass of a decoder of trees."""
        assert isinstance(self.decoder, TreeDecoder)
        nodes, parents = np.array([guess.token for guess in tree], np.int32), [guess.after for guess in tree]
        # Tips are mostly the newest nodes, so that a cache has run the others already.
        first = min(tips)
        num_last = len(tree) - first if first >= 0 else None
        rows = self.decoder.tree_logits(tokens, nodes, parents, num_last)[:, : self.vocab_size]
        texts = [append(tokens, nodes[trees.path(parents, tip)]) for tip in tips]
        guesses = []
        for tip, text in zip(tips, texts, strict=True):
            row = rows[tip - max(first, -1)]
            q = sampler.distribution(row, text) if ask.with_distributions else None
            token = sampler(row, text) if q is None else sampler.pick(q, len(text))
            guesses.append(_guess(row, token, q, text, ask, sampler)._replace(after=tip))
        return guesses

    def interrupt(self) -> None:
        """End the pass that runs, if the decoder can: whoever waits for it has an error."""
        if isinstance(self.decoder, Interruptible):
            self.decoder.interrupt()

    def learn(self, tokens: TokenIds, draft: Draft, logits: Logits) -> None:
        pass


def _telling(told: list[Distribution]) -> Acceptance:
    """Equality that notes what each token was drawn from."""

    def accept(tokens: TokenIds, draft: Draft, logits: Logits, sampler: Sampler) -> TokenIds:
        def drawn(row: Row, text: TokenIds) -> int:
            told.append(sampler.distribution(row, text))
            return sampler.pick(told[-1], len(text))

        return equality(tokens, draft, logits, drawn)

    return accept


def _guess(row: Row, token: int, q: Distribution | None, text: TokenIds, ask: Ask, sampler: Sampler) -> Guess:
    others = sampler.ranked(row, text, ask.num_others + 1) if ask.num_others else []
    return Guess(
        token,
        _probability(row, token) if ask.floor else 1.0,
        q,
        tuple(other for other in others if other != token)[: ask.num_others],
    )


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
    """At temperature 1 whatever the sampler's: about the chance that it is kept, greedy or not (docs/log.md)."""
    return float(1.0 / np.exp(row - row[token]).sum())
