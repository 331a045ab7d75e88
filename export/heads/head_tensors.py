"""Tensors of a head by their names in its files and their roles in its graphs, checked for shape."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from edgespec.errors import SourceError
from edgespec.export.heads.head_source import HeadSource
from edgespec.export.sources import LoadedSource
from edgespec.export.tensors import StoredTensor

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
_TOGETHER = (("q_bias", "k_bias", "v_bias"), ("q_norm", "k_norm"))  # a layer has all of them or none


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

        Raises SourceError: One that each layer needs is missing, or one of several that belong together.
        """
        found = {}
        for role, name in LAYER_NAMES.items():
            tensor = self.take(prefix + name) if role in _LAYER_NEEDS else self.optional(prefix + name)
            if tensor is not None:
                found[f"{i}.{role}"] = tensor
        for roles in _TOGETHER:
            missing = [role for role in roles if f"{i}.{role}" not in found]
            if 0 < len(missing) < len(roles):
                self.take(prefix + LAYER_NAMES[missing[0]])
        return found

    def layers(self, first: str = "layers.0.") -> tuple[dict[str, StoredTensor], int]:
        """The roles of all decoder layers, of which there has to be one, and how many there are.

        first: What the names of the first layer begin with.

        Raises SourceError: A tensor that each layer needs is missing.
        """
        found, number = self.layer(first, 0), 1
        while self.has_layer(f"layers.{number}."):
            found |= self.layer(f"layers.{number}.", number)
            number += 1
        return found, number

    def has_layer(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._left)

    def require_all_taken(self, kind: str, prefix: str = "") -> None:
        """Raises SourceError: There is a tensor that would not be used, whose name begins with a prefix."""
        unused = [name for name in self._left if name.startswith(prefix) and not name.endswith(_IGNORED)]
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


def require_hidden_size(source: HeadSource, target: LoadedSource, size: int) -> None:
    """Raises SourceError: A head reads hidden states of another size than its target's."""
    if size != target.config.hidden_size:
        raise SourceError(
            f"{source.path} is a head for hidden states of {size} numbers, and those of {target.source.name} have "
            f"{target.config.hidden_size}; it was made for another model: name a head that was made for this one"
        )


def take_tensor(
    source: HeadSource, name: str, rows: int | None = None, columns: int | None = None
) -> StoredTensor:
    """A matrix of a head, or a vector, which has one row; of any number of rows and columns unless they are given.

    Raises SourceError: It is missing, or has another shape.
    """
    if (tensor := source.tensors.get(name)) is None:
        raise SourceError(f"{source.path} has no tensor {name}; the head is incomplete, fetch it again")
    rows, columns = tensor.rows if rows is None else rows, tensor.columns if columns is None else columns
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
