"""A suffix automaton that counts what followed every part of a text, and the drafter that uses it.

Knows nothing of models: tokens are whole numbers from 0 below 2^31.
"""

from array import array
from collections.abc import Iterable, Iterator
from itertools import chain, islice, repeat
from threading import Lock

import numpy as np

from edgespec.decoding.tree import NO_DRAFT, Tree
from edgespec.draft.drafter import Drafter, DraftRequest
from edgespec.draft.ngram import length_bucket
from edgespec.types import Sampler, TokenIds

_ROOT = 0  # the state of the empty context
# Contexts whose counts a token updates, longest first. In 70,000 tokens of Spec-Bench none had more; a phrase
# repeated on end has, but its short contexts are never used: 3 µs a token against 9 µs for 32 of them.
_MAX_COUNTED = 8
_LONG = 32  # contexts of this many tokens and more have one bucket
_CONTEXT_BUCKETS = tuple(3 * length_bucket(length) for length in range(_LONG + 1))


class SuffixAutomaton:
    """Every substring of a growing text, and what followed each; it takes 3 to 6 µs and up to 180 bytes a token.

    A state stands for the substrings that end at one set of positions; its link leads to their longest suffix that
    ends at more positions (Blumer et al., 1985). So the link of the whole text is its longest suffix that occurred
    before. Tokens cannot be removed: a text that changes needs a new automaton.

    >>> text = SuffixAutomaton()
    >>> text.extend([1, 2, 3, 1, 2])
    >>> text.match_length, text.draft(4, "suffix").tokens.tolist()
    (2, [3, 1, 2, 3])
    """

    def __init__(self) -> None:
        self._tokens = array("i")
        self._last = _ROOT  # the state of the whole text
        # By state. Most have one edge, so the first lies here, as its target; a target's token is the edge's.
        self._token = array("i", [-1])
        self._length = array("i", [0])  # of its longest substring
        self._link = array("i", [-1])
        self._edge = array("i", [_ROOT])  # the first; _ROOT is none, as nothing leads there
        self._more = array("i", [0])  # the last of its further edges in the linked list below
        self._count = array("i", [0])  # occurrences
        self._favourite = array("i", [_ROOT])  # target of the edge most often taken; of equal ones the most recent
        # Further edges: a dictionary to follow them, and a list, linked backwards, to copy those of a state.
        self._targets: dict[int, int] = {}
        self._more_token = array("i", [-1])
        self._more_previous = array("i", [0])

    def __len__(self) -> int:
        return len(self._tokens)

    def is_prefix_of(self, tokens: TokenIds) -> bool:
        return tokens[: len(self._tokens)].tobytes() == self._tokens.tobytes()

    @property
    def match_length(self) -> int:
        """Tokens of the longest suffix that occurred earlier; the two may overlap."""
        return self._length[self._match]

    def draft(self, num: int, source: str) -> Tree:
        """The most frequent continuation of the match, up to num tokens; past the end it repeats itself."""
        state, length = self._match, self.match_length
        token, count, more, link, favourite = self._token, self._count, self._more, self._link, self._favourite
        tokens, buckets = list[int](), list[int]()
        add_token, add_bucket = tokens.append, buckets.append
        context_buckets = chain(_CONTEXT_BUCKETS[length:], repeat(_CONTEXT_BUCKETS[_LONG]))
        for bucket in islice(context_buckets, num if state else 0):
            target = favourite[state]
            if not target:  # the end of the text
                state = link[state]
                target = favourite[state]
            add_token(token[target])
            if not more[state]:
                bucket += 2 if count[target] > 1 else count[target]  # as follower_bucket has it
            add_bucket(bucket)
            state = target
        return Tree(np.array(tokens, np.int32), tuple(buckets), source=source) if tokens else NO_DRAFT

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._append(token)

    @property
    def _match(self) -> int:
        return max(_ROOT, self._link[self._last])

    def _append(self, token: int) -> None:
        self._tokens.append(token)
        link, edge, tokens, targets = self._link, self._edge, self._token, self._targets
        whole = self._new_state(token, len(self._tokens))
        state = self._last
        while state >= 0:  # contexts that token follows for the first time
            target = edge[state]
            if target == _ROOT:
                edge[state] = self._favourite[state] = whole
            elif tokens[target] == token:
                break
            else:
                key = state << 32 | token
                if key in targets:
                    target = targets[key]
                    break
                self._add_edge(state, key, token, whole)
            state = link[state]
        if state < 0:
            link[whole] = _ROOT
        else:
            if self._length[state] + 1 < self._length[target]:
                target = self._split(state, target, token)
            link[whole] = target
            self._count_edge(state, target)
        self._last = whole

    def _count_edge(self, state: int, target: int) -> None:
        """Count the edge from state to target once more, and the edges of their suffixes."""
        length, link, count, favourite = self._length, self._link, self._count, self._favourite
        count[target] += 1
        shorter = length[link[target]]
        for _ in range(_MAX_COUNTED):
            if favourite[state] != target and count[target] >= count[favourite[state]]:
                favourite[state] = target
            state = link[state]
            if state < 0:
                break
            if length[state] < shorter:  # then the edge leads to the link of the previous target
                target = link[target]
                count[target] += 1
                shorter = length[link[target]]

    def _split(self, state: int, target: int, token: int) -> int:
        """Split the substrings no longer than state and token off target, for they end at one more position."""
        clone = self._new_state(token, self._length[state] + 1)
        for field in (self._link, self._edge, self._more, self._count, self._favourite):
            field[clone] = field[target]
        for further in self._further(target):
            self._targets[clone << 32 | further] = self._targets[target << 32 | further]
        self._link[target] = clone
        while state >= 0:
            if self._edge[state] == target:
                self._edge[state] = clone
            elif self._targets.get(state << 32 | token) == target:
                self._targets[state << 32 | token] = clone
            else:
                break
            if self._favourite[state] == target:
                self._favourite[state] = clone
            state = self._link[state]
        return clone

    def _new_state(self, token: int, length: int) -> int:
        state = len(self._token)
        self._token.append(token)
        self._length.append(length)
        self._link.append(_ROOT)
        self._edge.append(_ROOT)
        self._more.append(0)
        self._count.append(1)
        self._favourite.append(_ROOT)
        return state

    def _add_edge(self, state: int, key: int, token: int, target: int) -> None:
        self._targets[key] = target
        self._more_token.append(token)
        self._more_previous.append(self._more[state])
        self._more[state] = len(self._more_token) - 1
        if self._count[self._favourite[state]] <= 1:
            self._favourite[state] = target

    def _further(self, state: int) -> Iterator[int]:
        """Tokens of further edges, newest first."""
        position = self._more[state]
        while position:
            yield self._more_token[position]
            position = self._more_previous[position]


class SuffixDrafter(Drafter):
    """Drafts the most frequent continuation of the longest suffix of the text that occurred in it before.

    Reads only the new tokens of a text that grows, and another text from its start.
    `[1, 2, 1, 2]` drafts `[1, 2, 1, 2, …]`. As in SAM-Decoding (Hu et al., arXiv:2411.10666), but by counts.
    """

    name = "suffix"

    def __init__(self) -> None:
        self._text = SuffixAutomaton()
        self._lock = Lock()  # two answers may share a drafter model, and with it the drafters that draft for it

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        with self._lock:
            if not self._text.is_prefix_of(tokens):
                self._text = SuffixAutomaton()
            self._text.extend(tokens[len(self._text) :].tolist())
            return self._text.draft(request.num_tokens, self.name)


def follower_bucket(context_length: int, num_seen: int, *, is_unanimous: bool) -> int:
    """By context length and whether other tokens followed it too, this one once, or always this one."""
    return 3 * length_bucket(context_length) + (min(num_seen, 2) if is_unanimous else 0)
