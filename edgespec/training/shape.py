"""Sizes of a drafting head, and the names and shapes of its weights. Knows nothing of torch."""

from dataclasses import dataclass
from math import prod

HEAD, JOIN = "lm_head.weight", "fusion_fc.weight"
Q, K, V, O = (f"transformer.self_attn.{part}_proj.weight" for part in "qkvo")  # noqa: E741
Q_BIAS, K_BIAS, V_BIAS = (f"transformer.self_attn.{part}_proj.bias" for part in "qkv")
Q_NORM, K_NORM = (f"transformer.self_attn.{part}_norm.weight" for part in "qk")
GATE, UP, DOWN = (f"transformer.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
INPUT_NORM, MLP_NORM = (f"transformer.{part}_layernorm.weight" for part in ("input", "post_attention"))
TOKEN_NORM, FINAL_NORM = "embedding_layernorm.weight", "pre_lm_head_layernorm.weight"


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Sizes and constants of a head of the EAGLE kind (Li et al., arXiv:2401.15077) with norms.

    A matrix joins the embedding of a token and the state that goes with the token before it; one decoder layer
    follows, and a norm, after which lies the state that goes with the token.

    draft_vocab_size: Tokens that it can draft.
    activation: silu or gelu_pytorch_tanh.
    has_biases, has_head_norms: Of queries, keys and values; of queries and keys.
    """

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
    has_biases: bool = False
    has_head_norms: bool = False

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of its weights by name."""
        h, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        biases: dict[str, tuple[int, ...]] = {Q_BIAS: (q,), K_BIAS: (kv,), V_BIAS: (kv,)}
        head_norms: dict[str, tuple[int, ...]] = {Q_NORM: (self.head_dim,), K_NORM: (self.head_dim,)}
        return {
            JOIN: (h, 2 * h),
            Q: (q, h),
            K: (kv, h),
            V: (kv, h),
            **(biases if self.has_biases else {}),
            **(head_norms if self.has_head_norms else {}),
            O: (h, q),
            GATE: (self.intermediate_size, h),
            UP: (self.intermediate_size, h),
            DOWN: (h, self.intermediate_size),
            **dict.fromkeys((TOKEN_NORM, INPUT_NORM, MLP_NORM, FINAL_NORM), (h,)),
            HEAD: (self.draft_vocab_size, h),
        }

    @property
    def num_weights(self) -> int:
        return sum(map(prod, self.weights.values()))
