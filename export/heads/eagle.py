"""Heads of decoder layers that draft one token after another: EAGLE and multi-token prediction.

EAGLE-1 and 2 (Li et al., arXiv:2401.15077), and EAGLE-3 (arXiv:2503.01840) in three dialects.

An EAGLE-3 head reads hidden states of three layers, which a matrix fuses to one, and has a vocabulary head of its
own, mostly for some tokens only. The dialects hold equal tensors and differ in names, in where settings are, and
in how they number the layers of the target: eagle_aux_hidden_state_layer_ids on top of config.json counts from the
embedding, 0, so that i is what layer i reads (vLLM); within eagle_config (SpecForge), and in target_layer_ids
(DeepSeek, which reads five), i is what layer i gives. Without any the three are those that layers 2, n/2 and n - 3
read.

A P-EAGLE head (arXiv:2602.01469) is an EAGLE-3 head that was trained to draft several tokens in one pass, with a
mask token and features of its own in the place of what is not known yet.

An EAGLE-1 or 2 head reads the state after the final norm, joined with the embedding by a matrix, and uses the
vocabulary head of its target. Heads of the speculators format, which `edgespec train` writes too, may have norms
there; then the state that goes on is the one after the norm before the vocabulary head.
"""

from dataclasses import replace
from functools import partial

from edgespec.errors import SourceError
from edgespec.export.decoder_config import DecoderConfig
from edgespec.export.heads.head_source import FUSE_GRAPH, Dialect, HeadPlan, HeadSource, nested
from edgespec.export.heads.head_tensors import (
    Reader,
    layer_settings,
    layers_config,
    read_mask_token,
    read_numbers,
    require_hidden_size,
    require_layers,
    require_shapes,
)
from edgespec.export.heads.recurrent_graphs import RecurrentShape, plan_recurrent
from edgespec.export.heads.vocabulary import read_markov, read_vocabulary, with_logits_of
from edgespec.export.roles import layer_shapes
from edgespec.export.settings import SourceSettings
from edgespec.export.sources import LoadedSource
from edgespec.export.tensors import StoredTensor, Tensors
from edgespec.manifest import Head

_NORMED_NORMS = {"token_norm": "embedding_layernorm.weight", "final_norm": "pre_lm_head_layernorm.weight"}
_LAYERS, _CONFIG = "eagle_aux_hidden_state_layer_ids", "eagle_config"
_DEEPSEEK_LAYERS = "target_layer_ids"
_MASKS, _NUM_PROPOSED = ("mask_token_id", "ptd_token_id"), 8


def _plan_eagle3(inner: str | None, source: HeadSource, target: LoadedSource) -> HeadPlan:
    """The plan of an EAGLE-3 head; inner is the object of config.json that describes its layers."""
    settings, reader = layer_settings(source, inner), Reader(source)
    layers = _target_layers(source, target.config.num_layers)
    require_hidden_size(source, target, source.settings.count("target_hidden_size", target.config.hidden_size))
    if (fuse := reader.optional("fc.weight", is_needed=_reads_aux(source))) is not None and _reads_aux(source):
        if fuse.columns % len(layers):
            raise SourceError(
                f"{source.path}: fc.weight reads {fuse.columns} numbers, which are not the hidden states of "
                f"{len(layers)} layers, those {_said_by(source)}; its config.json is not that of its weights: "
                "fetch both again"
            )
        require_hidden_size(source, target, fuse.columns // len(layers))
    tensors, num_layers = _eagle3_layers(reader)
    config = layers_config(settings, tensors, target, num_layers)
    hidden = config.hidden_size
    if _reads_aux(source):
        assert fuse is not None
        tensors |= {"fuse": fuse, **_fuse_norms(reader, len(layers))}
    is_parallel = source.settings.get("speculators_model_type") == "peagle"
    mask = reader.optional("mask_hidden", is_needed=is_parallel)
    if mask is not None:
        tensors["mask_features"] = mask
    vocabulary = read_vocabulary(reader, target, settings, hidden)
    reader.require_all_taken("EAGLE-3")
    later = layer_shapes(config, hidden)
    shapes = {**later, **{f"0.{role}": shape for role, shape in layer_shapes(config, 2 * hidden).items()}}
    features = len(layers) * target.config.hidden_size
    shapes |= dict.fromkeys(("token_norm", "state_norm", "final_norm"), (1, hidden))
    shapes |= {"fuse": (hidden, features), "fuse_norm": (1, features), "mask_features": (1, features)}
    shapes |= {f"fuse_norm.{at}": (1, target.config.hidden_size) for at in range(len(layers))}
    require_shapes(source, tensors, shapes)
    recurrence = RecurrentShape(
        config=config,
        is_wide=True,
        adds_to_normed=_switch(source, "norm_before_residual"),
        returns_normed=_switch(source, "norm_output"),
        has_mask=mask is not None,
    )
    fuse_graph = FUSE_GRAPH if _reads_aux(source) else None
    head = recurrent_head("eagle3", layers, target, config, fuse_graph)
    if mask is not None:
        stated = next((each for each in map(source.settings.get, _MASKS) if each is not None), None)
        head = replace(
            head, mask_token_id=read_mask_token(source, stated, target), block_tokens=_num_proposed(source)
        )
    return plan_recurrent(head, recurrence, tensors, vocabulary)


def _plan_eagle(source: HeadSource, target: LoadedSource) -> HeadPlan:
    """The plan of an EAGLE-1 or EAGLE-2 head, which differ in the trees that they draft only."""
    settings, reader = layer_settings(source), Reader(source)
    join = reader.take("fc.weight")
    require_hidden_size(source, target, join.columns // 2 if join.columns % 2 == 0 else join.columns)
    require_hidden_size(source, target, join.rows)
    tensors, num_layers = reader.layers()
    tensors["join"] = join
    if (bias := reader.optional("fc.bias")) is not None:
        tensors["join_bias"] = bias
    if _switch(source, "add_para_norm"):  # HASS (Zhang et al., arXiv:2408.15766)
        tensors["token_norm"] = reader.take("embedding_layernorm.weight")
        tensors["state_norm"] = reader.take("hidden_states_layernorm.weight")
    return _plan_joined(reader, target, settings, tensors, num_layers)


def _plan_joined(
    reader: Reader,
    target: LoadedSource,
    settings: SourceSettings,
    tensors: Tensors,
    num_layers: int,
    *,
    returns_normed: bool = False,
    layers: tuple[int, ...] = (),
) -> HeadPlan:
    """The plan of a head whose matrix joins a token's embedding with the state after the target's final norm.

    Args:
        tensors: All by role but for embedding and vocabulary head, which are read here.
        returns_normed: The state that goes on is the one after the norm before the vocabulary head.
        layers: Those of the target whose states a matrix adds to the one after its final norm.
    """
    config = layers_config(settings, tensors, target, num_layers)
    vocabulary = read_vocabulary(reader, target, settings, config.hidden_size)
    if not vocabulary.has_own_head:
        config = with_logits_of(target, config)
    tensors = {**tensors, **read_markov(reader, config, vocabulary)}
    reader.require_all_taken("EAGLE")
    require_joined_shapes(reader.source, tensors, config)
    recurrence = RecurrentShape(config=config, is_wide=False, returns_normed=returns_normed)
    layers = (*layers, target.config.num_layers)
    require_shapes(reader.source, tensors, {"fuse": (config.hidden_size, len(layers) * config.hidden_size)})
    head = recurrent_head("eagle", layers, target, config, FUSE_GRAPH if "fuse" in tensors else None)
    return plan_recurrent(head, recurrence, tensors, vocabulary)


def require_joined_shapes(source: HeadSource, tensors: Tensors, config: DecoderConfig) -> None:
    hidden = config.hidden_size
    shapes = {**layer_shapes(config, hidden), "join": (hidden, 2 * hidden), "join_bias": (1, hidden)}
    shapes |= dict.fromkeys(("token_norm", "state_norm", "final_norm"), (1, hidden))
    require_shapes(source, tensors, shapes)


def recurrent_head(
    method: str,
    layers: tuple[int, ...],
    target: LoadedSource,
    config: DecoderConfig,
    fuse_graph: str | None = None,
) -> Head:
    return Head(
        method=method,
        kind="recurrent",
        target_layers=layers,
        target_hidden_size=target.config.hidden_size,
        state_size=config.hidden_size,
        fuse_graph=fuse_graph,
    )


def _plan_normed(source: HeadSource, target: LoadedSource) -> HeadPlan:
    settings, reader = layer_settings(source, "transformer_layer_config"), Reader(source)
    join = reader.take("fusion_fc.weight")
    require_hidden_size(source, target, join.rows)
    tensors = {"join": join, **reader.layer("transformer.", 0)}
    needs_bias = source.settings.get("fusion_bias")
    if (bias := reader.optional("fusion_fc.bias", is_needed=needs_bias)) is not None:
        tensors["join_bias"] = bias
    has_norms = bool(source.settings.get("layernorms"))
    if has_norms:
        tensors |= {role: reader.take(name) for role, name in _NORMED_NORMS.items()}
    layers: tuple[int, ...] = ()
    if stated := source.settings.get(_LAYERS):  # as those of EAGLE-3 heads, without the state after the final norm
        layers = tuple(number - 1 for number in read_numbers(source, _LAYERS, stated))
        require_layers(source, layers, target.config.num_layers)
        tensors["fuse"] = reader.take("fc.weight")
    return _plan_joined(reader, target, settings, tensors, 1, returns_normed=has_norms, layers=layers)


def _eagle3_layers(reader: Reader) -> tuple[dict[str, StoredTensor], int]:
    """Layers by role, the norms of the first among them, and how many there are in the file."""
    first = "midlayer." if reader.has_layer("midlayer.") else "layers.0."
    tensors = {"token_norm": reader.take(first + "input_layernorm.weight")}
    tensors["state_norm"] = reader.take(first + "hidden_norm.weight")
    layers, num_layers = reader.layers(first)
    return {**tensors, **layers, "final_norm": reader.take("norm.weight")}, num_layers


def _fuse_norms(reader: Reader, num_parts: int) -> dict[str, StoredTensor]:
    source = reader.source
    is_whole, is_each = _switch(source, "norm_before_fc"), _switch(source, "fc_norm")
    if is_whole and is_each:
        raise SourceError(f"{source.settings.path} sets both norm_before_fc and fc_norm, of which a head has one")
    if is_whole:
        return {"fuse_norm": reader.take("input_norm.weight")}
    return {f"fuse_norm.{at}": reader.take(f"fc_norm.{at}.weight") for at in range(num_parts if is_each else 0)}


def _target_layers(source: HeadSource, num_layers: int) -> tuple[int, ...]:
    """The layers of the target after which the head reads; the number of layers is the state after all norms."""
    if not _reads_aux(source):
        return (num_layers,)
    within = nested(source.settings, _CONFIG).get(_LAYERS)
    if on_top := source.settings.get(_LAYERS):
        layers = [number - 1 for number in read_numbers(source, _LAYERS, on_top)]
    elif within:
        layers = read_numbers(source, _LAYERS, within)
    elif of_deepseek := source.settings.get(_DEEPSEEK_LAYERS):
        layers = read_numbers(source, _DEEPSEEK_LAYERS, of_deepseek)
    else:
        layers = [1, num_layers // 2 - 1, num_layers - 4]
    require_layers(source, layers, num_layers)
    return tuple(layers)


def _num_proposed(source: HeadSource) -> int:
    """How many tokens a head drafts in a pass, as speculators states it."""
    ways = nested(source.settings, "speculators_config").get("proposal_methods") or [{}]
    return SourceSettings(source.settings.path, ways[0]).count("speculative_tokens", _NUM_PROPOSED)


def _said_by(source: HeadSource) -> str:
    """Where the layers that a head reads are from, for messages."""
    on_top = next((key for key in (_LAYERS, _DEEPSEEK_LAYERS) if source.settings.get(key)), None)
    if on_top is None and nested(source.settings, _CONFIG).get(_LAYERS):
        on_top = f"{_LAYERS} of {_CONFIG}"
    return f"that {on_top} names" if on_top else "that EAGLE-3 reads by default"


def _reads_aux(source: HeadSource) -> bool:
    """True if it reads states of several layers, and not the one after the final norm as EAGLE-1 does."""
    return nested(source.settings, _CONFIG).get("use_aux_hidden_state", True) is not False


def _switch(source: HeadSource, name: str) -> bool:
    return bool(source.settings.get(name) or nested(source.settings, _CONFIG).get(name))


def _is_speculators(source: HeadSource) -> bool:
    return source.settings.get("speculators_model_type") is not None


def _is_eagle3(source: HeadSource) -> bool:
    names = (
        name.endswith(("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")) for name in source.tensors
    )
    return not _is_speculators(source) and (_names_eagle3(source) or any(names))


def _names_eagle3(source: HeadSource) -> bool:
    return any("eagle3" in name.lower() or "peagle" in name.lower() for name in source.architectures)


def _is_eagle(source: HeadSource) -> bool:
    names = {name.removeprefix("model.") for name in source.tensors}
    has_join = {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names
    return has_join and not _is_speculators(source) and not _is_eagle3(source)


EAGLE_DIALECTS = (
    Dialect(
        name="EAGLE-3 of vLLM speculators",
        recognizes=lambda source: source.settings.get("speculators_model_type") in ("eagle3", "peagle"),
        plan=partial(_plan_eagle3, "transformer_layer_config"),
    ),
    Dialect(
        name="EAGLE-3 of SpecForge, AngelSlim, SGLang or DeepSeek",
        recognizes=lambda source: _is_eagle3(source) and _names_eagle3(source),
        plan=partial(_plan_eagle3, None),
    ),
    Dialect(name="EAGLE-3 of its authors", recognizes=_is_eagle3, plan=partial(_plan_eagle3, None)),
    Dialect(name="EAGLE-1 or 2", recognizes=_is_eagle, plan=_plan_eagle),
    Dialect(
        name="EAGLE of vLLM speculators",
        recognizes=lambda source: source.settings.get("speculators_model_type") == "eagle",
        plan=_plan_normed,
    ),
)
