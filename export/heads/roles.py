"""Tensors of a head by their roles in its graphs, checked for shape; what the head lacks is its target's."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from edgespec.errors import SourceError, VocabularyMismatch
from edgespec.export.heads.head_source import HeadSource
from edgespec.export.sources import LoadedSource
from edgespec.export.tensors import StoredTensor
from edgespec.types import TokenIds

# Derived constants, and copies of the target's that only training reads.
_IGNORED = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
LAYER_NAMES = {
    **{part: f"self_attn.{part}_proj.weight" for part in "qkvo"},
    **{f"{part}_bias": f"self_attn.{part}_proj.bias" for part in "qkv"},
    **{f"{part}_norm": f"self_attn.{part}_norm.weight" for part in "qk"},
    "input_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    **{part: f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
}
_LAYER_NEEDS = ("q", "k", "v", "o", "mlp_norm", "gate", "up", "down")


@dataclass
class Reader:
    """Takes the tensors of a head one by one; what nobody took at the end is what no graph would use.

    prefix: Names may begin with it, such as "model.".
    """

    source: HeadSource
    prefix: str = "model."

    def __post_init__(self) -> None:
        self._left = {name.removeprefix(self.prefix): tensor for name, tensor in self.source.tensors.items()}

    def optional(self, name: str) -> StoredTensor | None:
        return self._left.pop(name, None)

    def take(self, name: str) -> StoredTensor:
        """Raises SourceError: There is no such tensor."""
        if (found := self.optional(name)) is None:
            raise SourceError(
                f"{self.source.path} has no tensor {name}, which a head of its kind needs; it is incomplete or of "
                "a kind that is not read"
            )
        return found

    def layer(self, prefix: str, i: int) -> dict[str, StoredTensor]:
        """The roles of a decoder layer whose tensors begin with a prefix.

        Raises SourceError: One that each layer needs is missing.
        """
        found = {}
        for role, name in LAYER_NAMES.items():
            tensor = self.take(prefix + name) if role in _LAYER_NEEDS else self.optional(prefix + name)
            if tensor is not None:
                found[f"{i}.{role}"] = tensor
        return found

    def has_layer(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._left)

    def require_all_taken(self, kind: str) -> None:
        """Raises SourceError: There is a tensor that would not be used."""
        unused = [name for name in self._left if not name.endswith(_IGNORED)]
        if unused:
            raise SourceError(f"{self.source.path} has tensor {unused[0]}, which no {kind} head uses; unsupported")


def require_shapes(
    source: HeadSource, tensors: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, int]]
) -> None:
    """Raises SourceError: A tensor has another shape than its role asks for."""
    for role, tensor in tensors.items():
        wanted = shapes.get(role) or shapes.get(role.partition(".")[2])
        if wanted is not None and (tensor.rows, tensor.columns) != wanted:
            raise SourceError(
                f"{source.path}: tensor {tensor.name} is {tensor.rows}×{tensor.columns}, wanted "
                f"{wanted[0]}×{wanted[1]}; the file is damaged"
            )


def require_vocabulary(source: HeadSource, target: LoadedSource, size: int | None) -> None:
    """Raises VocabularyMismatch: A head is for another number of tokens than its target has."""
    if size is not None and size != target.config.vocab_size:
        raise VocabularyMismatch(
            f"{source.path} is a head for a vocabulary of {size} tokens, and {target.source.name} has "
            f"{target.config.vocab_size}; it was made for another model: name a head that was made for this one"
        )


def require_hidden_size(source: HeadSource, target: LoadedSource, size: int) -> None:
    """Raises SourceError: A head reads hidden states of another size than its target's."""
    if size != target.config.hidden_size:
        raise SourceError(
            f"{source.path} is a head for hidden states of {size} numbers, and those of {target.source.name} have "
            f"{target.config.hidden_size}; it was made for another model: name a head that was made for this one"
        )


def read_tokens(source: HeadSource, num_rows: int, vocab_size: int) -> TokenIds | None:
    """The target's token of each row of the vocabulary head in the order of the rows, [num_rows].

    d2t is added to the number of a row; t2d marks the tokens that have a row. None without either.

    Raises SourceError: They contradict each other, or a token stands twice or is not in the vocabulary.
    """
    d2t, t2d = source.integers.get("d2t"), source.integers.get("t2d")
    if d2t is None and t2d is None:
        return None
    if t2d is not None:
        if t2d.count != vocab_size:
            raise VocabularyMismatch(
                f"{source.path}: t2d has {t2d.count} entries, and the target {vocab_size} tokens; the head was "
                "made for another model"
            )
        marked = np.flatnonzero(t2d.values())
    tokens = marked if d2t is None else d2t.values() + np.arange(d2t.count)
    problem = None
    if len(tokens) != num_rows:
        problem = f"name {len(tokens)} tokens, and its vocabulary head has {num_rows} rows"
    elif tokens.min() < 0 or tokens.max() >= vocab_size:
        problem = f"name tokens up to {tokens.max()}, and the target has {vocab_size}"
    elif len(np.unique(tokens)) != num_rows:
        problem = "name a token twice"
    elif t2d is not None and not np.array_equal(np.sort(tokens), marked):
        problem = "contradict each other"
    if problem is not None:
        raise SourceError(f"{source.path}: its lists of tokens (d2t, t2d) {problem}; the file is damaged")
    return tokens.astype(np.int32)


def sort_rows(head: StoredTensor, tokens: TokenIds) -> tuple[StoredTensor, TokenIds]:
    """A vocabulary head with its rows in the order of their tokens, and these."""
    order = np.argsort(tokens)
    if np.array_equal(order, np.arange(len(order))):
        return head, tokens
    return replace(head, row_order=order.astype(np.intp)), tokens[order]
