"""States that a recurrent head gave itself, where hidden states of its target are not known."""

import numpy as np

from edgespec.decoding.hidden_states import States


class OwnStates:
    """A row of each slot, one after the other."""

    def __init__(self, state_size: int) -> None:
        self._first = 0
        self._rows = np.zeros((0, state_size), np.float32)

    def has(self, slot: int) -> bool:
        return self._first <= slot < self._first + len(self._rows)

    def of(self, slots: list[int]) -> States:
        rows: States = self._rows[np.array(slots, np.intp) - self._first]
        return rows

    def reset(self, slot: int, rows: States) -> None:
        """Hold states of the slots from `slot` on alone."""
        self._first, self._rows = slot, rows

    def put(self, slot: int, rows: States) -> None:
        """Hold states of the slots from `slot` on after those of the slots before, as far as these are held."""
        if not self._first <= slot <= self._first + len(self._rows):
            self.reset(slot, rows)
        else:
            self._rows = np.concatenate([self._rows[: slot - self._first], rows])

    def drop_before(self, slot: int) -> None:
        skipped = min(max(0, slot - self._first), len(self._rows))
        self._first, self._rows = self._first + skipped, self._rows[skipped:]

    def move(self, slots: list[int], start: int) -> None:
        """Hold states of `slots` in the slots from `start` on, and of those before."""
        self.put(start, self.of(slots))
