"""Rows over the whole vocabulary, from rows of a vocabulary head that was trimmed to some tokens."""

import numpy as np

from edgespec.types import Logits, TokenIds

# The logit of a token without a row; far from infinity, so that arithmetic with it raises no warning.
UNKNOWN = np.float32(-1e30)


class WholeRows:
    """Widens rows; those without a trimmed vocabulary head stay as they are.

    A call may overwrite what the one before it gave.

    columns: The token of each column of a row, ascending; None where each token has one.
    """

    def __init__(self, subset: TokenIds | None, vocab_size: int) -> None:
        self.columns, self._vocab_size = subset, vocab_size
        self._rows: Logits = np.zeros((0, vocab_size), np.float32)

    @property
    def num_columns(self) -> int:
        """How many logits a row of the vocabulary head has."""
        return self._vocab_size if self.columns is None else len(self.columns)

    def __call__(self, rows: Logits) -> Logits:
        if self.columns is None:
            return rows
        if len(self._rows) < len(rows):
            self._rows = np.full((len(rows), self._vocab_size), UNKNOWN, np.float32)
        self._rows[: len(rows), self.columns] = rows
        return self._rows[: len(rows)]
