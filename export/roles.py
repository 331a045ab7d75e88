"""Stored tensors by their roles in the graph, for the names and layouts of each kind of file.

Experts have the roles {layer}.gate.{expert}, {layer}.up.{expert} and {layer}.down.{expert}.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from typing import NamedTuple

import numpy as np

from edgespec.errors import SourceError
from edgespec.export.decoder_config import DecoderConfig
from edgespec.export.families import FAMILIES, NAMES, NUMBERED_EXPERTS, Family
from edgespec.export.routing import Routing
from edgespec.export.settings import UnreadLayout
from edgespec.export.tensors import Index, StoredTensor, Tensors

PARTS = ("gate", "up", "down")
LAYER_TENSORS: dict[str, tuple[str, str]] = NAMES["layer"]
_TENSOR_NAMES: dict[str, tuple[str, str]] = NAMES["model"] | {
    f"{{i}}.{role}": (f"blk.{{i}}.{gguf}", f"model.layers.{{i}}.{huggingface}")
    for role, (gguf, huggingface) in LAYER_TENSORS.items()
}
# Transformers' name of mlp_norm in families with a norm after attention.
_MLP_NORM_OF_TWO = "model.layers.{i}.pre_feedforward_layernorm.weight"
# Roles whose rows one matrix stacks.
_FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
_LAYER_INPUT = frozenset({"input_gate", "input_projection", "added_norm"})
_CONVOLUTION = frozenset({"conv", "conv_in", "conv_out"})
_ENDINGS = ("", "_bias", "_norm")
_ATTENTION = frozenset({"o", "q_gate", "o_bias", "sinks", *(f"{part}{end}" for part in "qkv" for end in _ENDINGS)})
_OPTIONAL = ("head", "q_bias", "k_bias", "v_bias", "o_bias", "sinks", "q_gate", "output_scale", "mamba_conv_bias")
_SHARED_NAMES = ("blk.{i}.ffn_%s_shexp.weight", "model.layers.{i}.mlp.shared_mlp.%s_proj.weight")
# Roles of tensors that a checkpoint may have though a layer reads the keys and values of another one.
_UNREAD = ("k", "v", "k_bias", "v_bias", "k_norm")
# Derived constants in some checkpoints; those of rotary positions are read with the settings.
_IGNORED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight", "rotary_emb.inv_freq")


def tensors_by_role(
    path: object, config: DecoderConfig, stored: Tensors, *, is_gguf: bool
) -> dict[str, StoredTensor]:
    """Every weight by its role, checked for shape; without a head the embedding is the head.

    Raises SourceError: A tensor is missing, has another shape, or would not be used by the graph.
    """
    family = FAMILIES[config.architecture]
    column = 0 if is_gguf else 1
    stored = _split_qkv(path, config, stored) if is_gguf else stored
    stored = _split_stacks(path, config, stored, column)
    found: dict[str, StoredTensor] = {}
    used: set[str] = set()
    if config.routing is not None:
        experts = _Experts(path, config, stored, config.routing, is_gguf)
        experts.read()
        found, used = experts.found, experts.used
    for role, name in _names(family, column).items():
        layers = _layers_of(config, role)
        own_names = [name.format(i=i) for i in layers]
        # A bias that some layers have is missing in the others.
        part = role.removeprefix("{i}.")
        may_lack = role.endswith(_OPTIONAL) or part in family.may_lack
        is_needed = not may_lack or any(own in stored for own in own_names) or part in family.needs
        for i, own in zip(layers, own_names, strict=True):
            if own in stored:
                used.add(own)
                found[role.format(i=i)] = _require_shape(path, stored[own], _shape(config, role, i))
            elif is_needed:
                raise _lacks(path, own)
    unread = [_TENSOR_NAMES[f"{{i}}.{role}"][column] for role in _UNREAD]
    used |= {name.format(i=i) for name in unread for i in config.sharing_layers}
    if unused := [name for name in stored if name not in used and not _changes_nothing(name, stored[name])]:
        raise UnreadLayout(
            f"{path} has tensor {unused[0]}, which no {config.architecture} model uses; unsupported"
        )
    found = {role: unpaired(config, role, tensor, is_gguf=is_gguf) for role, tensor in found.items()}
    if not is_gguf and family.gain_addend:
        gains = {role: tensor for role, tensor in found.items() if role.endswith("norm")}
        found |= {role: replace(tensor, addend=family.gain_addend) for role, tensor in gains.items()}
    return found


def _layers_of(config: DecoderConfig, role: str) -> Sequence[int]:
    """The layers that have a role; that of the whole model has the number 0."""
    part, layers = role.removeprefix("{i}."), [*range(config.num_layers)]
    if not config.layer_input_size and (part in _LAYER_INPUT or part.startswith("layer_")):
        return []
    if "{i}" not in role:
        return [0]
    if part[:1] in "kv" and part[1:] in _ENDINGS:
        layers = [i for i in layers if part[0] in config.projections(i)]
    if part in _CONVOLUTION:
        return [i for i in layers if config.layers[i].convolved]
    if part.startswith("delta_"):
        return [i for i in layers if config.layers[i].delta]
    if part.startswith("mamba_"):
        return [i for i in layers if config.layers[i].mamba]
    return [i for i in layers if part not in _ATTENTION or config.layers[i].attends]


def _lacks(path: object, name: str) -> SourceError:
    return UnreadLayout(
        f"{path} has no tensor {name}; it is incomplete, or stores its weights in a way that is not read"
    )


def _changes_nothing(name: str, tensor: StoredTensor) -> bool:
    """True for a derived constant, and for a bias of zeros, as old GPTQ files have for every matrix."""
    return name.endswith(_IGNORED) or (
        name.endswith("_proj.bias") and tensor.rows == 1 and not tensor.vector().any()
    )


def _names(family: Family, column: int) -> dict[str, str]:
    """Names by role, without the layer norms that the family lacks, and without experts."""
    names = {
        role: both[column]
        for role, both in _TENSOR_NAMES.items()
        if not (role.startswith("{i}") and role.endswith("norm")) or role.removeprefix("{i}.") in family.norms
    }
    if family.is_mixture:
        names = {role: name for role, name in names.items() if not role.endswith((".gate", ".up", ".down"))}
    if column == 1 and {"attended_norm", "mlp_norm"} <= set(family.norms):
        names["{i}.mlp_norm"] = _MLP_NORM_OF_TWO
    return names | {role: both[column] for role, both in family.names.items() if role in names}


def _stacks(config: DecoderConfig, column: int) -> dict[str, dict[str, Index]]:
    """The rows of several roles in one stored matrix, by its name and the names that each role has alone."""
    family, found = FAMILIES[config.architecture], dict[str, dict[str, Index]]()
    for i, layer in enumerate(config.layers):
        alone = {part: _TENSOR_NAMES[f"{{i}}.{part}"][column].format(i=i) for part in LAYER_TENSORS}
        for kind in family.fused:
            sizes = {alone[part]: _shape(config, f"{{i}}.{part}")[0] for part in _FUSED[kind]}
            if config.routing is not None:  # of the MLP beside the experts
                names = [_SHARED_NAMES[column].format(i=i) % part for part in _FUSED[kind]]
                sizes = dict.fromkeys(names, config.routing.shared_size)
            name = family.names.get(f"{{i}}.{kind}", NAMES["fused"][kind])[column].format(i=i)
            found[name] = _one_after_another(sizes)
        if family.has_delta and layer.attends:  # head by head in turn
            both = alone["q"], alone["q_gate"]
            found[alone["q"]] = dict(zip(both, orders_of_gated(config), strict=True))
        for kind, orders in layer.delta.joined().items() if layer.delta else ():
            name = NAMES["joined"][kind][column].format(i=i)
            found[name] = {alone[f"delta_{part}"]: order for part, order in orders.items()}
        if layer.mamba:
            parts = ("mamba_z", "mamba_mixed", "mamba_dt")
            sizes = {alone[part]: _shape(config, f"{{i}}.{part}")[0] for part in parts}
            found[alone["mamba_z"].removesuffix(", z")] = _one_after_another(sizes)
    return found


def _one_after_another(sizes: Mapping[str, int]) -> dict[str, Index]:
    """The rows of each part of a matrix, by how many it has."""
    starts = accumulate(sizes.values(), initial=0)
    return {
        name: np.arange(start, start + size) for (name, size), start in zip(sizes.items(), starts, strict=False)
    }


def _split_stacks(path: object, config: DecoderConfig, stored: Tensors, column: int) -> dict[str, StoredTensor]:
    """The tensors of a source with the rows of each role apart, which some files have apart already."""
    apart = dict(stored)
    for name, parts in _stacks(config, column).items():
        if (parts.keys() - {name}) & stored.keys():
            continue
        if name not in stored:
            raise _lacks(path, name)
        num_rows = sum(map(len, parts.values()))
        whole = _require_shape(path, apart.pop(name), (num_rows, config.hidden_size))
        apart |= {own: _of_rows(whole, order) for own, order in parts.items()}
    return apart


def _split_qkv(path: object, config: DecoderConfig, stored: Tensors) -> dict[str, StoredTensor]:
    """The tensors of a GGUF file with queries, keys and values apart, which --fuse-qkv of llama.cpp has joined."""
    apart, gates = dict(stored), FAMILIES[config.architecture].has_delta
    for i, ending in product(range(config.num_layers), ("weight", "bias")):
        name = f"blk.{i}.attn_qkv.{ending}"
        if name not in stored or not config.layers[i].attends:
            continue
        whole, columns = apart.pop(name), config.hidden_size
        if ending == "bias":
            whole, columns = replace(whole, rows=whole.columns, columns=1), 1
        rows = {part: _shape(config, f"{{i}}.{part}", i)[0] for part in "qkv"}
        rows["q"] *= 1 + gates  # a gate behind each head's query
        _require_shape(path, whole, (sum(rows.values()), columns))
        parts = _one_after_another({f"blk.{i}.attn_{part}.{ending}": count for part, count in rows.items()})
        apart |= {own: _of_rows(whole, order) for own, order in parts.items()}
    return apart


def _of_rows(whole: StoredTensor, order: Index) -> StoredTensor:
    first, count = int(order[0]), len(order)
    is_run = np.array_equal(order, np.arange(first, first + count))
    return whole.part(first, count) if is_run else replace(whole, rows=count, row_order=order)


def orders_of_gated(config: DecoderConfig) -> list[Index]:
    """The rows of queries, and those of gates, in a matrix that has both head by head in turn."""
    heads = np.arange(2 * config.num_heads * config.head_dim).reshape(config.num_heads, 2, config.head_dim)
    return [heads[:, at].reshape(-1) for at in range(2)]


def layer_shapes(config: DecoderConfig, num_inputs: int, i: int = 0) -> dict[str, tuple[int, int]]:
    """Rows and columns by role within layer i whose queries, keys and values read num_inputs numbers."""
    head_dim, layer_input = config.head_size(i), config.layer_input_size
    q, kv = config.num_heads * head_dim, config.kv_heads(i) * head_dim
    hidden, inner = config.hidden_size, config.layers[i].intermediate_size or config.intermediate_size
    whole = FAMILIES[config.architecture].norms_whole_projections
    return {
        "q": (q, num_inputs), "k": (kv, num_inputs), "v": (kv, num_inputs), "o": (hidden, q),
        "q_bias": (1, q), "k_bias": (1, kv), "v_bias": (1, kv), "o_bias": (1, hidden),
        "sinks": (1, config.num_heads),
        "q_norm": (1, q if whole else head_dim), "k_norm": (1, kv if whole else head_dim),
        "input_norm": (1, hidden), "attended_norm": (1, hidden), "mlp_norm": (1, hidden), "fed_norm": (1, hidden),
        "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner),
        "input_gate": (layer_input, hidden), "input_projection": (hidden, layer_input), "added_norm": (1, hidden),
        "output_scale": (1, 1),
        "conv_in": (3 * hidden, num_inputs), "conv_out": (hidden, hidden),
        "conv": (hidden, max(layer.convolved for layer in config.layers)), "q_gate": (q, num_inputs),
        **next((layer.recurrent.shapes(hidden) for layer in config.layers if layer.recurrent), {}),
    }  # fmt: skip


def _shape(config: DecoderConfig, role: str, i: int = 0) -> tuple[int, int]:
    vocab_size, hidden, inputs = config.vocab_size, config.hidden_size, config.num_layers * config.layer_input_size
    shapes = {
        "embedding": (vocab_size, hidden), "head": (vocab_size, hidden), "final_norm": (1, hidden),
        "layer_embedding": (vocab_size, inputs), "layer_projection": (inputs, hidden),
        "layer_projection_norm": (1, config.layer_input_size),
    }  # fmt: skip
    return shapes[role] if role in shapes else layer_shapes(config, hidden, i)[role.removeprefix("{i}.")]


def _require_shape(path: object, tensor: StoredTensor, wanted: tuple[int, int]) -> StoredTensor:
    if wanted[0] == 1 and tensor.rows * tensor.columns == wanted[1]:  # a vector, which may be stored by heads
        return replace(tensor, rows=1, columns=wanted[1])
    if (tensor.rows, tensor.columns) != wanted:
        raise SourceError(
            f"{path}: tensor {tensor.name} is {tensor.rows}×{tensor.columns}, its settings require "
            f"{wanted[0]}×{wanted[1]}; the file is damaged"
        )
    return tensor


def unpaired(config: DecoderConfig, role: str, tensor: StoredTensor, *, is_gguf: bool) -> StoredTensor:
    """A tensor whose rows a file may store in pairs (2i, 2i + 1), in the order of the graph.

    The graph rotates (i, i + rotated / 2); others than queries and keys are as they were.
    """
    if ("gguf" if is_gguf else "huggingface") not in FAMILIES[config.architecture].paired_in:
        return tensor
    part = role.removesuffix("_bias").rpartition(".")[2]
    if part not in ("q", "k"):
        return tensor
    num_heads = config.num_heads if part == "q" else config.num_kv_heads
    rotated = next((layer.rotary.rotated for layer in config.layers if layer.rotary), config.head_dim)
    rows = np.arange(num_heads * config.head_dim).reshape(num_heads, config.head_dim)
    pairs = rows[:, :rotated].reshape(num_heads, rotated // 2, 2).swapaxes(1, 2).reshape(num_heads, rotated)
    order = np.concatenate([pairs, rows[:, rotated:]], axis=1).reshape(-1)
    if role.endswith("_bias"):
        return replace(tensor, rows=tensor.columns, columns=1, row_order=order)
    return replace(tensor, row_order=order)


class RoleRows(NamedTuple):
    """The rows of a stored matrix that have a role: those in an order, else all."""

    role: str
    order: Index | None = None


def places(config: DecoderConfig, *, is_gguf: bool) -> dict[str, list[RoleRows]]:
    """The roles of every stored matrix and vector by its name, but for experts."""
    family, column = FAMILIES[config.architecture], 0 if is_gguf else 1
    found = {
        name.format(i=i): [RoleRows(role.format(i=i))]
        for role, name in _names(family, column).items()
        for i in _layers_of(config, role)
    }
    stacks = _stacks(config, column).items()
    return found | {
        name: [RoleRows(alone.role, order) for own, order in parts.items() for alone in found.get(own, ())]
        for name, parts in stacks
    }


def _mlp_shape(config: DecoderConfig, part: str, size: int) -> tuple[int, int]:
    return (config.hidden_size, size) if part == "down" else (size, config.hidden_size)


@dataclass(slots=True)
class _Experts:
    """Routers and experts of all layers.

    found: What was taken, by role.
    used: The names that it is stored under.
    """

    path: object
    config: DecoderConfig
    stored: Tensors
    routing: Routing
    is_gguf: bool
    found: dict[str, StoredTensor] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def read(self) -> None:
        family, routing = FAMILIES[self.config.architecture], self.routing
        for i, part in product(range(routing.num_dense), PARTS):
            role = f"{{i}}.{part}"
            name = family.names.get(role, _TENSOR_NAMES[role])[0 if self.is_gguf else 1].format(i=i)
            self.found[f"{i}.{part}"] = self._take(name, *_mlp_shape(self.config, part, routing.dense_size))
        layers = range(routing.num_dense, self.config.num_layers)
        for i in layers:
            self._read_beside(i)
        for i, (name, (*mark, last)) in product(layers, self._held().items()):
            self._read_matrices(i, f"{self._prefix}.{i}.{name}", mark, last)

    @property
    def _prefix(self) -> str:
        return "blk" if self.is_gguf else "model.layers"

    @property
    def _needs(self) -> Collection[str]:
        return FAMILIES[self.config.architecture].needs

    def _held(self) -> Mapping[str, Sequence[str]]:
        """The parts of experts that each matrix of a layer holds, by its name: see NAMES."""
        first, held = f"{self._prefix}.{self.routing.num_dense}", FAMILIES[self.config.architecture].experts
        if self.is_gguf:
            is_stacked = f"{first}.ffn_gate_up_exps.weight" in self.stored
            held = NAMES["experts"]["gguf_stacked" if is_stacked else "gguf"]
        elif held is NUMBERED_EXPERTS and (stack := self.stored.get(f"{first}.mlp.experts.gate_up_proj")):
            held = NAMES["experts"]["stacked" if stack.columns == self.config.hidden_size else "turned"]
        return held

    def _read_beside(self, i: int) -> None:
        """Read the shared experts of layer i, and what chooses among experts beside the router."""
        routing, config = self.routing, self.config
        shapes = {"router_choice": (1, routing.num_experts), "shared.router": (1, config.hidden_size)}
        shapes |= {f"shared.{part}": _mlp_shape(config, part, routing.shared_size) for part in PARTS}
        for role, names in NAMES["beside_experts"].items():
            known = [f"{self._prefix}.{i}.{name}" for name in names]
            name = next((name for name in known if name in self.stored), known[0 if self.is_gguf else 1])
            is_shared = routing.shared_size and role.removeprefix("shared.") in PARTS
            if name in self.stored or role in self._needs or is_shared:
                self.found[f"{i}.{role}"] = self._take(name, *shapes[role])

    def _read_matrices(self, i: int, own: str, mark: Sequence[str], last: str) -> None:
        """Read one matrix of layer i: the router, or a part of one expert or of all."""
        num_experts, parts = self.routing.num_experts, [part for part in (*mark, last) if part not in "*T"]
        if parts == ["router"]:
            self.found[f"{i}.router"] = self._take(f"{own}.weight", num_experts, self.config.hidden_size)
            if (bias := self._take_bias(own, "router_bias", 1, num_experts)) is not None:
                self.found[f"{i}.router_bias"] = bias
            return
        rows, columns = _shape(self.config, last)
        if "{number}" in own:
            for number in range(num_experts):
                name = f"{own}.weight".format(number=number)
                self.found[f"{i}.{last}.{number}"] = self._take(name, rows, columns)
            return
        if own in self.stored and "T" in mark:
            stacks = {"": self._take(own, num_experts * columns, len(parts) * rows).transposed(num_experts)}
        else:
            name = own if own in self.stored else f"{own}.weight"
            stacks = {"": self._take(name, num_experts * len(parts) * rows, columns)}
        if (bias := self._take_bias(own, "expert_bias", num_experts, len(parts) * rows)) is not None:
            stacks["_bias"] = replace(bias, rows=bias.rows * bias.columns, columns=1)
        for (ending, stack), (at, part) in product(stacks.items(), enumerate(parts)):
            order = np.arange(at, len(parts) * rows, len(parts)) if "*" in mark else None
            start = 0 if "*" in mark else at * rows
            for number in range(num_experts):
                one = stack.part(number * len(parts) * rows + start, rows)
                self.found[f"{i}.{part}.{number}{ending}"] = replace(one, row_order=order)

    def _take(self, name: str, rows: int, columns: int) -> StoredTensor:
        if name not in self.stored:
            raise _lacks(self.path, name)
        self.used.add(name)
        return _require_shape(self.path, self.stored[name], (rows, columns))

    def _take_bias(self, own: str, need: str, rows: int, columns: int) -> StoredTensor | None:
        names = (f"{own}.bias", f"{own}_bias")
        name = next((name for name in names if name in self.stored), names[0])
        return self._take(name, rows, columns) if name in self.stored or need in self._needs else None
