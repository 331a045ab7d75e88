"""States of recurrent layers, and the rows behind them, from which a later state is worked out.

Attention goes back by counting fewer keys; a recurrent state cannot be taken back. So a pass gives the state
behind the last token that the text has for certain, and of the guesses behind it the rows alone. The next pass
takes the rows of accepted ones into the state, which costs the recurrence and no product with weights. A few
earlier states are kept, so that a text can go on from them: the last two, and two behind passes over a part of a
prompt. Before all of them there is the empty text, whose state is zero.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edgespec.manifest.caches import KEPT_STATES, NUM_SETTLED, KVCache
from edgespec.types import Array

_PROMPT_TOKENS = 16  # a pass of more is one over a part of a prompt


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """A state behind num_settled tokens, and the rows of the tokens after it, num_rows of which count.

    arrays: By layer its state and its rows; the first rows are of tokens before the state.
    """

    num_settled: int
    num_rows: int
    arrays: list[Array]
    is_prompt: bool

    @property
    def end(self) -> int:
        return self.num_settled + self.num_rows


class RecurrentStates:
    """The states of one text at several of its tokens, bound to a session for its next pass.

    num_text: How many tokens of the text of the next passes are certain.
    """

    def __init__(self, binding: Any, kv_cache: KVCache) -> None:
        assert kv_cache.recurrence
        self._binding, self._recurrence = binding, kv_cache.recurrence
        self._dtype = np.dtype(kv_cache.dtype)
        self._kept: list[_Held] = []
        self._next: _Held | None = None
        self._read: _Held | None = None  # which the binding knows only the addresses of
        self._spare: list[Array] = []  # states that nobody needs any more
        self._settled = np.zeros(1, np.int64)
        self.num_text = 0

    def reachable(self, position: int) -> int:
        """How many of the first tokens, position at most, a pass can go on after."""
        return max((min(position, held.end) for held in self._kept if held.num_settled <= position), default=0)

    def reachable_evenly(self, position: int, end: int) -> int:
        """The last reachable position up to this one with an even number of tokens to the end; else 0."""
        while (found := self.reachable(position)) and (end - found) % 2:
            position = found - 1
        return found

    def bind(self, num_past: int, num_new: int) -> None:
        """Bind for a pass of num_new tokens after the first num_past, which must be reachable."""
        able = [held for held in self._kept if held.num_settled <= num_past]
        self._kept = [replace(held, num_rows=min(held.num_rows, num_past - held.num_settled)) for held in able]
        ends = [held for held in self._kept if held.end == num_past]
        start = max(ends, key=lambda held: held.num_settled, default=None) or self._empty(0)
        assert start.end == num_past
        self._read = start
        is_prompt = num_new > _PROMPT_TOKENS
        certain = self.num_text - is_prompt  # so that a prompt may be asked again, whose last token runs anew then
        settled = max(0, min(certain, num_past + num_new) - start.num_settled)
        num_left = start.num_rows + num_new - settled
        self._next = _Held(start.num_settled + settled, num_left, self._allocate(num_left), is_prompt)
        self._settled[0] = settled
        self._bind(NUM_SETTLED, self._settled)
        num_before = self._recurrence.num_before
        for at, (past, present) in enumerate(self._recurrence.names):
            read = start.arrays[at]
            self._bind(past, read if at % 2 == 0 else read[:, : num_before + start.num_rows])
            array = self._next.arrays[at]
            self._binding.bind_output(present, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def collect(self) -> None:
        """Keep what the pass has given."""
        assert self._next
        self._kept.append(self._next)
        self._next = None
        prompts = [held for held in self._kept if held.is_prompt][-(KEPT_STATES - 2) :]
        wanted = [*self._kept[-2:], *prompts]
        self._spare += [array for held in self._kept if held not in wanted for array in held.arrays[::2]]
        self._kept = [held for held in self._kept if held in wanted]

    def pretend(self, num_positions: int) -> None:
        """Hold a state of zeros behind num_positions tokens."""
        self._kept = [self._empty(num_positions)]

    def clear(self) -> None:
        self._kept, self._spare, self._next, self._read = [], [], None, None

    def _empty(self, num_settled: int) -> _Held:
        arrays = self._allocate(0)
        for array in arrays:
            array[...] = 0
        return _Held(num_settled, 0, arrays, False)

    def _allocate(self, num_rows: int) -> list[Array]:
        states, arrays = self._recurrence, list[Array]()
        for _ in states.layers:
            arrays.append(self._spare.pop() if self._spare else np.empty((1, *states.state_shape), self._dtype))
            arrays.append(np.empty((1, states.num_before + num_rows, states.row_width), self._dtype))
        return arrays

    def _bind(self, name: str, array: Array) -> None:
        self._binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
