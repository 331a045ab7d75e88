"""Which tokens each token of a pass sees, and the addends of attention scores that say so."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

HIDDEN = -30000.0  # which half floats hold


class TreeLayout(NamedTuple):
    """Positions of the tokens in the last slots of the cache, with the tokens of the pass at the end.

    positions: [num_slots].
    sees: Which of these slots each sees, [num_slots, num_slots]; all see what comes before them.
    """

    positions: npt.NDArray[np.int64]
    sees: npt.NDArray[np.bool_]

    def padded(self, num_padded: int) -> "TreeLayout":
        """The layout with tokens behind it that no other sees."""
        if not num_padded:
            return self
        num_slots = len(self.positions)
        sees = np.eye(num_slots + num_padded, dtype=np.bool_)
        sees[:num_slots, :num_slots] = self.sees
        return TreeLayout(np.append(self.positions, np.full(num_padded, self.positions[-1])), sees)


def attention_bias(
    positions: npt.NDArray[np.int64], num_tokens: int, layout: TreeLayout | None, window: int | None
) -> npt.NDArray[np.float32]:
    """Addends of the attention scores, 0 where a token sees another and HIDDEN where not.

    Args:
        positions: Of all slots of the cache, [total]; the last num_tokens are those of the pass.
        layout: Which slots of a tree see which; None where the tokens are a chain.
        window: How many tokens back a token sees; None for all.

    Returns:
        [1, 1, num_tokens, total].
    """
    hidden = is_hidden(positions[-num_tokens:, None] - positions, window)
    if layout is not None:  # tokens before those of the layout are a chain
        num_placed = len(layout.positions)
        hidden[-num_placed:, -num_placed:] |= ~layout.sees[-num_tokens:]
    return np.where(hidden, np.float32(HIDDEN), np.float32(0))[None, None]


def is_hidden(behind: npt.NDArray[np.integer[Any]], window: int | None) -> npt.NDArray[np.bool_]:
    """True if a token is not seen, by how many positions behind it lies: a later one, or one before the window."""
    return behind < 0 if window is None else (behind < 0) | (behind >= window)
