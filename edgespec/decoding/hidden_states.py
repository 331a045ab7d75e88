"""Hidden states of a target, beside the tokens that they belong to, for drafting heads.

The store has a row for each slot of the target's KV cache. The decoder that fills the cache fills the store, and
says which tokens the first slots hold; heads read it from other threads. While none of them wants states, passes
leave them out, and those before the next ones are not known.
"""

from collections.abc import Sequence
from threading import Lock
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from edgespec.decoding.decoder import reusable_prefix
from edgespec.errors import MemoryExhausted
from edgespec.types import TokenIds

States = npt.NDArray[np.float32]  # [num_rows, width]
_FIRST_CAPACITY = 512  # slots


class HiddenStates:
    """Hidden states of some layers, a row for each slot, which grow by doubling.

    layers: Whose states a row holds, one after the other.
    hidden_size: Numbers of a layer's state.
    """

    def __init__(self, layers: Sequence[int], hidden_size: int) -> None:
        self.layers, self.hidden_size = tuple(layers), hidden_size
        self.width = len(self.layers) * hidden_size
        self._rows = np.zeros((0, self.width), np.float32)
        self._held = np.zeros(0, np.int32)
        self._first = 0  # slot whose state is known; those before are not
        self._lock = Lock()
        self._readers: WeakKeyDictionary[object, bool] = WeakKeyDictionary()
        self.is_wanted = True  # passes are to leave states here

    def want(self, reader: object, is_wanted: bool) -> bool:
        """Note whether a reader needs the states of passes to come; returns whether the last ones left theirs."""
        with self._lock:
            was_wanted, self._readers[reader] = self.is_wanted, is_wanted
            self.is_wanted = any(self._readers.values())
        return was_wanted

    def skip(self, stop: int) -> None:
        """Let the slots before `stop` have no known states."""
        with self._lock:
            self._first = stop

    def write(self, slot: int, rows: States) -> None:
        """Write states of the slots from `slot` on, [num_rows, width]; which tokens they are of, hold says.

        Raises MemoryExhausted: The store cannot grow.
        """
        with self._lock:
            self._reserve(slot + len(rows))
            self._first = min(self._first, slot)
            self._rows[slot : slot + len(rows)] = rows

    def hold(self, tokens: TokenIds) -> None:
        """Set the tokens that the states in the first slots belong to, [num_held]."""
        with self._lock:
            assert len(tokens) <= max(len(self._rows), self._first)
            self._held = tokens

    def put(self, slot: int, tokens: TokenIds, rows: States) -> None:
        """Write states from a slot on and hold tokens, [slot + num_rows]."""
        self.write(slot, rows)
        self.hold(tokens)

    def move(self, slots: Sequence[int], start: int) -> None:
        """Copy slots, in rising order, to start and after it, as a KV cache does for the branch of a tree."""
        with self._lock:
            if max(slots, default=0) < len(self._rows):
                self._rows[start : start + len(slots)] = self._rows[list(slots)]

    def pretend(self, tokens: TokenIds) -> None:
        """Hold tokens that were not run, with states of zeros.

        Raises MemoryExhausted: The store cannot grow.
        """
        self.put(0, tokens, np.zeros((len(tokens), self.width), np.float32))

    def clear(self) -> None:
        """Forget all states, and free their memory."""
        with self._lock:
            self._held, self._first = self._held[:0], 0
            self._rows = self._rows[:0].copy()

    def known(self, tokens: TokenIds) -> int:
        """How many of the first tokens have states here, those before `first` aside; 0 where no other has one."""
        with self._lock:
            found = reusable_prefix(self._held, tokens, 0)
            return found if found > self._first else 0

    @property
    def first(self) -> int:
        """How many slots precede the first one with a known state."""
        return self._first

    def read(
        self, tokens: TokenIds, start: int, layers: Sequence[int] | None = None, num_rows: int | None = None
    ) -> States:
        """A copy of the states of tokens from `start` on, as far as they are held, [known(tokens) - start, …].

        Args:
            layers: Those whose states are wanted, in this order; all by default.
            num_rows: Give no more rows than these.
        """
        with self._lock:
            stop = reusable_prefix(self._held, tokens, 0) if start >= self._first else start
            stop = stop if num_rows is None else min(stop, start + num_rows)
            rows = self._rows[start : max(start, stop)]
            if layers is None or tuple(layers) == self.layers:
                return rows.copy()
            size = self.hidden_size
            places = [self.layers.index(layer) * size for layer in layers]
            return np.concatenate([rows[:, place : place + size] for place in places], axis=1)

    def _reserve(self, num_slots: int) -> None:
        if num_slots <= len(self._rows):
            return
        capacity = max(_FIRST_CAPACITY, 1 << (num_slots - 1).bit_length())
        try:
            grown = np.zeros((capacity, self.width), np.float32)
        except MemoryError:
            raise MemoryExhausted(
                f"no memory for the hidden states of {capacity} tokens; use a shorter context"
            ) from None
        grown[: len(self._rows)] = self._rows
        self._rows = grown
