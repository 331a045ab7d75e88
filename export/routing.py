"""How tokens choose among experts, from the settings of a source."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from edgespec.errors import SourceError
from edgespec.export.families import Family
from edgespec.export.settings import SourceSettings
from edgespec.export.tensors import StoredTensor


@dataclass(frozen=True, slots=True)
class Routing:
    """How many experts a layer has, and how a token chooses among them (Shazeer et al., arXiv:1701.06538).

    is_normalized: The weights of the chosen experts are made to sum to 1.
    num_dense: So many first layers have no experts, but one MLP of dense_size.
    shared_size: Of the MLP beside the experts that every token goes through; 0 where there is none.
    """

    num_experts: int
    num_used: int
    is_normalized: bool
    num_dense: int = 0
    dense_size: int = 0
    shared_size: int = 0


class RoutingKeys(NamedTuple):
    """The keys of the numbers of a mixture; of the first three one of several."""

    num_experts: tuple[str, ...]
    num_used: tuple[str, ...]
    dense_size: tuple[str, ...]
    num_dense: str
    period: str


GGUF_KEYS = RoutingKeys(
    *(("expert_count",), ("expert_used_count",), ("feed_forward_length", "expert_feed_forward_length")),
    *("leading_dense_block_count", "interleave_moe_layer_step"),
)
HUGGINGFACE_KEYS = RoutingKeys(
    ("num_experts", "moe_num_experts", "num_local_experts"),
    ("moe_topk", "moe_k", "num_experts_per_tok"),
    ("intermediate_size",),
    *("moe_layer_start_index", "moe_layer_interval"),
)
_SHARED_UP = re.compile(r"\.(ffn_up_shexp|mlp\.shared_\w+\.up_proj)\.weight$")


def routing_of(
    stated: SourceSettings, family: Family, keys: RoutingKeys, tensors: Mapping[str, StoredTensor]
) -> Routing | None:
    """The routing by the keys of its numbers; None for a family without experts."""
    if not family.is_mixture:
        return None
    num_experts, num_used, dense_size = (
        stated.count(next(filter(stated.get, each), each[-1])) for each in keys[:3]
    )
    every = stated.get(keys.period, 1)
    if every != 1:
        raise SourceError(f"{stated.path} has experts in one of {every} layers, which is not supported")
    shared = (each.rows for name, each in tensors.items() if _SHARED_UP.search(name))
    routing = Routing(
        num_experts,
        num_used,
        bool(stated.get("norm_topk_prob", family.normalizes_routing)),
        num_dense=int(stated.get(keys.num_dense, 0)),
        dense_size=dense_size,
        shared_size=next(shared, 0),
    )
    if routing.num_used > routing.num_experts:
        raise SourceError(
            f"{stated.path} uses {routing.num_used} of {routing.num_experts} experts; the file is damaged"
        )
    return routing
