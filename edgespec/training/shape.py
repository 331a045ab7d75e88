"""Sizes of a drafting head of the EAGLE-3 kind, and the names and shapes of its weights. Knows nothing of torch."""

from dataclasses import dataclass
from math import prod

HEAD, FUSE = "lm_head.weight", "fc.weight"
Q, K, V, O = (f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo")  # noqa: E741
Q_BIAS, K_BIAS, V_BIAS = (f"layers.0.self_attn.{part}_proj.bias" for part in "qkv")
GATE, UP, DOWN = (f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
TOKEN_NORM, STATE_NORM = "layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"
MLP_NORM, FINAL_NORM = "layers.0.post_attention_layernorm.weight", "norm.weight"


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Sizes and constants of a head with one decoder layer, whose queries, keys and values are read from a token
    and a state (Li et al., arXiv:2503.01840).

    layers: Layers of the target behind which hidden states are read; they are fused to one state.
    draft_vocab_size: Tokens that it can draft.
    activation: silu or gelu_pytorch_tanh.
    """

    layers: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_eps: float
    rope_theta: float
    context_length: int
    activation: str = "silu"
    has_biases: bool = False  # of queries, keys and values

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of its weights by name."""
        h, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        biases: dict[str, tuple[int, ...]] = {Q_BIAS: (q,), K_BIAS: (kv,), V_BIAS: (kv,)}
        return {
            FUSE: (h, len(self.layers) * h),
            Q: (q, 2 * h),
            K: (kv, 2 * h),
            V: (kv, 2 * h),
            **(biases if self.has_biases else {}),
            O: (h, q),
            GATE: (self.intermediate_size, h),
            UP: (self.intermediate_size, h),
            DOWN: (h, self.intermediate_size),
            **dict.fromkeys((TOKEN_NORM, STATE_NORM, MLP_NORM, FINAL_NORM), (h,)),
            HEAD: (self.draft_vocab_size, h),
        }

    @property
    def num_weights(self) -> int:
        return sum(map(prod, self.weights.values()))

    @property
    def num_step_weights(self) -> int:
        """Weights that are read for each drafted token; hidden states are fused for known tokens alone."""
        return self.num_weights - prod(self.weights[FUSE])
