"""Token ids that a caller gives as numbers. Knows nothing of text."""

import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from edgespec.errors import UsageError
from edgespec.types import TokenIds


def is_ids(found: Any) -> bool:
    """Whether something is meant as token ids: an array, or a sequence that begins with a whole number."""
    if isinstance(found, np.ndarray):
        return True
    if not isinstance(found, Sequence) or isinstance(found, (str, bytes)) or not found:
        return False
    return isinstance(found[0], (int, np.integer)) and not isinstance(found[0], bool)


def parse_ids(found: Any, vocab_size: int, what: str) -> TokenIds:
    """Token ids of a vocabulary, [num_tokens].

    Args:
        what: What they are to the caller, for the message, such as "the prompt".

    Raises UsageError: They are no row of whole numbers, or one of them is no token of the vocabulary.
    """
    wanted = f"wanted token ids, whole numbers from 0 to {vocab_size - 1}"
    if isinstance(found, (list, tuple)) and not found:
        return np.zeros(0, np.int32)
    try:
        ids = np.asarray(found if is_ids(found) else None)
    except ValueError:  # it holds lists of several lengths
        ids = np.asarray(None)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise UsageError(f"{what} is {reprlib.repr(found)}; {wanted}")
    if not len(ids):
        return np.zeros(0, np.int32)
    for extreme in (int(ids.min()), int(ids.max())):
        if not 0 <= extreme < vocab_size:
            raise UsageError(f"{what} has the token {extreme}, which the model lacks; {wanted}")
    return ids.astype(np.int32)
