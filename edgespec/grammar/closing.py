"""A short way from a state of a grammar to the end of the text.

The shortest one is not looked for: a way is found by closing what is open, and where that goes on for too long by
trying several tokens at each place.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec.grammar.mask import Matcher, mask_of
from edgespec.grammar.vocabulary import GrammarVocabulary

Ids = npt.NDArray[np.intp]

# What ends a value, and then what begins a short one; within a free text a quotation mark comes first.
_CLOSERS = (
    "}",
    "]",
    '"',
    ")",
    ">",
    "0",
    "1",
    "2",
    "3",
    "4",
    "5",
    "6",
    "7",
    "8",
    "9",
    "null",
    "true",
    "[",
    "{",
    "-",
)
_FREE_SHARE = 8  # a text is free where more than an eighth of the vocabulary may follow
_BEAM, _TRIED = 6, 5  # states of each length, and tokens that are tried in each
_MAX_STATES = 500


class _State(NamedTuple):
    """A state on a way; rank is by how little its tokens were preferred."""

    rank: int
    tokens: tuple[int, ...]
    matcher: Matcher


class Closer:
    """Finds ways to the end for grammars over one vocabulary.

    way = closer.find(matcher, max_tokens=40)  # the tokens of '"}' and the end token, in `{"name": "Ad`
    """

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._vocab_size, self._end = vocabulary.vocab_size, vocabulary.end_tokens[0]
        texts = [vocabulary.text_of(token) for token in range(vocabulary.vocab_size)]
        by_text = {text: token for token, text in reversed(list(enumerate(texts)))}
        self._closers = np.array(
            [by_text[text.encode()] for text in _CLOSERS if text.encode() in by_text], np.intp
        )
        self._quote = by_text.get(b'"', -1)
        words = [token for token, text in enumerate(texts) if text.isalnum() and text.isascii()]
        self._words = np.array(sorted(words, key=lambda token: (-len(texts[token]), token)), np.intp)
        self._short = np.array(
            sorted(range(len(texts)), key=lambda token: (len(texts[token]) or 99, token)), np.intp
        )

    def find(self, matcher: Matcher, max_tokens: int) -> tuple[int, ...] | None:
        """The tokens of a way to the end, the end token included; None where none of max_tokens was found."""
        return self._close(matcher.deep_copy(), max_tokens) or self._search(matcher, max_tokens)

    @staticmethod
    def leads_to_end(matcher: Matcher, way: tuple[int, ...]) -> bool:
        """Whether a way that was found elsewhere is one from here, too."""
        copy, tokens = matcher.deep_copy(), list(way[:-1])
        return copy.try_consume_tokens(tokens) == len(tokens) and bool(copy.is_accepting())

    def _close(self, matcher: Matcher, max_tokens: int) -> tuple[int, ...] | None:
        """The way on which each token is the one preferred."""
        way: list[int] = []
        while len(way) < max_tokens:
            if matcher.is_accepting():
                return (*way, self._end)
            step = self._forced(matcher) or self._preferred(matcher, 1)
            if not step or matcher.try_consume_tokens(step) < len(step):
                return None
            way += step
        return None

    def _search(self, matcher: Matcher, max_tokens: int) -> tuple[int, ...] | None:
        """The first way that is found by trying several tokens in each of several states, by their length."""
        states, num_seen = [_State(0, (), matcher.deep_copy())], 0
        while states:
            states.sort(key=lambda state: (len(state.tokens), state.rank))
            shortest = len(states[0].tokens)
            layer = [state for state in states if len(state.tokens) == shortest]
            states = states[len(layer) :]
            seen: set[bytes] = set()
            for state in layer:
                if shortest + 1 > max_tokens or num_seen > _MAX_STATES:
                    return None
                if state.matcher.is_accepting():
                    return (*state.tokens, self._end)
                key = np.packbits(mask_of(state.matcher, self._vocab_size)).tobytes()
                if key in seen or len(seen) == _BEAM:
                    continue
                seen.add(key)
                num_seen += 1
                states += self._steps(state)
        return None

    def _steps(self, state: _State) -> list[_State]:
        steps = [self._forced(state.matcher)]
        if not steps[0]:
            steps = [[token] for token in self._preferred(state.matcher, _TRIED)]
        found = []
        for rank, step in enumerate(steps):
            matcher = state.matcher.deep_copy()
            if matcher.try_consume_tokens(step) == len(step):
                found.append(_State(state.rank + rank, (*state.tokens, *step), matcher))
        return found

    @staticmethod
    def _forced(matcher: Matcher) -> list[int]:
        return [int(token) for token in matcher.compute_ff_tokens()]

    def _preferred(self, matcher: Matcher, num_tokens: int) -> list[int]:
        """Some tokens that may follow, those first that are likely to end the text soon."""
        mask = mask_of(matcher, self._vocab_size)
        closers = self._closers[mask[self._closers]]
        if np.count_nonzero(mask) * _FREE_SHARE <= len(mask):
            found = closers[:3].tolist()
        else:
            found = [self._quote] if self._quote >= 0 and mask[self._quote] else []
        if len(found) < num_tokens:  # what is looked for in all of the vocabulary takes longer
            found += self._words[mask[self._words]][:1].tolist()
        if len(found) < num_tokens:
            found += [*closers[3:5].tolist(), *self._short[mask[self._short]][:2].tolist()]
        return [*dict.fromkeys(found)][:num_tokens]
