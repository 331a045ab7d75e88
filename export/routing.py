"""How tokens choose among experts, from the settings of a source."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgespec.errors import SourceError
from edgespec.export.families import Family
from edgespec.export.settings import SourceSettings
from edgespec.export.tensors import Tensors


@dataclass(frozen=True, slots=True)
class Routing:
    """How many experts a layer has, and how a token chooses among them (Shazeer et al., arXiv:1701.06538).

    is_normalized: The weights of the chosen experts are made to sum to 1.
    num_dense: So many first layers have no experts, but one MLP of dense_size.
    shared_size: Of the MLP beside the experts that every token goes through; 0 where there is none.
    is_sigmoid: An expert's weight is the sigmoid of its logit, else its share by softmax (DeepSeek V3).
    scale: Of the weights in the end.
    num_groups: Neighbours form groups, and a token chooses among those of its best num_used_groups.
    """

    num_experts: int
    num_used: int
    is_normalized: bool
    num_dense: int = 0
    dense_size: int = 0
    shared_size: int = 0
    is_sigmoid: bool = False
    scale: float = 1.0
    num_groups: int = 1
    num_used_groups: int = 1


_SIGMOID, _SOFTMAX = 2, (1, 3)  # expert_gating_func of a GGUF file; 3 is over the chosen experts alone
_SHARED_UP = re.compile(r"\.(ffn_up_shexp|mlp\.shared_\w+\.up_proj)\.weight$")


def routing_of(
    stated: SourceSettings, family: Family, keys: Mapping[str, Sequence[str]], tensors: Tensors
) -> Routing | None:
    """The routing by the keys of its numbers (SETTING_NAMES); None for a family without experts."""
    if not family.is_mixture:
        return None

    def key(name: str) -> str:
        return next(filter(stated.get, keys[name]), keys[name][-1])

    if (every := stated.get(key("period"), 1)) != 1:
        raise SourceError(f"{stated.path} has experts in one of {every} layers, which is not supported")
    num_dense, num_layers = int(stated.get(key("num_dense"), 0)), stated.get("num_hidden_layers")
    if num_layers is not None and num_dense >= num_layers:
        raise SourceError(f"{stated.path} states {num_dense} layers without experts, and has {num_layers} in all")
    shared = (each.rows for name, each in tensors.items() if _SHARED_UP.search(name))
    routing = Routing(
        stated.count(key("num_experts")),
        stated.count(key("num_used")),
        bool(stated.get(key("is_normalized"), family.normalizes_routing)),
        num_dense=num_dense,
        dense_size=stated.count(key("dense_size")) if num_dense else 0,
        shared_size=next(shared, stated.get("shared_intermediate_size", 0)),
        is_sigmoid=_is_sigmoid(stated, family),
        scale=stated.number(key("scale"), 1.0) if stated.get(key("scale")) else 1.0,
        num_groups=stated.count(key("num_groups"), 1),
        num_used_groups=stated.count(key("num_used_groups"), 1),
    )
    return _checked(stated, routing)


def _is_sigmoid(stated: SourceSettings, family: Family) -> bool:
    """Raises SourceError: Weights are made of logits in a way that is not known."""
    way = stated.get("expert_gating_func") or (_SIGMOID if family.routes_by_sigmoid else _SOFTMAX[0])
    if way not in (_SIGMOID, *_SOFTMAX):
        raise SourceError(f"{stated.path}: {stated.prefix}expert_gating_func is {way!r}; 1, 2 and 3 are read")
    return bool(way == _SIGMOID)


def _checked(stated: SourceSettings, routing: Routing) -> Routing:
    """Raises SourceError: More experts or groups are used than there are."""
    count, groups, used_groups = routing.num_experts, routing.num_groups, routing.num_used_groups
    if count % groups or count // groups < min(2, groups) or used_groups > groups:
        raise SourceError(
            f"{stated.path} uses {used_groups} of {groups} groups of its {count} experts; the file is damaged"
        )
    if routing.num_used > count // groups * used_groups:
        raise SourceError(f"{stated.path} uses {routing.num_used} of {count} experts; the file is damaged")
    return routing
