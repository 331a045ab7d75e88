"""How likely the tokens of a text are to a model."""

import numpy as np
import numpy.typing as npt

from edgespec.types import Logits, TokenIds


def negative_log_likelihood(logits: Logits, following: TokenIds) -> npt.NDArray[np.float64]:
    """−log softmax(logits)[following] of each row, [num_rows]."""
    found = []
    for row, token in zip(logits, following, strict=True):  # one at a time, for rows are long
        shifted = row.astype(np.float64) - row.max()
        found.append(np.log(np.exp(shifted).sum()) - shifted[token])
    return np.array(found, np.float64)
