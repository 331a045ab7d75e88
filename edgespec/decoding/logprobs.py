"""How likely emitted tokens were: log-probabilities under the target's own logits. Pure."""

from typing import NamedTuple

import numpy as np

from edgespec.decoding.likelihood import log_softmax
from edgespec.decoding.scheduler import Block
from edgespec.decoding.truncation import top_k
from edgespec.types import Row


class TokenLogprob(NamedTuple):
    """How likely a token was to the model, before penalties, biases, temperature and all cuts.

    logprob: The natural logarithm of its probability.
    top: The likeliest tokens in its place with their log-probabilities, the likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprobs_of(block: Block, num_tokens: int, num_top: int) -> tuple[TokenLogprob, ...]:
    """The log-probabilities of the first num_tokens tokens of a block, which still has its logits."""
    chosen = zip(block.tokens[:num_tokens].tolist(), block.chosen_from, strict=False)
    return tuple(_logprob(block.logits[row], token, num_top) for token, row in chosen)


def _logprob(row: Row, token: int, num_top: int) -> TokenLogprob:
    logprobs = log_softmax(row)
    likeliest = top_k(row, num_top) if num_top else np.zeros(0, np.intp)
    ranked = likeliest[np.lexsort((likeliest, -row[likeliest]))][:num_top].tolist()
    return TokenLogprob(token, float(logprobs[token]), tuple((each, float(logprobs[each])) for each in ranked))
