"""Rows of logits as greedy sampling reads them, of a target that chooses where it runs.

What comes from there is the likeliest token of each row, 8 bytes; what is read is a row in which no other token
has a chance. So sampling, acceptance and whoever learns of a pass need no second way.
"""

import numpy as np

from edgespec.sampling import SamplingParams
from edgespec.types import ArgmaxDecoder, Decoder, Logits, TokenIds, TreeDecoder


def read_by(sampling: SamplingParams, target: Decoder) -> Decoder:
    """What an answer is decoded from: rows of the likeliest tokens where these are enough, the target's own else.

    Trees are run by a target itself.
    """
    is_enough = sampling.is_greedy and not sampling.has_penalties
    if (
        is_enough
        and isinstance(target, ArgmaxDecoder)
        and target.has_argmax
        and not isinstance(target, TreeDecoder)
    ):
        return GreedyRows(target)
    return target


class GreedyRows:
    """A decoder whose rows are −inf but for the likeliest token, which has 0."""

    def __init__(self, decoder: ArgmaxDecoder) -> None:
        self._decoder = decoder
        self._rows = np.zeros((0, decoder.vocab_size), np.float32)
        self._ids = np.zeros(0, np.int64)  # where its first rows are not −inf

    @property
    def vocab_size(self) -> int:
        return self._decoder.vocab_size

    @property
    def context_length(self) -> int:
        return self._decoder.context_length

    @property
    def num_fed(self) -> int:
        return self._decoder.num_fed

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        """Rows behind the last num_last tokens, [num_last, vocab_size], not to be written, until the next call.

        Where one holds what is no finite number they come whole, and it is for the sampler to judge.
        """
        found = self._decoder.argmax(tokens, num_last)
        return self._filled(found.ids) if found.is_sound.all() else self._decoder.logits(tokens, num_last)

    def _filled(self, ids: np.typing.NDArray[np.int64]) -> Logits:
        """Rows are kept and unmarked, for to fill one of 152,000 takes as long as to search it."""
        self._rows[np.arange(len(self._ids)), self._ids] = -np.inf
        if len(ids) > len(self._rows):
            self._rows = np.full((len(ids), self.vocab_size), -np.inf, np.float32)
        self._ids = ids
        self._rows[np.arange(len(ids)), ids] = 0
        rows = self._rows[: len(ids)]
        rows.flags.writeable = False
        return rows
