"""Stored matrices of experts by their roles, {layer}.gate.{expert} and so on, for the layouts of all files."""

from collections.abc import Mapping

from edgespec.errors import SourceError
from edgespec.export.families import DecoderConfig
from edgespec.export.tensors import StoredTensor

# Names by family of the router and of one expert's gate, up and down in a Hugging Face checkpoint.
_MLP = ("mlp.gate", *(f"mlp.experts.{{number}}.{part}_proj" for part in ("gate", "up", "down")))
_SPARSE = (
    "block_sparse_moe.gate",
    *(f"block_sparse_moe.experts.{{number}}.{part}" for part in ("w1", "w3", "w2")),
)
_HUGGINGFACE = {"qwen3_moe": _MLP, "olmoe": _MLP, "mixtral": _SPARSE}
# In a GGUF file each is one matrix for all experts.
_GGUF = ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
# granitemoe's checkpoints have a router, gate and up of all experts, and down of all experts.
_GRANITE = ("router.layer", "input_linear", "output_linear")
_PARTS = ("gate", "up", "down")


def expert_tensors(
    path: object, config: DecoderConfig, stored: Mapping[str, StoredTensor], *, is_gguf: bool
) -> tuple[dict[str, StoredTensor], set[str]]:
    """Router and experts of all layers by role, checked for shape, and the names that they are stored under.

    Raises SourceError: one is missing or has another shape.
    """
    reader = _Reader(path, config, stored)
    for i in range(config.num_layers):
        if is_gguf:
            reader.read_whole(i, [f"blk.{i}.{name}.weight" for name in _GGUF])
        elif config.architecture == "granitemoe":
            reader.read_fused(i, [f"model.layers.{i}.block_sparse_moe.{name}.weight" for name in _GRANITE])
        else:
            names = _HUGGINGFACE[config.architecture]
            reader.read_apart(i, [f"model.layers.{i}.{name}.weight" for name in names])
    return reader.found, reader.used


class _Reader:
    def __init__(self, path: object, config: DecoderConfig, stored: Mapping[str, StoredTensor]) -> None:
        assert config.routing is not None
        self._path, self._stored, self._num_experts = path, stored, config.routing.num_experts
        hidden, inner = config.hidden_size, config.intermediate_size
        self._hidden = hidden
        self._shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        self.found: dict[str, StoredTensor] = {}
        self.used: set[str] = set()

    def read_whole(self, i: int, names: list[str]) -> None:
        """A router, and one matrix of all experts for each part."""
        self._router(i, names[0])
        for part, name in zip(_PARTS, names[1:], strict=True):
            rows, columns = self._shapes[part]
            self._split(i, part, self._take(name, self._num_experts * rows, columns), rows, 0, rows)

    def read_fused(self, i: int, names: list[str]) -> None:
        """A router, a matrix with gate and up of each expert, and one with down."""
        self._router(i, names[0])
        rows, columns = self._shapes["gate"]
        both = self._take(names[1], self._num_experts * 2 * rows, columns)
        self._split(i, "gate", both, 2 * rows, 0, rows)
        self._split(i, "up", both, 2 * rows, rows, rows)
        rows, columns = self._shapes["down"]
        self._split(i, "down", self._take(names[2], self._num_experts * rows, columns), rows, 0, rows)

    def read_apart(self, i: int, names: list[str]) -> None:
        """A router, and a matrix for each part of each expert."""
        self._router(i, names[0])
        for part, name in zip(_PARTS, names[1:], strict=True):
            for number in range(self._num_experts):
                tensor = self._take(name.format(number=number), *self._shapes[part])
                self.found[f"{i}.{part}.{number}"] = tensor

    def _router(self, i: int, name: str) -> None:
        self.found[f"{i}.router"] = self._take(name, self._num_experts, self._hidden)

    def _split(self, i: int, part: str, whole: StoredTensor, step: int, start: int, rows: int) -> None:
        for number in range(self._num_experts):
            self.found[f"{i}.{part}.{number}"] = whole.part(number * step + start, rows)

    def _take(self, name: str, rows: int, columns: int) -> StoredTensor:
        if (tensor := self._stored.get(name)) is None:
            raise SourceError(f"{self._path} has no tensor {name}; the file is incomplete or damaged")
        if (tensor.rows, tensor.columns) != (rows, columns):
            raise SourceError(
                f"{self._path}: tensor {name} is {tensor.rows}×{tensor.columns}, its settings require "
                f"{rows}×{columns}; the file is damaged"
            )
        self.used.add(name)
        return tensor
