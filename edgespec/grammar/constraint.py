"""A grammar as the constraint of one answer: what may follow, what has to follow, and where the answer has to end.

Everything is a function of the answer alone, so drafts change nothing. What was computed for an answer is kept
and taken up again for a longer one; each thread has its own, as drafters look further ahead than the target.
"""

from dataclasses import dataclass, field
from threading import local
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec.errors import FormatError
from edgespec.grammar.compile import CompiledGrammar
from edgespec.grammar.vocabulary import Matcher, bias_of, forced_by, may_follow, require_sound
from edgespec.types import TokenConstraint, TokenIds, append, num_shared

_NONE: TokenIds = np.zeros(0, np.int32)
# Tokens of the shortest text that are named where an answer may not have so many.
_MOST_NAMED = 512
_NEAR = 256  # tokens; an end that is further away is none at which a loop is cut


class _Check(NamedTuple):
    """A known way from a position of an answer to its end; None where none was found."""

    position: int
    way: tuple[int, ...] | None


@dataclass(slots=True)
class _Walk:
    """The grammar behind some tokens of an answer, for one thread.

    checks: Ways to the end from positions of these tokens.
    bias: Of the position behind all of them, if it is known.
    """

    matcher: Matcher
    tokens: TokenIds = field(default_factory=lambda: _NONE)
    checks: list[_Check] = field(default_factory=list)
    bias: npt.NDArray[np.float32] | None = None


class GrammarConstraint(TokenConstraint):
    """A grammar that one answer has to match.

    An answer ends by an end token within its limit. Where few tokens are left, a token is only let through if a
    way to the end behind it is known that is short enough. How often that has to be checked follows from the most
    that a token may add to such a way. Where no way is known from the beginning, as of a grammar in which any text
    comes before a rare word, nothing is checked, and an answer may be cut by its limit.
    """

    def __init__(self, grammar: CompiledGrammar, max_tokens: int, given: TokenIds = _NONE) -> None:
        """Begin an answer.

        Args:
            max_tokens: The most tokens behind given, the end token included.
            given: The beginning of the answer.

        Raises FormatError: given does not match, or max_tokens are too few.
        """
        self._grammar, self._vocabulary = grammar, grammar.vocabulary
        self._ends = np.array(grammar.vocabulary.end_tokens, np.int32)
        self._limit = len(given) + max_tokens
        self._threads = local()
        self._is_foreseen = self._require_possible(given, max_tokens)

    def bias(self, answer: TokenIds) -> npt.NDArray[np.float32] | None:
        walk = self._walk_to(answer)
        if walk is None:
            return None
        if walk.bias is None:
            walk.bias = self._bias_of(walk.matcher)
        return walk.bias

    def forced(self, answer: TokenIds, max_tokens: int) -> TokenIds:
        walk = self._walk_to(answer)
        if walk is None or max_tokens < 1:
            return _NONE
        tokens = forced_by(walk.matcher)
        if len(tokens) < max_tokens:
            behind = walk.matcher.deep_copy()
            behind.try_consume_tokens(tokens)
            if behind.is_stopped():
                tokens = [*tokens, self._vocabulary.end_tokens[0]]
        return np.array(tokens[:max_tokens], np.int32)

    def num_allowed(self, answer: TokenIds, tokens: TokenIds) -> int:
        walk = self._walk_to(answer)
        if walk is None:
            return 0
        matcher = walk.matcher.deep_copy()
        for i, token in enumerate(tokens.tolist()):
            if token in self._vocabulary.end_tokens:
                may_end = matcher.is_accepting() and (not matcher.is_stopped() or token == self._ends[0])
                return i + bool(may_end)
            if not may_follow(matcher, token):
                return i
        return len(tokens)

    def has_ample_room(self, answer: TokenIds) -> bool:
        walk = self._checked_walk(answer) if self._is_foreseen else None
        return walk is None or self._next_check(walk) > len(answer) + 1

    def leaves_room(self, answer: TokenIds, token: int) -> bool:
        if token in self._vocabulary.end_tokens or not self._is_foreseen:
            return True
        walk = self._checked_walk(answer)
        if walk is None or self._next_check(walk) > len(answer) + 1:
            return True
        last = walk.checks[-1]
        if last.position == len(answer) and last.way and last.way[0] == token:
            return True
        behind = self._checked_walk(append(answer, [token]))
        if behind is None:
            return True
        check = behind.checks[-1]
        return check.way is not None and len(check.way) <= self._limit - check.position

    def bounds_loop(self, answer: TokenIds, span_length: int) -> bool:
        before, walk = self._grammar.matcher.deep_copy(), self._walk_to(answer)
        if walk is None:
            return False
        before.try_consume_tokens(answer[:-span_length].tolist())
        way = self._grammar.closer.find(walk.matcher, _NEAR)
        # A span before, as few tokens would not have ended an answer of which the grammar demands more.
        if way is None or not self._grammar.closer.leads_to_end(before, way):
            return True
        again = np.resize(answer[-span_length:], max(self._limit - len(answer), 0)).tolist()
        return bool(walk.matcher.deep_copy().try_consume_tokens(again) < len(again))

    def way_out(self, answer: TokenIds) -> int:
        walk = self._checked_walk(answer)
        assert walk is not None
        way = self._way_from(walk, len(answer))
        if way is None:  # no way was found, so that any token that may follow is as good
            return int(self._bias_of(walk.matcher).argmax())
        return way[0]

    def _require_possible(self, given: TokenIds, max_tokens: int) -> bool:
        """True if a way to the end is known. Raises FormatError: It is too long, or given does not match."""
        walk = self._walk_to(given)
        if walk is None:
            raise FormatError("the beginning of the answer does not match its response_format; change one of them")
        find = self._grammar.closer.find
        if find(walk.matcher, max_tokens) is not None:
            return True
        shortest = find(walk.matcher, _MOST_NAMED)
        is_schema = self._grammar.kind == "json_schema"
        if shortest is None and not is_schema and len(forced_by(walk.matcher)) < max_tokens:
            return False
        needed = f"about {len(shortest)}" if shortest else f"more than {_MOST_NAMED}, or no end at all"
        raise FormatError(
            f"an answer may have {max_tokens} tokens here, and the shortest one found that matches its "
            f"response_format has {needed}; allow more tokens or use a smaller format"
        )

    def _walk_to(self, answer: TokenIds) -> _Walk | None:
        """The grammar behind an answer; None where the answer has ended or does not match."""
        walk: _Walk | None = getattr(self._threads, "walk", None)
        if walk is None:
            walk = self._threads.walk = _Walk(self._grammar.matcher.deep_copy())
        shared = num_shared(walk.tokens, answer)
        if num_back := len(walk.tokens) - shared:
            walk.matcher.rollback(num_back)
            walk.tokens, walk.bias = walk.tokens[:shared], None
            while walk.checks and walk.checks[-1].position > shared:
                walk.checks.pop()
        new = answer[shared:]
        if not len(new):
            return walk
        has_ended = np.isin(new, self._ends)
        text = new[: int(has_ended.argmax())] if has_ended.any() else new
        num_consumed = walk.matcher.try_consume_tokens(text.tolist())
        require_sound(walk.matcher)
        walk.tokens, walk.bias = append(walk.tokens, text[:num_consumed]), None
        return walk if num_consumed == len(new) else None

    def _checked_walk(self, answer: TokenIds) -> _Walk | None:
        """_walk_to, with the checks of all positions that have one."""
        walk = self._walk_to(answer)
        while walk is not None and (position := self._next_check(walk)) <= len(answer):
            if self._walk_to(answer[:position]) is None:
                return None
            walk.checks.append(_Check(position, self._way_from(walk, position)))
            walk = self._walk_to(answer)
        return walk

    def _next_check(self, walk: _Walk) -> int:
        """The first position behind the last check from which the end may be out of reach."""
        if not walk.checks:
            return 0
        last = walk.checks[-1]
        spare = 0 if last.way is None else self._limit - last.position - len(last.way)
        return last.position + max(1, spare // (self._grammar.largest_opening + 1))

    def _way_from(self, walk: _Walk, position: int) -> tuple[int, ...] | None:
        """A way to the end from the tokens of a walk, which are so many."""
        last = walk.checks[-1] if walk.checks else None
        if last and last.position == position:
            return last.way
        if last and last.way and last.position + 1 == position and last.way[0] == walk.tokens[-1]:
            return last.way[1:]
        left, closer = max(self._limit - position, 0), self._grammar.closer
        if last and last.way and len(last.way) <= left and closer.leads_to_end(walk.matcher, last.way):
            return last.way  # within a text it stays the same, and to find one takes a hundred times as long
        return closer.find(walk.matcher, left)

    def _bias_of(self, matcher: Matcher) -> npt.NDArray[np.float32]:
        if matcher.is_stopped():  # any end token is as good
            bias = np.full(self._vocabulary.vocab_size, -np.inf, np.float32)
            bias[self._vocabulary.end_tokens[0]] = 0
            return bias
        return bias_of(matcher, self._vocabulary.vocab_size)
