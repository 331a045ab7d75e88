"""Tensors of a head by their names, checked for shape, and those that it takes from its target."""

import re
from dataclasses import replace

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


def count_names(source: HeadSource, pattern: str) -> int:
    """How many numbers from 0 on the tensors have in a pattern with one group."""
    found = {int(match[1]) for name in source.tensors if (match := re.fullmatch(pattern, name))}
    return next(i for i in range(len(found) + 1) if i not in found)


def require_hidden_size(source: HeadSource, found: int, target: LoadedSource) -> None:
    """Raises SourceError: The head reads hidden states of another size than the target's."""
    wanted = target.config.hidden_size
    if found != wanted:
        raise SourceError(
            f"{source.path} reads hidden states of {found} numbers, and those of {target.source.name} have {wanted}; "
            "give the target that the head was made for"
        )


def fit_vocabulary(source: HeadSource, heads: list[StoredTensor], target: LoadedSource) -> TokenIds | None:
    """Cut vocabulary heads, in place, to the target's vocabulary; returns the tokens of their rows if they have fewer.

    Raises VocabularyMismatch: They have more or fewer rows than padding explains.
    """
    rows, wanted = heads[0].rows, target.config.vocab_size
    if abs(rows - wanted) > _MAX_PADDING:
        raise VocabularyMismatch(
            f"{source.path} has {rows} tokens, and {target.source.name} has {wanted}; give the target that the head "
            "was made for"
        )
    if rows > wanted:
        heads[:] = [head.part(0, wanted) for head in heads]
    return np.arange(rows, dtype=np.int32) if rows < wanted else None


def sort_rows(heads: list[StoredTensor], tokens: TokenIds) -> TokenIds:
    """Bring the rows of vocabulary heads, in place, into the order of their tokens, which are returned."""
    order = np.argsort(tokens, kind="stable")
    heads[:] = [replace(head, row_order=order.astype(np.intp)) for head in heads]
    return tokens[order]
