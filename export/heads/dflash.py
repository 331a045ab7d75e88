"""Published heads that draft a block in one pass: Z Lab's DFlash, DeepSeek's DSpark and DFlash, and what SpecForge
and vLLM's speculators write.

All hold layers of Qwen3's kind. They differ in where settings are, in how these number the layers of the target,
in which row of a block predicts the first token of a draft, and in what a layer with a window sees. Z Lab and
DeepSeek number a layer i that is read after it, and where it is the last one mean the state after the final norm,
as transformers gives it (hidden_states[i + 1]); speculators counts from the embedding. The first row of a DSpark
head predicts the first token. A head of speculators says so in sample_from_anchor, or else in how many tokens it
proposes; the first row of those that say neither predicts nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from edgespec.errors import SourceError
from edgespec.export.decoder_config import DecoderConfig
from edgespec.export.heads.block_graphs import MARKOV_KINDS, SELECTOR, BlockShape
from edgespec.export.heads.head_source import FUSE_GRAPH, STEP_GRAPH, Dialect, HeadPlan, HeadSource, nested
from edgespec.export.heads.head_tensors import (
    Reader,
    layer_settings,
    layers_config,
    read_mask_token,
    read_numbers,
    require_hidden_size,
    require_layers,
    require_shapes,
    unpaired_heads,
)
from edgespec.export.heads.vocabulary import HeadVocabulary, read_markov, read_vocabulary, with_logits_of
from edgespec.export.roles import layer_shapes
from edgespec.export.settings import SourceSettings
from edgespec.export.sources import LoadedSource
from edgespec.export.tensors import StoredTensor, Tensors
from edgespec.manifest import Head
from edgespec.manifest.caches import KVCache

_MAX_BLOCK_TOKENS = 64
_PROJECTORS = ("dflash", "dspark")  # of SpecForge; others have parts of their own
_NORMS = ("input_norm", "q_norm", "k_norm")  # of all layers of Qwen3's kind
_WRAPPER = "logit_head."  # before the names of DSpark's own parts in early files of SpecForge


@dataclass(frozen=True, kw_only=True)
class _Stated:
    """The settings of a head, whichever dialect they are in.

    inner: The object of config.json that describes the layers; None where it is config.json itself.
    counts_from_known: As in BlockShape.
    """

    inner: str | None
    layers: tuple[int, ...]
    num_tokens: int
    mask_token_id: int
    skips_known: bool
    counts_from_known: bool = False


_Read = Callable[[HeadSource, LoadedSource], _Stated]


def _read_usual(source: HeadSource, target: LoadedSource) -> _Stated:
    """The settings of Z Lab's heads, and of those of DeepSeek, which name their layers."""
    own = _own(source)
    projector = own.get("projector_type", _PROJECTORS[0])
    if projector not in _PROJECTORS:
        raise SourceError(
            f"{source.settings.path}: projector_type is {projector}, which is not read; known are "
            f"{', '.join(_PROJECTORS)}"
        )
    num_layers = target.config.num_layers
    stated = own.get("target_layer_ids")
    layers = (
        read_numbers(source, "target_layer_ids", stated)
        if stated is not None or _is_deepseek(source)
        else spread_layers(num_layers, source.settings.count("num_hidden_layers"))
    )
    return _Stated(
        inner=None,
        layers=_behind(source, layers, num_layers),
        num_tokens=own.count("block_size"),
        mask_token_id=read_mask_token(source, own.get("mask_token_id"), target),
        skips_known=not own.get("sample_from_anchor", _is_deepseek(source) or _is_dspark(source)),
    )


def _read_speculators(source: HeadSource, target: LoadedSource) -> _Stated:
    settings, num_tokens = source.settings, source.settings.count("block_size", 8)
    ways = nested(settings, "speculators_config").get("proposal_methods") or [{}]
    proposes_all = ways[0].get("speculative_tokens") == num_tokens
    key = "aux_hidden_state_layer_ids"
    numbers = read_numbers(source, key, settings.get(key))
    layers = tuple(number - 1 for number in numbers)
    require_layers(source, layers, target.config.num_layers)
    return _Stated(
        inner="transformer_layer_config",
        layers=layers,
        num_tokens=num_tokens,
        mask_token_id=read_mask_token(source, settings.get("mask_token_id"), target),
        skips_known=not settings.get("sample_from_anchor", proposes_all),
        counts_from_known=True,
    )


def _own(source: HeadSource) -> SourceSettings:
    """Settings of the head beside its layers: on top of config.json, or in dflash_config."""
    on_top = {key: value for key, value in source.settings.values.items() if value is not None}
    return SourceSettings(source.settings.path, {**nested(source.settings, "dflash_config"), **on_top})


def spread_layers(num_layers: int, num_own: int) -> list[int]:
    """The layers that Z Lab's heads read unless they name them, one for each of their own."""
    if num_own == 1:
        return [num_layers // 2]
    return [round(1 + i * (num_layers - 4) / (num_own - 1)) for i in range(num_own)]


def _behind(source: HeadSource, numbers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Layers by which transformers' hidden states are meant; those of the last one are after the final norm."""
    require_layers(source, numbers, num_layers)
    return tuple(num_layers if number == num_layers - 1 else number for number in numbers)


def _plan(method: str, read: _Read, source: HeadSource, target: LoadedSource) -> HeadPlan:
    """The plan of a head; read gives what its settings say."""
    source = replace(
        source, tensors={name.removeprefix(_WRAPPER): tensor for name, tensor in source.tensors.items()}
    )
    stated = read(source, target)
    if not 2 <= stated.num_tokens <= _MAX_BLOCK_TOKENS:
        raise SourceError(
            f"{source.settings.path}: block_size is {stated.num_tokens}, wanted 2 to {_MAX_BLOCK_TOKENS}"
        )
    settings, reader = layer_settings(source, stated.inner), Reader(source)
    tensors, num_layers = reader.layers(needs=_NORMS)
    tensors |= {
        "final_norm": reader.take("norm.weight"),
        "fuse": reader.take("fc.weight"),
        "state_norm": reader.take("hidden_norm.weight"),
    }
    parts = len(stated.layers)
    columns = tensors["fuse"].columns
    require_hidden_size(source, target, columns // parts if columns % parts == 0 else columns)
    config = layers_config(settings, tensors, target, num_layers)
    vocabulary = read_vocabulary(reader, target, settings, config.hidden_size)
    if not vocabulary.has_own_head:
        config = with_logits_of(target, config)
    config = _with_own_scales(source, config)
    tensors |= vocabulary.tensors
    tensors |= (markov := _read_markov(reader, config, vocabulary))
    tensors |= (confidence := _read_confidence(reader, config, markov))
    tensors |= (selector := _read_selector(reader, config, vocabulary.own_order))
    tensors |= _read_kernels(reader, config)
    reader.require_all_taken(method)
    shapes = {**layer_shapes(config, config.hidden_size), "fuse": (config.hidden_size, columns)}
    shapes |= dict.fromkeys(("final_norm", "state_norm"), (1, config.hidden_size))
    require_shapes(source, tensors, shapes)
    block = _block_shape(source, config, stated, tensors)
    if _own(source).get("rope_is_neox_style", True) is False:
        tensors = unpaired_heads(tensors, config)
    return HeadPlan(
        head=Head(
            method=method,
            kind="block",
            target_layers=stated.layers,
            target_hidden_size=target.config.hidden_size,
            state_size=config.hidden_size,
            fuse_graph=FUSE_GRAPH,
            step_graphs=(STEP_GRAPH,) if markov or confidence or selector else (),
            block_tokens=stated.num_tokens,
            mask_token_id=stated.mask_token_id,
            has_confidence=bool(confidence),
        ),
        kv_cache=KVCache(num_layers=num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim),
        tensors=tensors,
        write_graphs=block.write_graphs,
        borrowed=vocabulary.borrowed,
        tokens=vocabulary.tokens,
        vocabulary_heads=("head", "markov_head"),
    )


def _block_shape(source: HeadSource, config: DecoderConfig, stated: _Stated, tensors: Tensors) -> BlockShape:
    """The shape of a block, of which the tensors say what parts it has."""
    has_selector, has_markov = "selector" in tensors, "markov_embedding" in tensors
    kernel, confidence = tensors.get("0.mlp_kernel"), tensors.get("confidence")
    return BlockShape(
        config=replace(config, context_length=config.context_length + stated.num_tokens),
        num_tokens=stated.num_tokens,
        skips_known=stated.skips_known,
        are_causal=_are_causal(source, config),
        counts_from_known=stated.counts_from_known,
        markov=SELECTOR if has_selector else _markov_kind(source) if has_markov else None,
        num_candidates=_own(source).count("selector_top_k") if has_selector else 0,
        num_taps=kernel.rows // 2 if kernel else 0,
        group_size=_own(source).get("conv_group_size", 1),
        has_confidence=confidence is not None,
        confidence_reads_token=confidence is not None and confidence.columns > config.hidden_size,
    )


def _with_own_scales(source: HeadSource, config: DecoderConfig) -> DecoderConfig:
    """The layers, with the scales of embedding and logits that the head itself states."""
    own = replace(_own(source), values={key: value for key, value in _own(source).values.items() if value})
    return replace(
        config,
        embedding_scale=own.number("input_embedding_scale", config.embedding_scale),
        logit_scale=own.number("output_multiplier", config.logit_scale),
        logit_cap=own.optional("final_logit_softcapping", config.logit_cap),
    )


def _are_causal(source: HeadSource, config: DecoderConfig) -> tuple[bool, ...]:
    """True for each layer whose rows do not see those after them; unless stated, that of a window."""
    own = _own(source)
    stated = False if own.get("sliding_window_non_causal") else own.get("is_causal", own.get("causal"))
    return tuple(layer.sliding_window is not None if stated is None else bool(stated) for layer in config.layers)


def _markov_kind(source: HeadSource) -> str:
    kind = str(_own(source).get("markov_head_type", "vanilla"))
    if kind not in MARKOV_KINDS:
        raise SourceError(
            f"{source.settings.path}: markov_head_type is {kind}; known are {', '.join(MARKOV_KINDS)}"
        )
    return kind


def _read_markov(reader: Reader, config: DecoderConfig, vocabulary: HeadVocabulary) -> dict[str, StoredTensor]:
    """The weights that bias logits by the token before (DSpark); empty where the head has none."""
    found = read_markov(reader, config, vocabulary, is_needed=_own(reader.source).get("markov_rank"))
    if not found:
        return {}
    name, rank, kind = "markov_head.{}".format, found["markov_head"].columns, _markov_kind(reader.source)
    if kind != "vanilla":
        part, inputs, outputs = ("gate", 1, 1) if kind == "gated" else ("joint", 2, 3)
        columns = inputs * rank + config.hidden_size
        found[f"markov_{part}"] = reader.take(name(f"{part}_proj.weight"), outputs * rank, columns)
        found[f"markov_{part}_bias"] = reader.take(name(f"{part}_proj.bias"), 1, outputs * rank)
    return found


def _read_selector(reader: Reader, config: DecoderConfig, row_order: Any) -> dict[str, StoredTensor]:
    """The weights that score a candidate by the token before (DFlash 2); empty where the head has none."""
    name, is_needed = "candidate_selector.{}".format, _own(reader.source).get("selector_rank")
    embedding = reader.optional(name("predecessor_codebook"), config.vocab_size, is_needed=is_needed)
    if embedding is None:
        return {}
    head = reader.take(name("successor_codebook"), config.vocab_size, embedding.columns)
    return {
        "markov_embedding": embedding,
        "markov_head": replace(head, row_order=row_order),
        "selector": reader.take(name("hidden_projection.weight"), embedding.columns, config.hidden_size),
    }


def _read_kernels(reader: Reader, config: DecoderConfig) -> dict[str, StoredTensor]:
    """The kernels of convolutions along a block (DFlash 2); empty where the head has none."""
    own, hidden = _own(reader.source), config.hidden_size
    if not own.get("conv_kernel_size"):
        return {}
    rows, size = 2 * own.count("conv_kernel_size"), own.count("conv_group_size")
    if hidden % size:
        raise SourceError(
            f"{own.path}: conv_group_size is {size}, wanted a divisor of the {hidden} numbers of a state"
        )
    found = {}
    for i, part in product(range(config.num_layers), ("attention", "mlp")):
        name = f"layers.{i}.{part}_conv.{{}}".format
        found[f"{i}.{part}_kernel"] = reader.take(name("base_kernel"), rows, hidden)
        found[f"{i}.{part}_kernels"] = reader.take(
            name("kernel_projection.weight"), rows * (hidden // size), hidden
        )
    return found


def _read_confidence(
    reader: Reader, config: DecoderConfig, markov: dict[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The weights that give the chance that a token is accepted; empty where the head has none."""
    own, name = _own(reader.source), "confidence_head.proj.{}".format
    if reader.optional(name("weight"), is_needed=own.get("enable_confidence_head")) is None:
        return {}
    reads_token = bool(own.get("confidence_head_with_markov", bool(markov)))
    columns = config.hidden_size + (markov["markov_embedding"].columns if reads_token and markov else 0)
    return {
        "confidence": reader.take(name("weight"), 1, columns),
        "confidence_bias": reader.take(name("bias"), 1, 1),
    }


def _is_speculators(method: str, source: HeadSource) -> bool:
    return bool(source.settings.get("speculators_model_type") == method)


def _is_deepseek(source: HeadSource) -> bool:
    return any(name.endswith("DSparkModel") for name in source.architectures)


def _is_dspark(source: HeadSource) -> bool:
    """True for DSpark as SpecForge and Liquid write it, and for what is it by its tensors alone."""
    by_name = any(name.endswith("DSparkDraftModel") for name in source.architectures)
    has_markov = any(name.endswith("markov_w1.weight") for name in source.tensors)
    return by_name or has_markov or _own(source).get("projector_type") == "dspark"


def _is_block_head(source: HeadSource) -> bool:
    named = any(
        name.endswith(("DSparkDraftModel", "DFlashDraftModel", "DFlash2DraftModel"))
        for name in source.architectures
    )
    return named or "dflash_config" in source.settings.values


BLOCK_DIALECTS: tuple[Dialect, ...] = (
    *(
        Dialect(
            name=f"{name} (speculators)",
            recognizes=partial(_is_speculators, method),
            plan=partial(_plan, method, _read_speculators),
        )
        for name, method in (("DFlash", "dflash"), ("DFlash 2", "dflash2"), ("DSpark", "dspark"))
    ),
    Dialect(name="DSpark", recognizes=_is_deepseek, plan=partial(_plan, "dspark", _read_usual)),
    Dialect(
        name="DSpark (SpecForge, Liquid)",
        recognizes=lambda source: _is_dspark(source) and _is_block_head(source),
        plan=partial(_plan, "dspark", _read_usual),
    ),
    Dialect(name="DFlash", recognizes=_is_block_head, plan=partial(_plan, "dflash", _read_usual)),
)
