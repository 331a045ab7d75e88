"""The head's computation in torch, as functions of its weights, for training and for measuring its agreement.

A text x_0 … x_{n-1} with the target's hidden states f_0 … f_{n-1} has rows r = 0 … n-2: row r takes token x_{r+1}
and the fused f_r, and predicts x_{r+2}. A draft begins at a row r. Its step t takes token x_{r+1+t}, and the fused
f_r or, for t > 0, what step t-1 gave; it attends to the rows up to r and to its own draft's steps, as when drafting.
"""

from typing import TYPE_CHECKING, NamedTuple

from edgespec.training.shape import (
    DOWN,
    FINAL_NORM,
    FUSE,
    GATE,
    HEAD,
    K_BIAS,
    MLP_NORM,
    Q_BIAS,
    STATE_NORM,
    TOKEN_NORM,
    UP,
    V_BIAS,
    HeadShape,
    K,
    O,
    Q,
    V,
)

if TYPE_CHECKING:
    from torch import Tensor


class Memory(NamedTuple):
    """Keys and values, [batch, kv_heads, rows, head_dim]."""

    keys: "Tensor"
    values: "Tensor"


class Network:
    """A head over batches of packed texts.

    weights: By their names in the speculators format.
    embedding: Of the target, [vocab_size, hidden_size], or of fewer tokens where batches name those alone.
    """

    def __init__(self, shape: HeadShape, weights: "dict[str, Tensor]", embedding: "Tensor") -> None:
        self.shape, self.weights, self._embedding = shape, weights, embedding

    def fuse(self, features: "Tensor") -> "Tensor":
        """States from hidden states of the target, [batch, rows, layers · hidden_size]."""
        from torch.nn.functional import linear

        return linear(features, self.weights[FUSE])

    def remember(self, tokens: "Tensor", states: "Tensor", positions: "Tensor") -> Memory:
        """Keys and values of rows, [batch, rows]."""
        from torch.nn.functional import linear

        read = self._read(tokens, states)
        w = self.weights
        keys, values = (
            self._heads(linear(read, w[name], w.get(bias))) for name, bias in ((K, K_BIAS), (V, V_BIAS))
        )
        return Memory(self._rotate(keys, positions), values)

    def step(
        self,
        tokens: "Tensor",
        states: "Tensor",
        positions: "Tensor",
        visible: "Tensor",
        text: Memory,
        own: list[Memory],
    ) -> "Tensor":
        """Run a step of each draft, [batch, drafts], and give its states, [batch, drafts, hidden_size].

        Args:
            visible: Which rows of the text each draft attends to, [batch, drafts, rows].
            own: Of the drafts' steps behind the first, this one included, [batch, kv_heads, drafts, head_dim].
        """
        from torch.nn.functional import linear

        w = self.weights
        queries = self._rotate(self._heads(linear(self._read(tokens, states), w[Q], w.get(Q_BIAS))), positions)
        x = states + linear(self._attend(queries, visible, text, own), w[O])
        read = self._norm(x, MLP_NORM)
        moved: Tensor = x + linear(self._activate(linear(read, w[GATE])) * linear(read, w[UP]), w[DOWN])
        return moved

    def logits(self, states: "Tensor") -> "Tensor":
        from torch.nn.functional import linear

        return linear(self._norm(states, FINAL_NORM), self.weights[HEAD])

    def _read(self, tokens: "Tensor", states: "Tensor") -> "Tensor":
        """What queries, keys and values are read from, [batch, rows, 2 · hidden_size]."""
        import torch

        return torch.cat([self._norm(self._embedding[tokens], TOKEN_NORM), self._norm(states, STATE_NORM)], -1)

    def _activate(self, x: "Tensor") -> "Tensor":
        from torch.nn.functional import gelu, silu

        return silu(x) if self.shape.activation == "silu" else gelu(x, approximate="tanh")

    def _heads(self, x: "Tensor") -> "Tensor":
        return x.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)

    def _norm(self, x: "Tensor", name: str) -> "Tensor":
        from torch.nn.functional import rms_norm

        gain = self.weights[name]
        return rms_norm(x.float(), gain.shape, gain, self.shape.rms_eps)

    def _rotate(self, x: "Tensor", positions: "Tensor") -> "Tensor":
        import torch

        half = self.shape.head_dim // 2
        frequencies = self.shape.rope_theta ** (-torch.arange(half, device=x.device) / half)
        angles = (positions[..., None] * frequencies)[:, None]
        first, second = x.float().split(half, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def _attend(self, queries: "Tensor", visible: "Tensor", text: Memory, own: list[Memory]) -> "Tensor":
        import torch

        num_kv, num_drafts = self.shape.num_kv_heads, queries.shape[2]
        num_groups = self.shape.num_heads // num_kv
        q = (queries * self.shape.head_dim**-0.5).unflatten(1, (num_kv, num_groups))
        scores = (q.flatten(2, 3) @ text.keys.transpose(-1, -2)).unflatten(2, (num_groups, num_drafts))
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
        alone = [(q * step.keys[:, :, None]).sum(-1, keepdim=True) for step in own]
        shares = torch.cat([scores, *alone], -1).float().softmax(-1)
        num_rows = scores.shape[-1]
        attended = (shares[..., :num_rows].flatten(2, 3) @ text.values).unflatten(2, (num_groups, num_drafts))
        for i, step in enumerate(own):
            attended = attended + shares[..., num_rows + i, None] * step.values[:, :, None]
        return attended.flatten(1, 2).transpose(1, 2).flatten(2)
