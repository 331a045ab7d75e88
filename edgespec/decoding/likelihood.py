"""How likely the tokens of a text are to a model."""

import numpy as np
import numpy.typing as npt

from edgespec.decoders import Decoder
from edgespec.types import Logits, Row, TokenIds

_CHUNK_TOKENS = 256


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


def mean_nll(decoder: Decoder, tokens: TokenIds) -> float:
    """The mean negative log-likelihood of all tokens but the first, in nats."""
    total = 0.0
    for start in range(0, len(tokens) - 1, _CHUNK_TOKENS):
        stop = min(start + _CHUNK_TOKENS, len(tokens) - 1)
        logits = decoder.logits(tokens[:stop], stop - start)
        total += float(negative_log_likelihood(logits, tokens[start + 1 : stop + 1]).sum())
    return total / (len(tokens) - 1)
