"""How likely tokens are to a model: those of a text, and those of an answer under the target's own logits."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec.decoding.decoder import Decoder
from edgespec.decoding.scheduler import Block
from edgespec.decoding.truncation import top_k
from edgespec.types import Logits, Row, TokenIds

_CHUNK_TOKENS, _CHUNK_BYTES = 256, 64 << 20  # of a pass over a text, and of its logits


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
    return -sum(each.logprob for part in text_logprobs(decoder, tokens) for each in part) / (len(tokens) - 1)


class TokenLogprob(NamedTuple):
    """How likely a token was to the model, before penalties, biases, temperature and all cuts.

    logprob: The natural logarithm of its probability; nan for the first token of a prompt, which follows none.
    top: The likeliest tokens in its place with their log-probabilities, the likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def text_logprobs(decoder: Decoder, tokens: TokenIds, num_top: int = 0) -> Iterator[tuple[TokenLogprob, ...]]:
    """The log-probabilities of all tokens of a text but the first, those of some tokens from each pass."""
    size = max(1, min(_CHUNK_TOKENS, _CHUNK_BYTES // (4 * decoder.vocab_size)))
    for start in range(0, len(tokens) - 1, size):
        stop = min(start + size, len(tokens) - 1)
        rows, following = decoder.logits(tokens[:stop], stop - start), tokens[start + 1 : stop + 1].tolist()
        yield tuple(_logprob(row, token, num_top) for row, token in zip(rows, following, strict=True))


def logprobs_of(block: Block, num_tokens: int, num_top: int) -> tuple[TokenLogprob, ...]:
    """The log-probabilities of the first num_tokens tokens of a block, which still has its logits."""
    chosen = zip(block.tokens[:num_tokens].tolist(), block.chosen_from, strict=False)
    return tuple(_logprob(block.logits[row], token, num_top) for token, row in chosen)


def _logprob(row: Row, token: int, num_top: int) -> TokenLogprob:
    logprobs = log_softmax(row)
    likeliest = top_k(row, num_top) if num_top else np.zeros(0, np.intp)
    ranked = likeliest[np.lexsort((likeliest, -row[likeliest]))][:num_top].tolist()
    return TokenLogprob(token, float(logprobs[token]), tuple((each, float(logprobs[each])) for each in ranked))
