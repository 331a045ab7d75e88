"""Rows of drafting heads: corrected by what was learned, and widened to the whole vocabulary.

A draft never changes a text, and so neither does a correction of what is drafted. Knows neither graphs nor files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgespec.decoding.decoder import Correct
from edgespec.types import Logits, TokenIds, append

_TOKEN_BITS = 20  # of an id; three times as many fit an int64

Contexts = npt.NDArray[np.int64]  # [num_rows, 2]: the token after which a row is alone, and with the one before it


def contexts_of(before: TokenIds, tokens: TokenIds) -> Contexts:
    """The contexts of rows after tokens, each of which has another one before it."""
    alone = tokens.astype(np.int64)
    return np.stack([alone, ((before.astype(np.int64) + 1) << _TOKEN_BITS) + alone], axis=1)


def contexts_in(tokens: TokenIds, num_last: int) -> Contexts:
    """The contexts of the rows after the last tokens of a text."""
    return contexts_of(append(tokens[:1], tokens[:-1])[-num_last:], tokens[-num_last:])


def contexts_in_tree(tokens: TokenIds, nodes: TokenIds, parents: Sequence[int]) -> Contexts:
    """The contexts of the rows after a text and after each node of a tree."""
    last = append(tokens[-1:], nodes)
    before = last[np.array(parents, np.intp) + 1]
    return contexts_of(append(tokens[-2:-1], before) if len(tokens) > 1 else append(tokens, before), last)


@dataclass(frozen=True, kw_only=True, eq=False)
class Correction:
    """Biases of a row's columns by the one or two tokens before (the Markov head of DSpark has those by one).

    places: Contexts and columns that have a bias, each as context * num_columns + column, ascending, [num_biases].
    biases: [num_biases].
    num_columns: Of the head's rows.
    """

    places: npt.NDArray[np.int64]
    biases: npt.NDArray[np.float32]
    num_columns: int

    def __call__(self, rows: Logits, contexts: Contexts) -> Logits:
        """Corrected rows, [num_rows, num_columns]."""
        rows = rows.copy()
        edges = np.searchsorted(self.places, np.stack([contexts, contexts + 1]) * self.num_columns)
        for row, starts, stops in zip(rows, *edges.tolist(), strict=True):
            for start, stop in zip(starts, stops, strict=True):
                row[self.places[start:stop] % self.num_columns] += self.biases[start:stop]
        return rows


def correct(correction: Correct | None, rows: Logits, contexts: Contexts) -> Logits:
    """Rows with a correction, if there is one."""
    return rows if correction is None else correction(rows, contexts)


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
