"""How likely the tokens of a text are to a model."""

import numpy as np
import numpy.typing as npt

from edgespec.types import Logits, Row, TokenIds


def log_softmax(row: Row) -> npt.NDArray[np.float64]:
    """The logarithm of each token's probability, [vocab_size]."""
    shifted: npt.NDArray[np.float64] = row.astype(np.float64) - row.max()
    shifted -= np.log(np.exp(shifted).sum())
    return shifted


def negative_log_likelihood(logits: Logits, following: TokenIds) -> npt.NDArray[np.float64]:
    """−log softmax(logits)[following] of each row, [num_rows]."""
    # One row at a time, for rows are long.
    found = [-log_softmax(row)[token] for row, token in zip(logits, following, strict=True)]
    return np.array(found, np.float64)
