"""From the names and settings of a source to one description that the graph builder understands.

A family is a few settings over one table of tensor names: llama (Llama 2 and 3, SmolLM2, TinyLlama), mistral,
qwen2 (and 2.5), qwen3, granite and smollm3, each from GGUF metadata and from a Hugging Face config.json.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edgespec.errors import SourceError
from edgespec.export.blocks import Floats
from edgespec.export.tensors import Index, StoredTensor

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "granite", "smollm3")
# GGUF stores the query and key rows of these in pairs; a mistral file calls itself llama.
_PERMUTED = ("llama", "mistral", "granite", "smollm3")
_MAX_CONTEXT_LENGTH = 1 << 20


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape and constants of a decoder-only transformer with RMSNorm, rotary positions and SwiGLU.

    The scales are granite's, and 1 elsewhere.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_eps: float
    inv_freq: Floats  # rotary frequencies, [head_dim / 2]
    sliding_window: int | None = None  # how many tokens back attention sees
    layers_without_rope: frozenset[int] = frozenset()
    attention_scale: float  # of query · key
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0


# Role in the graph -> name in a GGUF file and in a Hugging Face checkpoint. {i} is the layer.
_TENSOR_NAMES = {
    "embedding": ("token_embd.weight", "model.embed_tokens.weight"),
    "final_norm": ("output_norm.weight", "model.norm.weight"),
    "head": ("output.weight", "lm_head.weight"),
    "{i}.input_norm": ("blk.{i}.attn_norm.weight", "model.layers.{i}.input_layernorm.weight"),
    "{i}.q": ("blk.{i}.attn_q.weight", "model.layers.{i}.self_attn.q_proj.weight"),
    "{i}.k": ("blk.{i}.attn_k.weight", "model.layers.{i}.self_attn.k_proj.weight"),
    "{i}.v": ("blk.{i}.attn_v.weight", "model.layers.{i}.self_attn.v_proj.weight"),
    "{i}.q_bias": ("blk.{i}.attn_q.bias", "model.layers.{i}.self_attn.q_proj.bias"),
    "{i}.k_bias": ("blk.{i}.attn_k.bias", "model.layers.{i}.self_attn.k_proj.bias"),
    "{i}.v_bias": ("blk.{i}.attn_v.bias", "model.layers.{i}.self_attn.v_proj.bias"),
    "{i}.q_norm": ("blk.{i}.attn_q_norm.weight", "model.layers.{i}.self_attn.q_norm.weight"),
    "{i}.k_norm": ("blk.{i}.attn_k_norm.weight", "model.layers.{i}.self_attn.k_norm.weight"),
    "{i}.o": ("blk.{i}.attn_output.weight", "model.layers.{i}.self_attn.o_proj.weight"),
    "{i}.mlp_norm": ("blk.{i}.ffn_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"),
    "{i}.gate": ("blk.{i}.ffn_gate.weight", "model.layers.{i}.mlp.gate_proj.weight"),
    "{i}.up": ("blk.{i}.ffn_up.weight", "model.layers.{i}.mlp.up_proj.weight"),
    "{i}.down": ("blk.{i}.ffn_down.weight", "model.layers.{i}.mlp.down_proj.weight"),
}
_OPTIONAL = ("head", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm")
# Derived constants that some checkpoints carry; rope_freqs is read before the roles are.
_IGNORED = ("rope_freqs.weight", "rotary_emb.inv_freq")


def config_from_gguf(
    path: object, metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> DecoderConfig:
    """Raises SourceError: another architecture, a key missing, or a rotary scaling that is not known."""
    architecture = metadata.get("general.architecture")
    if architecture not in FAMILIES:
        raise SourceError(f"{path} has architecture '{architecture}'; known are {', '.join(FAMILIES)}")

    def get(key: str, default: Any = None) -> Any:
        return _positive(path, f"{architecture}.{key}", metadata.get(f"{architecture}.{key}", default))

    def count(key: str, default: Any = None) -> int:
        return _whole(path, f"{architecture}.{key}", get(key, default))

    def has(key: str) -> bool:
        return f"{architecture}.{key}" in metadata

    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise SourceError(f"{path} uses rotary scaling '{scaling}'; known are none, linear and llama3 factors")
    heads, hidden = count("attention.head_count"), count("embedding_length")
    head_dim = count("attention.key_length", hidden // heads)
    if get("rope.dimension_count", head_dim) != head_dim:
        raise SourceError(f"{path} rotates only a part of each head, which is not supported")
    inv_freq = _inv_freq(get("rope.freq_base", 10000.0), head_dim)
    if scaling == "linear":
        inv_freq /= get("rope.scaling.factor")
    if (factors := tensors.get("rope_freqs.weight")) is not None:
        inv_freq /= factors.vector()
    return DecoderConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=count("feed_forward_length"),
        num_layers=count("block_count"),
        num_heads=heads,
        num_kv_heads=count("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=_vocab_size(path, tensors, "token_embd.weight"),
        context_length=min(count("context_length"), _MAX_CONTEXT_LENGTH),
        rms_eps=get("attention.layer_norm_rms_epsilon"),
        inv_freq=inv_freq,
        sliding_window=count("attention.sliding_window") if has("attention.sliding_window") else None,
        layers_without_rope=_every_fourth(count("block_count")) if architecture == "smollm3" else frozenset(),
        attention_scale=get("attention.scale", head_dim**-0.5),
        embedding_scale=get("embedding_scale", 1.0),
        residual_scale=get("residual_scale", 1.0),
        logit_scale=1 / get("logit_scale", 1.0),
    )


def config_from_huggingface(
    path: object, stated: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> DecoderConfig:
    """Raises SourceError: another model type, a key missing, or a feature the graph does not have."""
    architecture = stated.get("model_type")
    if architecture not in FAMILIES:
        raise SourceError(f"{path} has model type '{architecture}'; known are {', '.join(FAMILIES)}")
    if stated.get("hidden_act", "silu") != "silu" or stated.get("use_sliding_window"):
        raise SourceError(
            f"{path} uses another activation than silu or a sliding window in some layers; both are not supported"
        )
    if stated.get("partial_rotary_factor", 1) != 1:
        raise SourceError(f"{path} rotates only a part of each head, which is not supported")

    def get(key: str, default: Any = None) -> Any:
        return _positive(path, key, default if stated.get(key) is None else stated[key])

    def count(key: str, default: Any = None) -> int:
        return _whole(path, key, get(key, default))

    heads, hidden = count("num_attention_heads"), count("hidden_size")
    head_dim = count("head_dim", hidden // heads)
    rope = stated.get("rope_parameters") or stated.get("rope_scaling") or {}
    theta = _positive(path, "rope_theta", rope.get("rope_theta") or get("rope_theta", 10000.0))
    return DecoderConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=count("intermediate_size"),
        num_layers=count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=count("num_key_value_heads", heads),
        head_dim=head_dim,
        vocab_size=_vocab_size(path, tensors, "model.embed_tokens.weight"),
        context_length=min(count("max_position_embeddings"), _MAX_CONTEXT_LENGTH),
        rms_eps=get("rms_norm_eps"),
        sliding_window=count("sliding_window")
        if architecture == "mistral" and stated.get("sliding_window")
        else None,
        layers_without_rope=_without_rope(path, stated),
        attention_scale=get("attention_multiplier", head_dim**-0.5),
        embedding_scale=get("embedding_multiplier", 1.0),
        residual_scale=get("residual_multiplier", 1.0),
        logit_scale=1 / get("logits_scaling", 1.0),
        inv_freq=_scaled(path, _inv_freq(theta, head_dim), rope),
    )


def _without_rope(path: object, stated: Mapping[str, Any]) -> frozenset[int]:
    """smollm3 lists 1 for each layer with rotary positions, or says every how many layers has none."""
    uses = stated.get("no_rope_layers")
    if uses is None:
        every_fourth = stated["model_type"] == "smollm3"
        return _every_fourth(stated["num_hidden_layers"]) if every_fourth else frozenset()
    if len(uses) != stated["num_hidden_layers"] or not set(uses) <= {0, 1}:
        raise SourceError(f"{path}: no_rope_layers is {uses}, wanted 0 or 1 for each layer")
    return frozenset(i for i, rotates in enumerate(uses) if not rotates)


def _every_fourth(num_layers: int) -> frozenset[int]:
    return frozenset(range(3, num_layers, 4))


def _positive(path: object, key: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
        raise SourceError(f"{path}: {key} is {value!r}, wanted a positive number")
    return value


def _whole(path: object, key: str, value: Any) -> int:
    if not isinstance(value, int):
        raise SourceError(f"{path}: {key} is {value!r}, wanted a whole number")
    return value


def _vocab_size(path: object, tensors: Mapping[str, StoredTensor], name: str) -> int:
    if name not in tensors:
        raise SourceError(f"{path} has no tensor {name}; it is incomplete or no language model")
    return tensors[name].rows


def _inv_freq(theta: float, head_dim: int) -> Floats:
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    return np.exp(-exponents * math.log(theta)).astype(np.float32)


def _scaled(path: object, inv_freq: Floats, rope: Mapping[str, Any]) -> Floats:
    """Rotary scaling as in transformers' modeling_rope_utils: none, linear, llama3."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return inv_freq
    if kind == "linear":
        return inv_freq / np.float32(_positive(path, "factor", rope.get("factor")))
    if kind != "llama3":
        raise SourceError(f"{path} uses rotary scaling '{kind}'; known are default, linear and llama3")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, trained = (_positive(path, name, rope.get(name)) for name in names)
    turns = trained * inv_freq / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    scaled: Floats = ((1 - smooth) / factor + smooth) * inv_freq
    return scaled.astype(np.float32)


def tensors_by_role(
    path: object, config: DecoderConfig, stored: Mapping[str, StoredTensor], *, is_gguf: bool
) -> dict[str, StoredTensor]:
    """Every weight under its role, checked for shape; a missing head means that it is the embedding.

    Raises:
        SourceError: A tensor missing, of another shape, or one that the graph would not use.
    """
    column = 0 if is_gguf else 1
    found: dict[str, StoredTensor] = {}
    used = set()
    for role, names in _TENSOR_NAMES.items():
        for i in range(config.num_layers) if "{i}" in role else [0]:
            name = names[column].format(i=i)
            if name in stored:
                used.add(name)
                found[role.format(i=i)] = _checked(path, config, role, stored[name])
            elif not role.endswith(_OPTIONAL):
                raise SourceError(f"{path} has no tensor {name}; the file is incomplete or damaged")
    if unused := [name for name in stored if name not in used and not name.endswith(_IGNORED)]:
        raise SourceError(f"{path} has tensor {unused[0]}, which no {config.architecture} model uses; unsupported")
    _check_norms(path, config, found)
    if is_gguf and config.architecture in _PERMUTED:
        found |= _unpermuted(config, found)
    return found


def _check_norms(path: object, config: DecoderConfig, found: Mapping[str, StoredTensor]) -> None:
    """Only qwen3 normalises queries and keys, and it does so in every layer."""
    num_norms = sum(role.endswith(("q_norm", "k_norm")) for role in found)
    wanted = 2 * config.num_layers if config.architecture == "qwen3" else 0
    if num_norms != wanted:
        raise SourceError(
            f"{path} has {num_norms} query and key norms, {config.architecture} has {wanted}; unsupported"
        )


def _checked(path: object, config: DecoderConfig, role: str, tensor: StoredTensor) -> StoredTensor:
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    wanted = {
        "embedding": (config.vocab_size, hidden), "head": (config.vocab_size, hidden), "final_norm": (1, hidden),
        "input_norm": (1, hidden), "mlp_norm": (1, hidden),
        "q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q),
        "q_bias": (1, q), "k_bias": (1, kv), "v_bias": (1, kv),
        "q_norm": (1, config.head_dim), "k_norm": (1, config.head_dim),
        "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner),
    }[role.removeprefix("{i}.")]  # fmt: skip
    if (tensor.rows, tensor.columns) != wanted:
        raise SourceError(
            f"{path}: tensor {tensor.name} is {tensor.rows}×{tensor.columns}, its settings ask for "
            f"{wanted[0]}×{wanted[1]}; the file is damaged"
        )
    return tensor


def _unpermuted(config: DecoderConfig, found: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """GGUF stores llama's query and key rows in pairs (2i, 2i + 1); the graph rotates (i, i + d/2)."""

    def halves(num_heads: int) -> Index:
        rows = np.arange(num_heads * config.head_dim).reshape(num_heads, config.head_dim // 2, 2)
        return rows.swapaxes(1, 2).reshape(-1)

    orders = {"q": halves(config.num_heads), "k": halves(config.num_kv_heads)}
    weights = {
        role: replace(tensor, row_order=orders[role[-1]])
        for role, tensor in found.items()
        if role.endswith((".q", ".k"))
    }
    biases = {
        role: replace(tensor, rows=tensor.columns, columns=1, row_order=orders[role.removesuffix("_bias")[-1]])
        for role, tensor in found.items()
        if role.endswith((".q_bias", ".k_bias"))
    }
    return weights | biases
