"""A drafter whose head has rows for the frequent tokens only, as a decoder over the whole vocabulary."""

from pathlib import Path

import numpy as np

from edgespec.decoders import Cache, Can, Decoder, ForwardingDecoder, Pass, Rows
from edgespec.decoding.whole_rows import UNKNOWN
from edgespec.errors import ManifestError
from edgespec.manifest import Manifest
from edgespec.types import TokenIds


def find_subset(folder: Path, manifest: Manifest) -> TokenIds | None:
    """The token of each row of a model's logits; None where each token has a row. Raises as read_subset does."""
    return (
        None if manifest.vocab_subset is None else read_subset(folder / manifest.vocab_subset, manifest.vocab_size)
    )


def read_subset(path: Path, vocab_size: int) -> TokenIds:
    """Read the token of each row of the head, [num_rows], ascending.

    Raises ManifestError: The file is not such a list.
    """
    try:
        tokens: TokenIds = np.load(path, allow_pickle=False)
    except OSError as error:
        raise ManifestError(f"{path} cannot be read ({error.strerror}); export the model again") from None
    except (ValueError, EOFError):  # numpy's advice is to allow pickles
        raise ManifestError(f"{path} is not a list of tokens; export the model again") from None
    is_list = tokens.ndim == 1 and tokens.dtype == np.int32 and len(tokens) > 0
    if not (is_list and (np.diff(tokens) > 0).all() and tokens[0] >= 0 and tokens[-1] < vocab_size):
        raise ManifestError(f"{path} is not a list of tokens below {vocab_size}; export the model again")
    return tokens


class SubsetDecoder(ForwardingDecoder):
    """A decoder with logits for some tokens; the others get a logit that is never chosen."""

    def __init__(self, decoder: Decoder, tokens: TokenIds, vocab_size: int) -> None:
        super().__init__(decoder)
        self.vocab_size, self._tokens = vocab_size, tokens

    @property
    def can(self) -> Can:
        return self._decoder.can._replace(best=False)

    @property
    def cache(self) -> Cache | None:
        return self._decoder.cache

    def run(self, given: Pass) -> Rows:
        rows = self._decoder.run(given)
        whole = np.full((given.num_rows, self.vocab_size), UNKNOWN, np.float32)
        whole[:, self._tokens] = rows.logits
        return rows._replace(logits=whole)
