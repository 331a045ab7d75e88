"""Names of routers and experts in checkpoints and in GGUF files."""

from collections.abc import Mapping

# Of a mixture of experts the name of each matrix and what it holds. {number} is the one expert that a matrix is
# of; one without it holds all experts, one after another. With * the rows of its parts take turns, and with T each
# expert is transposed.
PARTS = ("gate", "up", "down")
_Held = Mapping[str, tuple[str, ...]]
MLP_EXPERTS: _Held = {
    "mlp.gate": ("router",),
    **{f"mlp.experts.{{number}}.{part}_proj": (part,) for part in PARTS},
}
STACKED: _Held = {
    "mlp.gate": ("router",),
    "mlp.experts.gate_up_proj": ("gate", "up"),
    "mlp.experts.down_proj": ("down",),
}
TURNED: _Held = {name: parts if name == "mlp.gate" else ("T", *parts) for name, parts in STACKED.items()}
GGUF_EXPERTS: _Held = {"ffn_gate_inp": ("router",)} | {f"ffn_{part}_exps": (part,) for part in PARTS}
GGUF_STACKED: _Held = {"ffn_gate_inp": ("router",), "ffn_gate_up_exps": ("gate", "up"), "ffn_down_exps": ("down",)}
# What a layer with experts may have beside them: its names in a GGUF file, and in checkpoints.
BESIDE_EXPERTS = {
    "router_choice": (
        *("exp_probs_b.bias", "mlp.gate.e_score_correction_bias", "exp_probs_b"),
        *("mlp.moe_statics.e_score_correction_bias", "feed_forward.expert_bias"),
        "block_sparse_moe.e_score_correction_bias",
    ),
    "shared.router": ("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight"),
    **{
        f"shared.{part}": (
            f"ffn_{part}_shexp.weight",
            *(f"mlp.shared_{module}.{part}_proj.weight" for module in ("expert", "experts", "mlp")),
            *(("shared_mlp.output_linear.weight",) if part == "down" else ()),
        )
        for part in PARTS
    },
}
