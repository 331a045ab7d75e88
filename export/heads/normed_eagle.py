"""EAGLE heads of the speculators format, with norms or without, which `edgespec train` writes too.

A matrix joins the embedding of a token, normed, and the state before it. With norms the state that goes on is
the one after the norm before the vocabulary head, as the target's states are after its final norm.
"""

from edgespec.export.heads.eagle import plan_joined
from edgespec.export.heads.head_plan import Dialect, HeadPlan
from edgespec.export.heads.head_source import HeadSource
from edgespec.export.heads.head_tensors import Reader, require_hidden_size
from edgespec.export.heads.layer_settings import layer_settings
from edgespec.export.sources import LoadedSource

_NAME = "EAGLE of vLLM speculators"
_NORMS = {"token_norm": "embedding_layernorm.weight", "final_norm": "pre_lm_head_layernorm.weight"}


def _plan(source: HeadSource, target: LoadedSource) -> HeadPlan:
    settings, reader = layer_settings(source, "transformer_layer_config"), Reader(source)
    join = reader.take("fusion_fc.weight")
    require_hidden_size(source, target, join.rows)
    tensors = {"join": join, **reader.layer("transformer.", 0)}
    needs_bias = bool(source.settings.get("fusion_bias"))
    if (bias := (reader.take if needs_bias else reader.optional)("fusion_fc.bias")) is not None:
        tensors["join_bias"] = bias
    has_norms = bool(source.settings.get("layernorms"))
    if has_norms:
        tensors |= {role: reader.take(name) for role, name in _NORMS.items()}
    return plan_joined(_NAME, source, target, settings, reader, tensors, 1, returns_normed=has_norms)


SPECULATORS_EAGLE = Dialect(
    name=_NAME,
    recognizes=lambda source: source.settings.get("speculators_model_type") == "eagle",
    plan=_plan,
)
