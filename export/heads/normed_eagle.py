"""EAGLE heads of the speculators format, with norms or without, which `edgespec train` writes too.

A matrix joins the embedding of a token, normed, and the state before it. With norms the state that goes on is
the one behind the norm before the vocabulary head, as the target's states are behind its final norm.
"""

from edgespec.drafting_head import Head
from edgespec.export.heads.head_plan import Dialect, HeadPlan
from edgespec.export.heads.head_source import HeadSource
from edgespec.export.heads.head_tensors import Reader, require_hidden_size, require_shapes
from edgespec.export.heads.layer_settings import layer_settings, layer_shapes, layers_config
from edgespec.export.heads.recurrent_graphs import Recurrence, plan_recurrent
from edgespec.export.heads.vocabulary import read_vocabulary, with_logits_of
from edgespec.export.sources import LoadedSource

_NAME = "EAGLE of vLLM speculators"
_NORMS = {"token_norm": "embedding_layernorm.weight", "final_norm": "pre_lm_head_layernorm.weight"}


def _plan(source: HeadSource, target: LoadedSource) -> HeadPlan:
    settings, reader = layer_settings(source, "transformer_layer_config"), Reader(source)
    join = reader.take("fusion_fc.weight")
    require_hidden_size(source, target, join.rows)
    tensors = {"join": join, **reader.layer("transformer.", 0)}
    if (bias := reader.optional("fusion_fc.bias")) is not None:
        tensors["join_bias"] = bias
    has_norms = bool(source.settings.get("layernorms"))
    if has_norms:
        tensors |= {role: reader.take(name) for role, name in _NORMS.items()}
    config = layers_config(settings, tensors, target, 1)
    hidden = config.hidden_size
    vocabulary = read_vocabulary(source, reader, target, settings, hidden)
    if not vocabulary.has_own_head:
        config = with_logits_of(target, config)
    reader.require_all_taken("EAGLE")
    tensors |= {"embedding": vocabulary.embedding, "head": vocabulary.head}
    shapes = {**layer_shapes(config, hidden), "join": (hidden, 2 * hidden), "join_bias": (1, hidden)}
    require_shapes(source, tensors, {**shapes, **dict.fromkeys(_NORMS, (1, hidden))})
    made = Head(
        method="eagle",
        kind="recurrent",
        target_layers=(target.config.num_layers,),
        target_hidden_size=target.config.hidden_size,
        state_size=hidden,
    )
    recurrence = Recurrence(config=config, is_wide=False, returns_normed=has_norms)
    return plan_recurrent(_NAME, made, recurrence, tensors, borrowed=vocabulary.borrowed, tokens=vocabulary.tokens)


SPECULATORS_EAGLE = Dialect(
    name=_NAME,
    recognizes=lambda source: source.settings.get("speculators_model_type") == "eagle",
    plan=_plan,
)
