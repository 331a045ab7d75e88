"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437): a layer in a model's own checkpoint, trained to draft.

It joins the state of the model with the embedding of the next token, and uses the model's own embedding and
vocabulary head. MiMo's reads the state after the last layer, Qwen3.5's the one after the final norm.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from edgespec.errors import SourceError
from edgespec.export.decoder_config import Layer
from edgespec.export.heads.eagle import recurrent_head, require_joined_shapes
from edgespec.export.heads.head_source import Dialect, HeadPlan, HeadSource, nested, read_head
from edgespec.export.heads.head_tensors import (
    PUBLISHED,
    Reader,
    layer_settings,
    layers_config,
    require_hidden_size,
    require_shapes,
)
from edgespec.export.heads.recurrent_graphs import RecurrentShape, plan_recurrent
from edgespec.export.heads.vocabulary import HeadVocabulary, with_logits_of
from edgespec.export.roles import orders_of_gated
from edgespec.export.sources import LoadedSource
from edgespec.export.tensors import NO_SIZES, Sizes


@dataclass(frozen=True, kw_only=True)
class _Form:
    """The names and the arithmetic of a family.

    own: A pattern of names of the first layer for multi-token prediction, and of what is beside it.
    norms: Names by role of the norms beside those of the layer.
    needs: Roles of the layer that there must be, beside what each layer needs.
    gain_addend: Gains are stored less this.
    is_gated: Attention has a gate of its output, whose rows lie behind the queries of each head.
    """

    name: str
    own: str
    layer: str
    join: str
    norms: Mapping[str, str]
    needs: tuple[str, ...]
    has_state_first: bool = False
    reads_normed: bool = False
    gain_addend: float = 0.0
    is_gated: bool = False


_FORMS = tuple(_Form(**stated) for stated in PUBLISHED["mtp"])
_ANY = re.compile(r"(model\.)?mtp(_layers)?\.")


def read_mtp(path: Path, sizes: Sizes = NO_SIZES) -> HeadSource:
    """The layers for multi-token prediction within a model's own checkpoint.

    sizes: Of files of which only the header is here.

    Raises SourceError: It has none, or none that are read.
    """
    known = "those of MiMo and Qwen3.5 are read"
    if not path.is_dir():
        why = "has no layers for multi-token prediction that are read"
        raise SourceError(f"{path} {why}; {known}, from a folder with safetensors")
    source = read_head(path, sizes)
    own = {name: tensor for name, tensor in source.tensors.items() if _ANY.match(name)}
    if not own:
        raise SourceError(
            f"{path} has no layers for multi-token prediction, of which {known}; name a head or a smaller model "
            "with --drafter instead"
        )
    return replace(source, tensors=own, integers={})


def is_mtp_alone(source: HeadSource) -> bool:
    """True for a file of layers for multi-token prediction without the model that they are of."""
    others = [name for name in source.tensors if not _ANY.match(name)]
    return len(others) < len(source.tensors) and not any(".layers." in name for name in others)


def _plan(form: _Form, source: HeadSource, target: LoadedSource) -> HeadPlan:
    """The plan of the first layer for multi-token prediction, which drafts one token after another."""
    inner = "text_config" if nested(source.settings, "text_config") else None
    settings, reader = layer_settings(source, inner), Reader(source)
    join = reader.take(form.join)
    require_hidden_size(source, target, join.rows)
    needs = (*form.needs, *(["q_bias"] if "0.q_bias" in target.tensors else []))
    tensors = {"join": join, **reader.layer(form.layer, 0, needs)}
    tensors |= {role: reader.take(name) for role, name in form.norms.items()}
    reader.require_all_taken(form.name, form.own)
    if form.is_gated:
        both, rows = tensors["0.q"], target.config.num_heads * target.config.head_dim
        require_shapes(source, {"0.q": both}, {"0.q": (2 * rows, target.config.hidden_size)})
        orders = zip(("0.q", "0.q_gate"), orders_of_gated(target.config), strict=True)
        tensors |= {role: replace(both, rows=rows, row_order=order) for role, order in orders}
    norms = {role: tensor for role, tensor in tensors.items() if role.endswith("norm")}
    tensors |= {role: replace(tensor, addend=form.gain_addend) for role, tensor in norms.items()}
    config = with_logits_of(target, layers_config(settings, tensors, target, 1))
    rotary = next(layer.rotary for layer in target.config.layers if layer.rotary)
    config = replace(config, layers=(Layer(rotary=rotary),))  # of the model's own layers
    require_joined_shapes(source, tensors, config)
    first = form.has_state_first
    recurrence = RecurrentShape(config=config, is_wide=False, has_state_first=first, returns_normed=True)
    layer = target.config.num_layers - (not form.reads_normed)
    head = recurrent_head("mtp", (layer,), target, config)
    vocabulary = HeadVocabulary(target.tensors["embedding"], target.head, None, ("embedding", "vocabulary head"))
    return plan_recurrent(head, recurrence, tensors, vocabulary)


def _recognizes(form: _Form, source: HeadSource) -> bool:
    return any(name.removeprefix("model.").startswith(form.layer) for name in source.tensors)


MTP_DIALECTS = tuple(
    Dialect(name=form.name, recognizes=partial(_recognizes, form), plan=partial(_plan, form)) for form in _FORMS
)
