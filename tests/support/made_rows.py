"""Verified rows of a head that guesses at random, beside a target that says one token behind each token."""

import numpy as np

from edgespec.draft.verified_rows import TargetRow, VerifiedRows, verify_rows
from edgespec.types import Logits

NUM_COLUMNS = 64


def made_rows(num_rows: int, seed: int) -> tuple[Logits, VerifiedRows]:
    """The head's rows, and what is kept of them beside the target's."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, NUM_COLUMNS, num_rows + 1).astype(np.int32)
    found = rng.normal(0, 1, (num_rows, NUM_COLUMNS)).astype(np.float32)
    wanted = (tokens[:-1] * 7 + 3) % NUM_COLUMNS
    said = [TargetRow(np.array([token], np.int32), np.zeros(1, np.float32)) for token in wanted]
    rows = verify_rows(found, said, tokens, None)
    return found, VerifiedRows(**{**vars(rows), "wanted": wanted.astype(np.int32)})
