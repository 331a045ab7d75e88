"""Tensors of a head by their names, checked for shape, and those that it takes from its target."""

import re

import numpy as np

from edgespec.errors import SourceError, VocabularyMismatch
from edgespec.export.heads.head_source import HeadSource
from edgespec.export.sources import LoadedSource
from edgespec.export.tensors import StoredTensor
from edgespec.types import TokenIds

# Rows by which a vocabulary may be padded; two that differ by more are different ones.
_MAX_PADDING = 1024


def take_tensor(source: HeadSource, name: str, rows: int, columns: int) -> StoredTensor:
    """A matrix of a head, or a vector, which has one row.

    Raises SourceError: It is missing, or has another shape.
    """
    tensor = source.tensors.get(name)
    if tensor is None:
        raise SourceError(f"{source.path} has no tensor {name}; the head is incomplete, fetch it again")
    if (tensor.rows, tensor.columns) != (rows, columns):
        raise SourceError(
            f"{source.path}: tensor {name} is {tensor.rows}×{tensor.columns}, wanted {rows}×{columns}; the head "
            "was made for another target, or is damaged"
        )
    return tensor


def take_any(source: HeadSource, name: str) -> StoredTensor:
    """A tensor of any shape; raises SourceError where it is missing."""
    if name not in source.tensors:
        raise SourceError(f"{source.path} has no tensor {name}; the head is incomplete, fetch it again")
    return source.tensors[name]


def count_names(source: HeadSource, pattern: str) -> int:
    """How many numbers from 0 on the tensors have in a pattern with one group."""
    found = {int(match[1]) for name in source.tensors if (match := re.fullmatch(pattern, name))}
    return next(i for i in range(len(found) + 1) if i not in found)


def fit_vocabulary(source: HeadSource, heads: list[StoredTensor], target: LoadedSource) -> TokenIds | None:
    """Cut vocabulary heads, in place, to the target's tokens; returns the tokens of their rows if they have fewer.

    Raises VocabularyMismatch: They have more or fewer rows than padding explains.
    """
    rows, wanted = heads[0].rows, target.config.vocab_size
    if abs(rows - wanted) > _MAX_PADDING:
        raise VocabularyMismatch(
            f"{source.path} is a head for {rows} tokens, and {target.source.name} has {wanted}; it was made for "
            "another model: name a head that was made for this one"
        )
    if rows > wanted:
        heads[:] = [head.part(0, wanted) for head in heads]
    return np.arange(rows, dtype=np.int32) if rows < wanted else None
