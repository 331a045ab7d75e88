"""What crosses a module boundary: arrays, and the two protocols that the scheduler knows."""

from collections.abc import Sequence
from threading import Event
from typing import Protocol

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]  # [num_tokens]
Logits = npt.NDArray[np.float32]  # [num_rows, vocab_size]


class Decoder(Protocol):
    """A language model as a pure function of its tokens; a KV cache only makes it fast."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    @property
    def num_fed(self) -> int:
        """Tokens run so far: what the cache did not hold."""
        ...

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        """Logits that follow each of the last num_last tokens, [num_last, vocab_size].

        The next call from the same thread may overwrite the array: copy what must outlive it.

        Raises:
            ContextOverflow: tokens are more than context_length.
        """
        ...


class Sampler(Protocol):
    """The rule that picks a token from one row of logits."""

    def __call__(self, logits: npt.NDArray[np.float32], tokens: TokenIds) -> int:
        """The token that follows tokens, [num_tokens], given its logits, [vocab_size]."""
        ...


class Drafter(Protocol):
    """A source of guesses."""

    @property
    def name(self) -> str: ...

    def draft(self, tokens: TokenIds, num_tokens: int, sampler: Sampler, cancel: Event) -> TokenIds:
        """Guess up to num_tokens tokens that follow; fewer when cancelled or without a guess."""
        ...


def append(tokens: TokenIds, more: Sequence[int] | TokenIds) -> TokenIds:
    return np.concatenate([tokens, np.asarray(more, np.int32)])
