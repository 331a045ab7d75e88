"""The checkpoint of a training: weights, their means and progress in one safetensors file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgespec import ModelError, expected_tokens
from edgespec.training.head_file import read_tensors, write_tensors
from edgespec.training.network import HEAD, HeadShape
from edgespec.training.packing import Floats

_MEAN = "mean."  # before the name of a weight


@dataclass(frozen=True)
class TrainingProgress:
    """How far a training is.

    num_drafts: That were trained on, in all.
    num_batches: Whose loss was a number, in all.
    used_s: Time of training, that before an interruption included.
    best: Agreement of the best weights with held-out texts, by position; empty before a run's first comparison.
    """

    num_drafts: int = 0
    num_batches: int = 0
    used_s: float = 0.0
    best: tuple[float, ...] = ()
    num_since_best: int = 0

    @property
    def tokens_per_pass(self) -> float:
        return expected_tokens(self.best)[-1]


class TrainingCheckpoint(NamedTuple):
    """The state of a training; the means of its weights have their names."""

    weights: Mapping[str, Floats]
    means: Mapping[str, Floats]
    progress: TrainingProgress


def write_checkpoint(path: Path, checkpoint: TrainingCheckpoint) -> None:
    """Write all but the agreement. Raises DiskFull: There is no room; an earlier file stays."""
    weights, means, progress = checkpoint
    metadata = {
        "num_drafts": str(progress.num_drafts),
        "num_batches": str(progress.num_batches),
        "used_s": str(progress.used_s),
    }
    trained = {_MEAN + name: each for name, each in means.items() if name != HEAD}
    write_tensors(path, {**weights, **trained}, metadata)


def read_checkpoint(path: Path, shape: HeadShape) -> TrainingCheckpoint:
    """A checkpoint of a head of this shape.

    One without means has its weights in their place.

    Raises ModelError: It is damaged, or of another head.
    """
    tensors, stated = read_tensors(path)
    if not all(np.isfinite(each).all() for each in tensors.values()):
        raise ModelError(f"{path} holds weights that are not numbers; remove it and train again")
    weights = {name: each for name, each in tensors.items() if not name.startswith(_MEAN)}
    means = {name: tensors.get(_MEAN + name, each) for name, each in weights.items()}
    if any({name: each.shape for name, each in kind.items()} != shape.weights for kind in (weights, means)):
        raise ModelError(f"{path} is of a head of other sizes; remove its folder and train again")
    progress = TrainingProgress(int(stated["num_drafts"]), int(stated["num_batches"]), float(stated["used_s"]))
    return TrainingCheckpoint(weights, means, progress)
