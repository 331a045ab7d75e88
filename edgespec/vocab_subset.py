"""A drafter whose head knows the frequent tokens only, as a decoder over the whole vocabulary."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgespec.errors import ManifestError
from edgespec.types import Decoder, Interruptible, Logits, TokenIds

# Of a token that the head does not know; far from infinity, so that arithmetic with it stays quiet.
UNKNOWN = np.float32(-1e30)


def read_subset(path: Path, vocab_size: int) -> TokenIds:
    """Token of each row of the head, [num_rows], ascending.

    Raises:
        ManifestError: The file is no such list.
    """
    try:
        tokens = np.load(path, allow_pickle=False)
    except OSError as error:
        raise ManifestError(f"{path} cannot be read ({error.strerror}); export the model again") from None
    except (ValueError, EOFError):  # numpy's advice is to allow pickles
        raise ManifestError(f"{path} is no list of tokens; export the model again") from None
    ascends = (
        tokens.ndim == 1 and tokens.dtype == np.int32 and len(tokens) > 0 and bool((np.diff(tokens) > 0).all())
    )
    if not ascends or tokens[0] < 0 or tokens[-1] >= vocab_size:
        raise ManifestError(f"{path} is no list of tokens of a vocabulary of {vocab_size}; export the model again")
    subset: TokenIds = tokens
    return subset


@dataclass(frozen=True, slots=True)
class SubsetDecoder:
    """decoder gives a row for each of tokens; other tokens get a logit that is never chosen."""

    decoder: Decoder
    tokens: TokenIds
    vocab_size: int

    @property
    def context_length(self) -> int:
        return self.decoder.context_length

    @property
    def num_fed(self) -> int:
        return self.decoder.num_fed

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        whole = np.full((num_last, self.vocab_size), UNKNOWN, np.float32)
        whole[:, self.tokens] = self.decoder.logits(tokens, num_last)
        return whole

    def interrupt(self) -> None:
        if isinstance(self.decoder, Interruptible):
            self.decoder.interrupt()
