"""Rows of a drafting head beside what its target said there, and the correction that is learned from them.

An AnswerLog notes what the target says while an answer is made; the head's own rows are read afterwards. Where a
head gives q and its target p, the correction is a softmax regression, on the one and two tokens before, of what q
lacks. It minimizes the cross-entropy of p, which is convex, by Adagrad (Duchi et al., 2011), over the columns that
either model thought likely.
"""

from collections.abc import Generator
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec.decoding.acceptance import Acceptance, rows_of
from edgespec.decoding.head_rows import Contexts, Correction, contexts_in
from edgespec.decoding.tree import Tree
from edgespec.types import Logits, Row, Sampler, TokenIds, append

NUM_LIKELY = 16  # of the target's tokens that a row keeps
NUM_GUESSED = 32  # of the head's columns
_WIDTH = NUM_LIKELY + NUM_GUESSED
_FAR = 9.0  # logits below the largest one, from which on a token is left out
_MOST_ROWS = 1024  # of an answer
_NONE = np.float16(-np.inf)


class TargetRow(NamedTuple):
    """The tokens that a target thought likely at one position, with their logits."""

    ids: TokenIds
    logits: npt.NDArray[np.float32]


def likely_tokens(row: Row) -> TargetRow:
    """The likeliest tokens of a row, NUM_LIKELY at most; 0.1 ms for 49,000 tokens."""
    row = np.asarray(row)
    near = np.flatnonzero(row >= row.max() - _FAR)
    if len(near) > NUM_LIKELY:
        near = near[np.argpartition(row[near], -NUM_LIKELY)[-NUM_LIKELY:]]
    return TargetRow(near.astype(np.int32), row[near].astype(np.float32))


@dataclass(slots=True)
class AnswerLog:
    """The target's likely tokens after each token of an answer, as far as they were noted.

    text: The prompt and the answer.
    rows: After the tokens of the text from `first` on, one for each.
    num_read: Rows for which the head's own were read.
    """

    text: TokenIds = field(default_factory=lambda: np.zeros(0, np.int32))
    first: int = 0
    rows: list[TargetRow] = field(default_factory=list)
    num_read: int = 0

    def noting(self, accept: Acceptance) -> Acceptance:
        """An acceptance that notes the rows after tokens that the answer has, not after rejected ones."""

        def accept_and_note(tokens: TokenIds, draft: Tree, logits: Logits, sampler: Sampler) -> TokenIds:
            emitted = accept(tokens, draft, logits, sampler)
            if not self.rows:
                self.first = len(tokens) - 1
            if len(self.rows) < _MOST_ROWS:
                self.rows += [likely_tokens(logits[row]) for row in rows_of(draft, emitted)]
                self.text = append(tokens, emitted)
            return emitted

        return accept_and_note


@dataclass(frozen=True, kw_only=True, eq=False)
class VerifiedRows:
    """Rows of a head and of its target after one token each; only the columns that either thought likely.

    contexts: Of the rows, [num_rows, 2].
    wanted: The column of the token that the answer goes on with, -1 where the head has none, [num_rows].
    columns: In no order; -1 for none, [num_rows, width].
    logits: Of the head in these columns, [num_rows, width].
    rest: The logarithm of what the head's other columns weigh together, [num_rows].
    chances: Of the target, 0 in columns that it thought unlikely, [num_rows, width].
    """

    contexts: Contexts
    wanted: npt.NDArray[np.int32]
    columns: npt.NDArray[np.int32]
    logits: npt.NDArray[np.float16]
    rest: npt.NDArray[np.float32]
    chances: npt.NDArray[np.float16]

    def __len__(self) -> int:
        return len(self.wanted)

    def followed_by(self, newer: "VerifiedRows", most: int) -> "VerifiedRows":
        """These rows and newer ones; the oldest go where there are more than `most`."""
        return VerifiedRows(
            **{
                each.name: np.concatenate([getattr(self, each.name), getattr(newer, each.name)])[-most:]
                for each in fields(self)
            }
        )


def no_rows() -> VerifiedRows:
    """Rows of nothing, to which others can be added."""
    return VerifiedRows(
        contexts=np.zeros((0, 2), np.int64),
        wanted=np.zeros(0, np.int32),
        columns=np.zeros((0, _WIDTH), np.int32),
        logits=np.zeros((0, _WIDTH), np.float16),
        rest=np.zeros(0, np.float32),
        chances=np.zeros((0, _WIDTH), np.float16),
    )


def verify_rows(
    found: Logits, target: list[TargetRow], tokens: TokenIds, columns: TokenIds | None
) -> VerifiedRows:
    """A head's rows beside its target's.

    Args:
        found: After the last tokens but one, [num_rows, num_columns].
        target: After the same tokens.
        tokens: The text with the token that follows the last row.
        columns: The token of each of the head's columns; None where each token has one.
    """
    kept = [_keep(row, said, columns) for row, said in zip(found, target, strict=True)]
    chosen, logits, rest, chances = (np.array(part) for part in zip(*kept, strict=True))
    largest = np.finfo(np.float16).max
    halves = np.where(np.isneginf(logits), _NONE, np.clip(logits, -largest, largest))
    return VerifiedRows(
        contexts=contexts_in(tokens[:-1], len(found)),
        wanted=column_of(tokens[-len(found) :], columns).astype(np.int32),
        columns=chosen.astype(np.int32),
        logits=halves.astype(np.float16),
        rest=rest.astype(np.float32),
        chances=chances.astype(np.float16),
    )


def column_of(tokens: TokenIds, columns: TokenIds | None) -> npt.NDArray[np.intp]:
    """The column of each token, -1 where the head has none."""
    if columns is None:
        return tokens.astype(np.intp)
    places = np.minimum(np.searchsorted(columns, tokens), len(columns) - 1)
    return np.where(columns[places] == tokens, places, -1)


def _keep(
    row: Row, said: TargetRow, columns: TokenIds | None
) -> tuple[npt.NDArray[np.intp], Row, float, npt.NDArray[np.float32]]:
    """The columns that either thought likely, the head's logits, what others weigh, the target's chances."""
    wanted = column_of(said.ids, columns)
    chances = np.exp(said.logits - said.logits.max())
    chances /= chances.sum()
    wanted, chances = wanted[wanted >= 0], chances[wanted >= 0]
    best = np.argpartition(row, -NUM_GUESSED)[-NUM_GUESSED:] if len(row) > NUM_GUESSED else np.arange(len(row))
    others = np.setdiff1d(best, wanted)
    kept = np.concatenate([wanted, others])
    shifted = np.exp(row - row.max())
    left = max(float(shifted.sum() - shifted[kept].sum()), 1e-12)
    num_empty = _WIDTH - len(kept)
    return (
        np.concatenate([kept, np.full(num_empty, -1)]),
        np.concatenate([row[kept], np.full(num_empty, -np.inf, np.float32)]),
        float(np.log(left) + row.max()),
        np.concatenate([chances, np.zeros(_WIDTH - len(chances), np.float32)]),
    )


Floats = npt.NDArray[np.float32]


# docs/log/training.md has what was compared.
_RATE, _DECAY = 0.3, 1e-4  # of a step, before Adagrad divides it; the share of a bias that it takes away
_NUM_EPOCHS, _BATCH_ROWS = 4, 32


def train_correction(rows: VerifiedRows, num_columns: int) -> Generator[None, None, Correction]:
    """Train on verified rows, in steps of about a millisecond; the generator returns the correction."""
    # Empty places of a row count as its first column; their gradient is zero.
    columns = np.where(rows.columns < 0, rows.columns[:, :1], rows.columns)
    places, at = np.unique(rows.contexts[:, :, None] * num_columns + columns[:, None], return_inverse=True)
    at = at.reshape(len(rows), 2, -1)
    biases, squares = np.zeros(len(places), np.float32), np.full(len(places), 1e-6, np.float32)
    order = np.random.default_rng(0)
    for _ in range(_NUM_EPOCHS):
        shuffled = order.permutation(len(rows))
        for start in range(0, len(rows), _BATCH_ROWS):
            yield
            batch = shuffled[start : start + _BATCH_ROWS]
            changed, which = np.unique(at[batch], return_inverse=True)
            by_row = _gradients(rows, batch, biases[at[batch]].sum(axis=1))
            gradients = np.bincount(which.ravel(), np.stack([by_row, by_row], axis=1).ravel())
            squares[changed] += gradients**2
            kept = (1 - _DECAY) * biases[changed]
            biases[changed] = kept - _RATE * gradients / np.sqrt(squares[changed])
    return Correction(places=places, biases=biases, num_columns=num_columns)


def _gradients(rows: VerifiedRows, batch: npt.NDArray[np.intp], added: Floats) -> Floats:
    """How the cross-entropy changes with the logits of the kept columns, once corrected; [num_batch, width]."""
    logits, rest = rows.logits[batch].astype(np.float32) + added, rows.rest[batch][:, None]
    largest = np.maximum(logits.max(axis=1, keepdims=True), rest)
    weights = np.exp(logits - largest)
    weights /= weights.sum(axis=1, keepdims=True) + np.exp(rest - largest)
    chances = rows.chances[batch].astype(np.float32)
    # A token that the head cannot draft counts in no row.
    gradients: Floats = weights * chances.sum(axis=1, keepdims=True) - chances
    return gradients
