"""Which tokens a head can draft: those that its target gives the most probability, over its own texts."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgespec.types import TokenIds

Floats = npt.NDArray[np.float32]
_CHUNK_ROWS = 256
_MOST_ROWS = 16_000


def expected_counts(states: Floats, head: Floats, scale: float, cap: float | None) -> npt.NDArray[np.float64]:
    """How often each token is expected after some rows, [vocab_size]: a sum of probabilities.

    Of the tokens of answers that are not among the texts these counts cover more than counts of tokens do, since
    every row says what else might have come.

    Args:
        states: After the target's final norm, [num_rows, hidden_size]; of many rows an even sample counts.
        head: The target's vocabulary head, [vocab_size, hidden_size].
        scale, cap: Of the target's logits.
    """
    counts = np.zeros(len(head))
    states = states[:: max(1, len(states) // _MOST_ROWS)]
    for start in range(0, len(states), _CHUNK_ROWS):
        logits = states[start : start + _CHUNK_ROWS].astype(np.float32) @ head.T * np.float32(scale)
        if cap is not None:
            logits = np.float32(cap) * np.tanh(logits / np.float32(cap))
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        counts += shares.sum(axis=0, dtype=np.float64)
    return counts


def choose_tokens(counts: npt.NDArray[np.float64], size: int, always: Sequence[int]) -> TokenIds:
    """The most frequent tokens and those that always count, ascending, [size]."""
    ranked = counts.copy()
    ranked[list(always)] = np.inf
    return np.sort(np.argsort(-ranked, kind="stable")[:size]).astype(np.int32)
