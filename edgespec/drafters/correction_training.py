"""Finds the correction with which a head's rows come nearest to its target's, in numpy.

Where a head gives q and its target p, the correction is a softmax regression, on the one and two tokens before,
of what q lacks. It minimizes the cross-entropy of p, which is convex, by Adagrad (Duchi et al., 2011), over the
columns that either model thought likely.
"""

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgespec.decoding.head_rows import Correction
from edgespec.drafters.verified_rows import VerifiedRows

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class TrainingRule:
    """How a correction is trained; docs/log/training.md has what was compared.

    rate: Of a step, before Adagrad divides it.
    decay: Share of a bias that a step takes away.
    """

    rate: float = 0.3
    decay: float = 1e-4
    num_epochs: int = 4
    batch_rows: int = 32


def train_correction(
    rows: VerifiedRows, num_columns: int, rule: TrainingRule, seed: int = 0
) -> Generator[None, None, Correction]:
    """Train on verified rows, in steps of about a millisecond; the generator returns the correction."""
    # Empty places of a row count as its first column; their gradient is zero.
    columns = np.where(rows.columns < 0, rows.columns[:, :1], rows.columns)
    places, at = np.unique(rows.contexts[:, :, None] * num_columns + columns[:, None], return_inverse=True)
    at = at.reshape(len(rows), 2, -1)
    biases, squares = np.zeros(len(places), np.float32), np.full(len(places), 1e-6, np.float32)
    order = np.random.default_rng(seed)
    for _ in range(rule.num_epochs):
        shuffled = order.permutation(len(rows))
        for start in range(0, len(rows), rule.batch_rows):
            yield
            batch = shuffled[start : start + rule.batch_rows]
            changed, which = np.unique(at[batch], return_inverse=True)
            by_row = _gradients(rows, batch, biases[at[batch]].sum(axis=1))
            gradients = np.bincount(which.ravel(), np.stack([by_row, by_row], axis=1).ravel())
            squares[changed] += gradients**2
            kept = (1 - rule.decay) * biases[changed]
            biases[changed] = kept - rule.rate * gradients / np.sqrt(squares[changed])
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
