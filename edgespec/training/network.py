"""A drafting head: its sizes, its weights, and its computation in torch, for training and measuring agreement.

A text x_0 … x_{n-1} with the target's states f_0 … f_{n-1}, after its final norm, has rows r = 0 … n-2: row r
takes token x_{r+1} and the state f_r, and predicts x_{r+2}. A draft begins at a row r. Its step t takes token
x_{r+1+t}, and f_r or, for t > 0, the state that step t-1 gave; it attends to the rows up to r and to its own
draft's steps, as when drafting.
"""

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from edgespec.training.packing import Floats

if TYPE_CHECKING:
    from torch import Tensor

HEAD, JOIN, FUSE = "lm_head.weight", "fusion_fc.weight", "fc.weight"
MARKOV_ROWS, MARKOV_HEAD = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
LAYER = "transformer."  # before the names of the layer's weights
Q, K, V, O = (f"{LAYER}self_attn.{part}_proj.weight" for part in "qkvo")  # noqa: E741
Q_BIAS, K_BIAS, V_BIAS = (f"{LAYER}self_attn.{part}_proj.bias" for part in "qkv")
Q_NORM, K_NORM = (f"{LAYER}self_attn.{part}_norm.weight" for part in "qk")
GATE, UP, DOWN = (f"{LAYER}mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
INPUT_NORM, MLP_NORM = (f"{LAYER}{part}_layernorm.weight" for part in ("input", "post_attention"))
TOKEN_NORM, FINAL_NORM = "embedding_layernorm.weight", "pre_lm_head_layernorm.weight"


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Sizes and constants of a head of the EAGLE kind (Li et al., arXiv:2401.15077) with norms.

    A matrix joins the embedding of a token and the state that goes with the token before it; one decoder layer
    follows, and a norm, after which lies the state that goes with the token.

    draft_vocab_size: Tokens that it can draft.
    activation: silu or gelu_pytorch_tanh.
    has_biases, has_head_norms: Of queries, keys and values; of queries and keys.
    num_states: Hidden states of the target that are read for each token, the last of them after its final norm; a
        matrix makes one of several.
    markov_rank: Numbers through which a token adds to the logits of the next one, without the layer; 0 for none.
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
    num_states: int = 1
    markov_rank: int = 0

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of its weights by name."""
        h, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        biases: dict[str, tuple[int, ...]] = {Q_BIAS: (q,), K_BIAS: (kv,), V_BIAS: (kv,)}
        head_norms: dict[str, tuple[int, ...]] = {Q_NORM: (self.head_dim,), K_NORM: (self.head_dim,)}
        fuse: dict[str, tuple[int, ...]] = {FUSE: (h, self.num_states * h)}
        rank = self.markov_rank
        markov = {MARKOV_ROWS: (self.vocab_size, rank), MARKOV_HEAD: (self.draft_vocab_size, rank)}
        return {
            **(fuse if self.num_states > 1 else {}),
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
            **(markov if rank else {}),
        }

    @property
    def num_weights(self) -> int:
        """How many weights one draft reads, but for its row of the table of tokens (MARKOV_ROWS)."""
        return sum(prod(size) for name, size in self.weights.items() if name != MARKOV_ROWS)


class KeysAndValues(NamedTuple):
    """Keys and values, [batch, kv_heads, rows, head_dim]."""

    keys: "Tensor"
    values: "Tensor"


class Network:
    """A head over batches of packed texts.

    weights: By their names in the speculators format.
    embedding: Of the target, [vocab_size, hidden_size].
    """

    def __init__(self, shape: HeadShape, weights: "dict[str, Tensor]", embedding: "Tensor") -> None:
        self.shape, self.weights, self._embedding = shape, weights, embedding

    def arrays(self) -> dict[str, Floats]:
        """Copies of its weights: on a CPU numpy() is a view of weights that go on changing."""
        return {name: each.detach().float().cpu().numpy().copy() for name, each in self.weights.items()}

    def fuse(self, states: "Tensor") -> "Tensor":
        """One state of those of the target for each token, [batch, rows, num_states · hidden_size]."""
        return self._linear(states, FUSE) if self.shape.num_states > 1 else states

    def join(self, tokens: "Tensor", states: "Tensor") -> "Tensor":
        """The input of the layer, from tokens, [batch, rows], and states, [batch, rows, hidden_size]."""
        import torch

        return self._linear(torch.cat([self._norm(self._embedding[tokens], TOKEN_NORM), states], -1), JOIN)

    def remember(self, joined: "Tensor", positions: "Tensor") -> KeysAndValues:
        """Keys and values of rows at positions, [batch, rows]."""
        read = self._norm(joined, INPUT_NORM)
        keys, values = self._heads(self._linear(read, K, K_BIAS)), self._heads(self._linear(read, V, V_BIAS))
        return KeysAndValues(self._rotate(keys, K_NORM, positions), values)

    def step(
        self,
        joined: "Tensor",
        positions: "Tensor",
        visible: "Tensor",
        text: KeysAndValues,
        own: list[KeysAndValues],
    ) -> "Tensor":
        """Run a step of each draft, [batch, drafts, hidden_size], and give its states.

        Args:
            visible: Which rows of the text each draft attends to, [batch, drafts, rows].
            own: Of the drafts' steps after the first, this one included, [batch, kv_heads, drafts, head_dim].
        """
        queries = self._heads(self._linear(self._norm(joined, INPUT_NORM), Q, Q_BIAS))
        queries = self._rotate(queries, Q_NORM, positions)
        x = joined + self._linear(self._attend(queries, visible, text, own), O)
        read = self._norm(x, MLP_NORM)
        x = x + self._linear(self._activate(self._linear(read, GATE)) * self._linear(read, UP), DOWN)
        return self._norm(x, FINAL_NORM)

    def logits(self, states: "Tensor", tokens: "Tensor", columns: "Tensor | None" = None) -> "Tensor":
        """The logits of what follows each token, [rows, draft_vocab_size], from its state, [rows, hidden_size].

        columns: Those to compute, if not all.
        """
        some = slice(None) if columns is None else columns
        logits = states @ self.weights[HEAD][some].T
        if self.shape.markov_rank:
            logits = logits + self.weights[MARKOV_ROWS][tokens] @ self.weights[MARKOV_HEAD][some].T
        return logits

    def _linear(self, x: "Tensor", name: str, bias: str = "") -> "Tensor":
        from torch.nn.functional import linear

        return linear(x, self.weights[name], self.weights.get(bias))

    def _activate(self, x: "Tensor") -> "Tensor":
        from torch.nn.functional import gelu, silu

        return silu(x) if self.shape.activation == "silu" else gelu(x, approximate="tanh")

    def _heads(self, x: "Tensor") -> "Tensor":
        batch, rows, _ = x.shape
        return x.view(batch, rows, -1, self.shape.head_dim).transpose(1, 2)

    def _norm(self, x: "Tensor", name: str) -> "Tensor":
        import torch

        gain = self.weights[name]
        return torch.nn.functional.rms_norm(x.float(), list(gain.shape), gain, self.shape.rms_eps)

    def _rotate(self, x: "Tensor", norm: str, positions: "Tensor") -> "Tensor":
        import torch

        if self.shape.has_head_norms:
            x = self._norm(x, norm)
        half = self.shape.head_dim // 2
        frequencies = self.shape.rope_theta ** (-torch.arange(half, device=x.device) / half)
        angles = (positions[..., None] * frequencies)[:, None]
        first, second = x.float()[..., :half], x.float()[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def _attend(
        self, queries: "Tensor", visible: "Tensor", text: KeysAndValues, own: list[KeysAndValues]
    ) -> "Tensor":
        import torch

        batch, num_heads, num_drafts, head_dim = queries.shape
        num_kv, num_rows = self.shape.num_kv_heads, text.keys.shape[2]
        grouped = (batch, num_kv, num_heads // num_kv, num_drafts)
        q = (queries * head_dim**-0.5).view(*grouped, head_dim)
        scores = (q.flatten(2, 3) @ text.keys.transpose(-1, -2)).view(*grouped, num_rows)
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
        alone = [(q * step.keys[:, :, None]).sum(-1, keepdim=True) for step in own]
        shares = torch.cat([scores, *alone], -1).float().softmax(-1)
        attended = (shares[..., :num_rows].flatten(2, 3) @ text.values).view(*grouped, head_dim)
        for i, step in enumerate(own):
            attended = attended + shares[..., num_rows + i, None] * step.values[:, :, None]
        return attended.flatten(1, 2).transpose(1, 2).flatten(2)
