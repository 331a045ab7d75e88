"""Models of every family with random weights, two layers and the head sizes of real ones; and cuts of texts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiny
from families import CONTEXT_LENGTHS, FAMILIES, MIXTURES
from mixtures import stored_experts
from reference_weights import draw

from edgespec.decoding.decoder import Decoder
from edgespec.export.convert import export_model
from edgespec.types import TokenIds

CONTEXT = 2048
_NUM_EXPERTS = ("n_routed_experts", "num_experts", "moe_num_experts", "num_local_experts")
_NUM_USED = ("moe_topk", "moe_k", "num_experts_per_tok")


class Shape(NamedTuple):
    """Sizes of a model; a family leaves out what it has no use for, as the window or the experts.

    experts: How many a layer has, of `inner` channels each.
    used: How many of them a token chooses.
    """

    head_dim: int
    heads: int = 4
    kv_heads: int = 1
    hidden: int = 288
    inner: int = 352
    window: int = 512
    experts: int = 8
    used: int = 2


def write_model(folder: Path, family: str, shape: Shape, precision: str, block_size: int = 32) -> Path:
    """Export a family's model of a shape; returns its folder."""
    source = folder / "source"
    if not source.exists():
        weights = draw(FAMILIES[family]["config"]["model_type"], _shapes(family, shape))
        if family in MIXTURES:
            weights = stored_experts(family, "huggingface", weights)
        tiny.write_huggingface(source, weights, config=_config(family, shape))
    made = folder / f"{precision}-{block_size}"
    longer = CONTEXT if family in CONTEXT_LENGTHS else None
    export_model(source, made, precision=precision, block_size=block_size, context_length=longer)
    return made


def walks(num_tokens: int, count: int, seed: int) -> Iterator[list[int]]:
    """Random cuts of a text: where each pass ends. Half of them begin with a prompt of any length.

    A walk of narrow passes takes a longer one now and then, so that its stretches lie in all parts of the text.
    """
    rng = np.random.default_rng(seed)
    for number in range(count):
        widest = (4, 17, 64, 300)[number % 4]
        ends = [int(rng.integers(1, num_tokens))] if number % 8 >= 4 else []
        while not ends or ends[-1] < num_tokens:
            width = rng.integers(1, (widest if rng.random() < 0.875 else max(widest, 64)) + 1)
            ends.append(min((ends[-1] if ends else 0) + int(width), num_tokens))
        yield ends


def count_differing(decoder: Decoder, tokens: TokenIds, cuts: Iterator[list[int]]) -> tuple[int, int]:
    """Rows that were compared with those of the whole text at once, and those of them that differ."""
    expected = decoder.logits(tokens, len(tokens)).copy()
    compared = differing = 0
    for ends in cuts:
        decoder.logits(np.array([tokens[0] + 1], np.int32), 1)  # holds another text
        for number, (start, stop) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            num_last = stop - start if number % 2 else 1  # as for a draft, and as for a prompt
            rows = decoder.logits(tokens[:stop], num_last)
            compared += num_last
            differing += int((rows != expected[stop - num_last : stop]).any(1).sum())
    return compared, differing


def random_tokens(num_tokens: int, seed: int = 0) -> TokenIds:
    return np.random.default_rng(seed).integers(0, tiny.VOCAB - 1, num_tokens).astype(np.int32)


def _config(family: str, shape: Shape) -> dict[str, Any]:
    config = dict(FAMILIES[family]["config"])
    config |= {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": 2,
        "max_position_embeddings": CONTEXT,
    }
    if config.get("sliding_window"):
        config["sliding_window"] = shape.window
    if "sliding_attention" in config.get("layer_types", ()):
        config["layer_types"] = ["sliding_attention", "full_attention"]
    elif "layer_types" in config:
        config["layer_types"] = config["layer_types"][:2]
    if family == "lfm2":
        config["block_auto_adjust_ff_dim"] = False
    if family.startswith("qwen3_5"):
        config |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    if family.startswith(
        "gemma4"
    ):  # the second layer sees all tokens, by heads twice as large, and has both matrices
        full = {"head_dim": 2 * shape.head_dim, "num_key_value_heads": shape.kv_heads}
        config |= {"per_layer_config": {"1": full}, "attention_k_eq_v": False}
    if "mamba_n_heads" in config and family != "granitemoehybrid":
        config |= {"mamba_n_heads": shape.hidden // 16, "mamba_d_head": 32, "mamba_d_state": 64}
        config |= {"mamba_d_ssm": 2 * shape.hidden}
    if "no_rope_layers" in config:
        config["no_rope_layers"] = [1, 0]
    if family in MIXTURES:
        config |= {"moe_intermediate_size": shape.inner}
        for keys, number in ((_NUM_EXPERTS, shape.experts), (_NUM_USED, shape.used)):
            config[next(key for key in keys if key in config)] = number
    if "shared_intermediate_size" in config:
        config["shared_intermediate_size"] = shape.inner
    rope = dict(config.get("rope_parameters") or {})
    scaled = rope.get("full_attention", rope)
    if scaled.get("rope_type") == "yarn":  # which stretches a context by 4
        if family == "qwen2-yarn":
            config["max_position_embeddings"] = CONTEXT // 4
        stretched = {**scaled, "original_max_position_embeddings": CONTEXT // 4}
        config["rope_parameters"] = {**rope, "full_attention": stretched} if scaled is not rope else stretched
    if family.startswith("phi3"):
        rope = dict(config["rope_parameters"])
        if "original_max_position_embeddings" in rope:  # one length of the context, as the export asks for
            half = int(shape.head_dim * config.get("partial_rotary_factor", 1)) // 2
            rope |= {"original_max_position_embeddings": CONTEXT // 2}
            rope |= {"short_factor": [1.0] * half, "long_factor": list(np.linspace(1, 8, half))}
        config |= {"rope_parameters": rope, "original_max_position_embeddings": CONTEXT // 2}
    return config


def _shapes(family: str, shape: Shape) -> dict[str, list[int]]:
    layers = ("layers.0.", "layers.1.")
    return {
        name: _size(
            name,
            len(old),
            shape._replace(head_dim=2 * shape.head_dim) if family == "gemma4" and "layers.1." in name else shape,
            by_head=family not in ("olmo2", "olmo3", "olmoe", "minimax_m2"),
            is_transposed=family.startswith("gpt_oss"),
            has_gates=family.startswith("qwen3_5"),
            num_groups=FAMILIES[family]["config"].get("mamba_n_groups", 1),
        )
        for name, old in FAMILIES[family]["shapes"].items()
        if ".layers." not in name or any(each in name for each in layers)
    }


# Of a Gated DeltaNet, with 2 heads of keys and 4 of values; None: the hidden size.
_DELTA: dict[str, tuple[int | None, ...]] = {
    "in_proj_qkv": (1024, None),
    "in_proj_z": (512, None),
    "in_proj_a": (4, None),
    "in_proj_b": (4, None),
    "conv1d": (1024, 1, 4),
    "out_proj": (None, 512),
    "norm": (128,),
    "A_log": (4,),
    "dt_bias": (4,),
}


def _mamba_size(part: str, shape: Shape, num_groups: int) -> list[int]:
    """The shape of a tensor of a Mamba-2 layer with heads of 32 values and keys of 64."""
    heads, values, mixed = shape.hidden // 16, 2 * shape.hidden, 2 * shape.hidden + 128 * num_groups
    of = {
        "in_proj.weight": [values + mixed + heads, shape.hidden],
        "conv1d.weight": [mixed, 1, 4],
        "conv1d.bias": [mixed],
        "norm.weight": [values],
        "out_proj.weight": [shape.hidden, values],
    }
    return of.get(part, [heads])


def _size(
    name: str,
    num_axes: int,
    shape: Shape,
    *,
    by_head: bool,
    is_transposed: bool,
    has_gates: bool,
    num_groups: int,
) -> list[int]:
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    of = {
        "q_proj": (2 * query if has_gates else query, shape.hidden),
        "k_proj": (key, shape.hidden),
        "v_proj": (key, shape.hidden),
        "qkv_proj": (query + 2 * key, shape.hidden),
        "o_proj": (shape.hidden, query),
        "gate_proj": (shape.inner, shape.hidden),
        "up_proj": (shape.inner, shape.hidden),
        "gate_up_proj": (2 * shape.inner, shape.hidden),
        "down_proj": (shape.hidden, shape.inner),
        **dict.fromkeys(("w1", "w3"), (shape.inner, shape.hidden)),
        "w2": (shape.hidden, shape.inner),
        "in_proj": (3 * shape.hidden, shape.hidden),
        "out_proj": (shape.hidden, query if "self_attn" in name else shape.hidden),
        "conv": (shape.hidden, 1, 3),
        "input_linear": (2 * shape.inner, shape.hidden),
        "output_linear": (shape.hidden, shape.inner),
        "q_norm": (shape.head_dim if by_head else query,),
        "k_norm": (shape.head_dim if by_head else key,),
        "query_layernorm": (shape.head_dim,),
        "key_layernorm": (shape.head_dim,),
        **dict.fromkeys(("q_layernorm", "k_layernorm"), (shape.head_dim,)),
        "embed_tokens": (tiny.VOCAB, shape.hidden),
        "lm_head": (tiny.VOCAB, shape.hidden),
    }
    own = name.removesuffix(".weight").partition(".linear_attn.")[2]
    if own:
        return [shape.hidden if each is None else each for each in _DELTA[own]]
    if ".mamba." in name:
        return _mamba_size(name.partition(".mamba.")[2], shape, num_groups)
    of_experts = {
        "mlp.gate": (shape.experts, shape.hidden),
        "mlp.gate.wg": (shape.experts, shape.hidden),
        "shared_expert_gate": (1, shape.hidden),
        "feed_forward.gate": (shape.experts, shape.hidden),
        **dict.fromkeys(("e_score_correction_bias", "expert_bias"), (1, shape.experts)),
        "router": (shape.experts, shape.hidden),
        ".experts.gate_up_proj": (shape.experts, 2 * shape.inner, shape.hidden),
        ".experts.down_proj": (shape.experts, shape.hidden, shape.inner),
        "router.bias": (shape.experts,),
        "experts.gate_up_proj_bias": (shape.experts, 2 * shape.inner),
        "experts.down_proj_bias": (shape.experts, shape.hidden),
    }
    own = name.removesuffix(".weight")
    for ending, size in of_experts.items():
        if own.endswith(ending):
            return [size[0], *size[:0:-1]] if is_transposed else list(size[-num_axes:])
    part = name.split(".")[-2]
    if own.endswith("layer_scalar"):
        return [1]
    return [shape.heads] if own.endswith("sinks") else list(of.get(part, (shape.hidden,))[:num_axes])
