"""A short way from a state of a grammar to the end of the text.

The shortest one is not looked for: a way is found by closing what is open, and where that goes on for too long by
trying several tokens at each place.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec.grammar.vocabulary import GrammarVocabulary, Matcher, forced_by, mask_of, may_follow

Mask = npt.NDArray[np.bool_]
Ids = npt.NDArray[np.intp]

# What ends a value; within a free text a quotation mark alone does. And what begins a short one.
_CLOSERS = (b"}", b"]", b'"', b")", b">", b",")
_VALUES = (*(b"%d" % digit for digit in range(10)), b"null", b"n", b"true", b"t", b"[", b"{", b"-")
_FREE_SHARE = 8  # a text is free where more than an eighth of the vocabulary may follow
_BEAM, _PREFERRED = 6, 5  # states of each length that are followed, and tokens that come first in each
_SOON = 256  # tokens in which nearly all ways end; more take seconds where a way leads nowhere
_FEW = 16  # so many tokens are all tried
_MAX_TRIED = 300  # tokens in all, some 0.03 s


class _Way(NamedTuple):
    """Tokens that may follow, and the state behind them; rank is by how little they were preferred."""

    rank: int
    tokens: tuple[int, ...]
    matcher: Matcher


class ClosingTokens:
    """The tokens of a vocabulary that ways are made of, each kind in the order in which it is tried.

    closers: End a value.
    values: Begin a short value.
    words: Letters and digits, the longest first.
    single: One printable character each, letters and digits last.
    short: All tokens, the shortest first.
    quote: A quotation mark; −1 where there is none.
    """

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        texts = [vocabulary.text_of(token) for token in range(vocabulary.vocab_size)]
        by_text = {text: token for token, text in reversed(list(enumerate(texts)))}

        def ids(tokens: Iterable[int]) -> Ids:
            return np.array(list(tokens), np.intp)

        self.closers = ids(by_text[text] for text in _CLOSERS if text in by_text)
        self.values = ids(by_text[text] for text in _VALUES if text in by_text)
        words = (token for token, text in enumerate(texts) if text.isalnum() and text.isascii())
        self.words = ids(sorted(words, key=lambda token: (-len(texts[token]), token)))
        single = (token for token, text in enumerate(texts) if len(text) == 1 and 0x20 <= text[0] < 0x7F)
        self.single = ids(sorted(single, key=lambda token: (texts[token].isalnum(), token)))
        self.short = ids(sorted(range(len(texts)), key=lambda token: (len(texts[token]) or 99, token)))
        self.quote = by_text.get(b'"', -1)


class _Endings(NamedTuple):
    """Texts as tokens, and the first token of each."""

    tokens: list[list[int]]
    first: Ids

    @classmethod
    def of(cls, texts: Sequence[str], vocabulary: GrammarVocabulary, named: Sequence[int] = ()) -> "_Endings":
        ways = [vocabulary.tokenizer.tokenize_str(text) for text in texts]
        # A grammar names a special token by its spelling, which is no text then.
        special = [
            vocabulary.tokenizer.tokenize_str(text, parse_special=True) for text in texts if text[-1:] == ">"
        ]
        found = [tokens for tokens in (*([token] for token in named), *special, *ways) if tokens]
        return cls(found, np.array([tokens[0] for tokens in found], np.intp))


_NONE = _Endings([], np.array([], np.intp))


class Closer:
    """Finds ways to the end of texts that match one grammar.

    way = closer.find(matcher, max_tokens=40)  # the tokens of '"}' and the end token, in `{"name": "Ad`
    """

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        tokens: ClosingTokens,
        texts: Sequence[str],
        numbers: Sequence[str],
        named: Sequence[int] = (),
    ) -> None:
        """texts and numbers: What may end a text and a number, those first that are to be tried first.

        named: Special tokens that may end a text.
        """
        self._vocab_size, self._end = vocabulary.vocab_size, vocabulary.end_tokens[0]
        self._tokens = tokens
        self._texts, self._numbers = _Endings.of(texts, vocabulary, named), _Endings.of(numbers, vocabulary)

    def find(self, matcher: Matcher, max_tokens: int) -> tuple[int, ...] | None:
        """The tokens of a way to the end, the end token included; None where none of max_tokens was found."""
        tries = [(min(max_tokens, _SOON), self._texts), (min(max_tokens, _SOON), _NONE)]
        if max_tokens > _SOON:
            tries.append((max_tokens, self._texts))
        ways = (self._close(matcher, most, texts) for most, texts in tries)
        return next(filter(None, ways), None) or self._search(matcher, max_tokens)

    @staticmethod
    def leads_to_end(matcher: Matcher, way: tuple[int, ...]) -> bool:
        """True if a way that was found elsewhere is one from here, too."""
        copy = matcher.deep_copy()
        return all(may_follow(copy, token) for token in way[:-1]) and bool(copy.is_accepting())

    def _close(self, matcher: Matcher, max_tokens: int, texts: _Endings) -> tuple[int, ...] | None:
        """The way on which each token is the one preferred.

        One of the texts may fit again and again, as a key of an object that takes any; without texts none does.
        """
        way, matcher = list[int](), matcher.deep_copy()
        while len(way) < max_tokens:
            if matcher.is_accepting():
                return (*way, self._end)
            if not (step := forced_by(matcher)):
                steps = self._preferred(matcher, mask_of(matcher, self._vocab_size), 1, texts)
                step = steps[0] if steps else []
            if not step or matcher.try_consume_tokens(step) < len(step):
                return None
            way += step
        return None

    def _search(self, matcher: Matcher, max_tokens: int) -> tuple[int, ...] | None:
        """The first way that is found by trying several tokens in each of several states, by their length."""
        states, left = [_Way(0, (), matcher.deep_copy())], _MAX_TRIED
        while states and left > 0:
            states.sort(key=lambda state: (len(state.tokens), state.rank))
            shortest = len(states[0].tokens)
            layer = [state for state in states if len(state.tokens) == shortest]
            states = states[len(layer) :]
            seen: set[bytes] = set()
            for state in layer:
                if shortest + 1 > max_tokens:
                    return None
                if state.matcher.is_accepting():
                    return (*state.tokens, self._end)
                mask = mask_of(state.matcher, self._vocab_size)
                # States of the same length in which the same may follow mostly go on alike.
                if (key := np.packbits(mask).tobytes()) not in seen and len(seen) < _BEAM:
                    seen.add(key)
                    steps = self._steps(state.matcher, mask)
                    left -= len(steps)
                    for rank, step in enumerate(steps):
                        if (found := _behind(state, rank, step)) is None:
                            continue
                        if found.matcher.is_accepting() and len(found.tokens) < max_tokens:
                            return (*found.tokens, self._end)
                        states.append(found)
        return None

    def _steps(self, matcher: Matcher, mask: Mask) -> list[list[int]]:
        """The tokens to try in a state: the forced ones, or else the preferred ones, then one for each byte."""
        if forced := forced_by(matcher):
            return [forced]
        tried = self._preferred(matcher, mask, _PREFERRED, self._texts)
        if np.count_nonzero(mask) <= _FEW:
            tried += [[token] for token in np.flatnonzero(mask).tolist()]
        elif not self._ends_by_quote(matcher, mask):
            tried += [[token] for token in _allowed(self._tokens.single, mask)]
        return [list(step) for step in dict.fromkeys(map(tuple, tried))]

    def _preferred(self, matcher: Matcher, mask: Mask, num_steps: int, texts: _Endings) -> list[list[int]]:
        """Some steps that may be taken, those first that are likely to end the text soon."""
        found: list[list[int]] = []
        for steps in self._ranked(matcher, mask, texts):
            found += [list(step) for step in steps]
            if len(found) >= num_steps:
                break
        return found[:num_steps]

    def _ranked(self, matcher: Matcher, mask: Mask, texts: _Endings) -> Iterator[Iterable[Sequence[int]]]:
        """Steps of each kind, from what ends a value to what goes on with it."""
        tokens = self._tokens
        closers = [[token] for token in _allowed(tokens.closers, mask, 3)]
        if self._ends_by_quote(matcher, mask):  # brackets are part of such a text
            yield [[tokens.quote]]
        elif _is_free(mask):
            yield self._ending(matcher, mask, texts, is_free=True)
        elif tokens.quote >= 0 and mask[tokens.quote]:
            yield closers
        else:
            yield self._ending(matcher, mask, texts)
            yield closers
            yield self._ending(matcher, mask, self._numbers)
        yield [[token] for token in _allowed(tokens.values, mask, 3)]
        yield [[token] for token in _allowed(tokens.words, mask, 1)]
        yield [[token] for token in _allowed(tokens.short, mask, 2)]

    def _ending(
        self, matcher: Matcher, mask: Mask, endings: "_Endings", *, is_free: bool = False
    ) -> list[list[int]]:
        """The first text that ends the value, if there is one; within a free text it must do so at once."""
        for i in np.flatnonzero(mask[endings.first]).tolist():
            tokens = endings.tokens[i]
            # First all at once: of a text that repeats itself, most ends follow for long and then do not.
            if matcher.deep_copy().try_consume_tokens(tokens) < len(tokens):
                continue
            copy = matcher.deep_copy()
            if all(may_follow(copy, token) for token in tokens) and (
                not is_free or copy.is_accepting() or not _is_free(mask_of(copy, self._vocab_size))
            ):
                return [tokens]
        return []

    def _ends_by_quote(self, matcher: Matcher, mask: Mask) -> bool:
        """True if a text is free, and a quotation mark ends it."""
        quote = self._tokens.quote
        if quote < 0 or not mask[quote] or not _is_free(mask):
            return False
        behind = matcher.deep_copy()
        return bool(behind.try_consume_tokens([quote])) and not _is_free(mask_of(behind, self._vocab_size))


def _is_free(mask: Mask) -> bool:
    """True if nearly any text may follow."""
    return bool(np.count_nonzero(mask) * _FREE_SHARE > len(mask))


def _behind(state: _Way, rank: int, step: list[int]) -> _Way | None:
    """The state behind some tokens; None where they may not follow."""
    matcher = state.matcher.deep_copy()
    if matcher.try_consume_tokens(step) < len(step):
        return None
    return _Way(state.rank + rank, (*state.tokens, *step), matcher)


def _allowed(tokens: Ids, mask: Mask, num_tokens: int | None = None) -> list[int]:
    """The first num_tokens of some tokens that may follow in a state, or all that may."""
    found: list[int] = tokens[mask[tokens]][:num_tokens].tolist()
    return found
