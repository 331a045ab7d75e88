"""Multi-token prediction: a layer in a model's own checkpoint that was trained to draft.

DeepSeek-V3 (arXiv:2412.19437). Read from the checkpoints of MiMo, a qwen2 with one such layer: it joins the state
after the last layer, before the final norm, with the embedding of the next token, and uses the model's own
embedding and vocabulary head.
"""

from dataclasses import replace
from pathlib import Path

from edgespec.errors import SourceError
from edgespec.export.heads.head_source import Dialect, HeadPlan, HeadSource, read_head
from edgespec.export.heads.head_tensors import Reader, require_hidden_size, require_shapes
from edgespec.export.heads.layer_settings import layer_settings, layers_config
from edgespec.export.heads.recurrent_graphs import Recurrence, plan_recurrent
from edgespec.export.heads.vocabulary import with_logits_of
from edgespec.export.roles import layer_shapes
from edgespec.export.sources import LoadedSource
from edgespec.manifest import Head

_PREFIX = "mtp_layers.0."
_NORMS = {"token_norm": "token_layernorm", "state_norm": "hidden_layernorm", "final_norm": "final_layernorm"}
_NAME = "MTP of MiMo"


def read_mtp(path: Path) -> HeadSource:
    """The layers for multi-token prediction within a model's own checkpoint.

    Raises SourceError: It has none, or none that are read.
    """
    if not path.is_dir():
        raise SourceError(
            f"{path} has no layers for multi-token prediction that are read; they are read from a folder with "
            "safetensors, and only of MiMo"
        )
    source = read_head(path)
    own = {name: tensor for name, tensor in source.tensors.items() if ".mtp_layers." in f".{name}"}
    if not own:
        raise SourceError(
            f"{path} has no layers for multi-token prediction (mtp_layers), of which those of MiMo are read; name "
            "a head or a smaller model with --drafter instead"
        )
    return replace(source, tensors=own, integers={})


def _plan_mtp(source: HeadSource, target: LoadedSource) -> HeadPlan:
    """The plan of the first layer for multi-token prediction, which drafts one token after another."""
    settings, reader = layer_settings(source), Reader(source)
    join = reader.take(f"{_PREFIX}input_proj.weight")
    require_hidden_size(source, target, join.rows)
    tensors = {"join": join, **reader.layer(_PREFIX, 0)}
    tensors |= {role: reader.take(f"{_PREFIX}{name}.weight") for role, name in _NORMS.items()}
    if "0.input_norm" not in tensors:
        reader.take(f"{_PREFIX}input_layernorm.weight")
    if "0.q_bias" in target.tensors and "0.q_bias" not in tensors:
        reader.take(f"{_PREFIX}self_attn.q_proj.bias")
    reader.require_all_taken(_NAME, _PREFIX)
    config = with_logits_of(target, layers_config(settings, tensors, target, 1))
    hidden = config.hidden_size
    shapes = {**layer_shapes(config, hidden), "join": (hidden, 2 * hidden), **dict.fromkeys(_NORMS, (1, hidden))}
    require_shapes(source, tensors, shapes)
    recurrence = Recurrence(config=config, is_wide=False, has_state_first=True, returns_normed=True)
    head = Head(
        method="mtp",
        kind="recurrent",
        target_layers=(target.config.num_layers - 1,),
        target_hidden_size=target.config.hidden_size,
        state_size=hidden,
    )
    tensors |= {"embedding": target.tensors["embedding"], "head": target.head}
    return plan_recurrent(_NAME, head, recurrence, tensors, borrowed=("embedding", "vocabulary head"))


MTP_DIALECT = Dialect(
    name=_NAME,
    recognizes=lambda source: any(name.removeprefix("model.").startswith(_PREFIX) for name in source.tensors),
    plan=_plan_mtp,
)
