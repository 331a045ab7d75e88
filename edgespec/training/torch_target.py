"""A target in torch, which reads many texts at once and gives hidden states and logits.

It computes what the exported graph does, for decoders whose layers are attention over the whole text and a gated
MLP. Weights are those of the source in bf16, or in float32 where that is as fast.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from timeit import repeat
from typing import TYPE_CHECKING

from edgespec import cores, free_memory
from edgespec.export.sources import LoadedSource
from edgespec.training.warm_start import matrix

if TYPE_CHECKING:
    from torch import Tensor

_ROLES = {"input_norm", "attended_norm", "mlp_norm", "fed_norm", "q", "k", "v", "o", "gate", "up", "down"}
_ROLES |= {"q_bias", "k_bias", "v_bias", "o_bias", "q_norm", "k_norm", "embedding", "final_norm", "head"}


def why_not(source: LoadedSource) -> str | None:
    """The part of a target that torch does not run; None where it runs all."""
    config, other = source.config, {role.rpartition(".")[2] for role in source.tensors} - _ROLES
    if config.routing is not None or other:
        return "experts" if config.routing is not None else f"weights of the kind {min(other)}"
    if config.is_mixed or any(layer.keys_of is not None or not layer.has_values for layer in config.layers):
        return "layers without keys and values of their own, or with more than these"
    windows = [layer.sliding_window for layer in config.layers if layer.sliding_window]
    if windows and min(windows) < config.context_length:
        return "attention over a window"
    is_plain = config.attention_cap is None and config.query_growth is None and config.gate_limit is None
    if config.other_heads or config.norms_rotated or config.norms_values or not is_plain:
        return "attention of another kind"
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """True for the errors of torch and Python that say so; that of torch on a CPU has no type of its own."""
    import torch

    is_said = any(words in str(error) for words in ("allocate memory", "out of memory"))
    return is_said or isinstance(error, (torch.OutOfMemoryError, MemoryError))


def faster_precision(device: str) -> str:
    """bf16 where its products take less time than those of float32, which on a CPU needs matrix instructions."""
    import torch

    if device != "cpu":
        return "bf16" if device.startswith("cuda") and torch.cuda.is_bf16_supported() else "fp32"
    times = {}
    for name, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        a, b = torch.ones(256, 1024, dtype=kind), torch.ones(4096, 1024, dtype=kind)
        times[name] = min(repeat(partial(torch.matmul, a, b.T), repeat=5, number=1))
    return "bf16" if times["bf16"] < 0.7 * times["fp32"] else "fp32"


def weights_bytes(source: LoadedSource, precision: str) -> int:
    """The bytes of a target's weights in bf16 or fp32."""
    return (2 if precision == "bf16" else 4) * sum(each.rows * each.columns for each in source.tensors.values())


def free_bytes(device: str) -> int:
    """The bytes of memory that a GPU, or the machine, has free."""
    import torch

    return int(torch.cuda.mem_get_info()[0]) if device.startswith("cuda") else free_memory().free_bytes


class TorchTarget:
    """The weights of a target on a device, in fp32 or bf16, and its passes."""

    def __init__(self, source: LoadedSource, device: str, precision: str = "fp32") -> None:
        import torch

        self.source, self.config, self.device = source, source.config, device
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32

        def read(role: str) -> "Tensor":
            tensor = source.tensors[role]
            values = tensor.vector() if role.endswith(("_norm", "_bias")) else matrix(tensor)
            return torch.from_numpy(values).to(device, self.dtype)

        with ThreadPoolExecutor(cores().physical) as pool:
            self._weights = dict(zip(source.tensors, pool.map(read, source.tensors), strict=True))
        rotaries = {layer.rotary for layer in self.config.layers if layer.rotary is not None}
        self._unwritten = torch.tensor(source.vocabulary.suppressed_token_ids, dtype=torch.long, device=device)
        self._frequencies = {each: torch.from_numpy(each.inv_freq).to(device) for each in rotaries}

    @property
    def token_bytes(self) -> int:
        """The bytes of the keys and values of a token."""
        config = self.config
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * int(self.dtype.itemsize)

    def read(
        self, tokens: "Tensor", keep: Sequence[int], store: "Callable[..., None] | None" = None
    ) -> "list[Tensor]":
        """Run texts from their beginning, [texts, rows], and give the states after some layers.

        store: Called with a layer, its keys and its values, [texts, kv_heads, rows, head_dim].
        """
        import torch

        def attend(i: int, q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
            if store is not None:
                store(i, k, v)
            attention = torch.nn.functional.scaled_dot_product_attention
            return attention(q, k, v, is_causal=True, scale=self.config.attention_scale, enable_gqa=True)

        positions = torch.arange(tokens.shape[1], device=self.device).expand(tokens.shape)
        return self._run(tokens, positions, attend, keep)

    def next_logits(
        self, tokens: "Tensor", positions: "Tensor", keys: "Tensor", values: "Tensor", window: int
    ) -> "Tensor":
        """Logits after one more token of each text, [texts, vocab_size], whose keys and values are stored too.

        Args:
            tokens, positions: [texts].
            keys, values: [layers, texts, kv_heads, capacity, head_dim].
            window: The positions of all are below it.
        """
        import torch

        config, line = self.config, torch.arange(len(tokens), device=self.device)
        is_seen = torch.arange(window, device=self.device) <= positions[:, None, None, None]
        mask = torch.zeros(is_seen.shape, dtype=self.dtype, device=self.device).masked_fill(~is_seen, -torch.inf)

        def attend(i: int, q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
            keys[i][line, :, positions], values[i][line, :, positions] = k[:, :, 0], v[:, :, 0]
            # The heads that share keys are rows of one text, since one query each is too little work.
            grouped = q.reshape(len(q), config.num_kv_heads, -1, config.head_dim)
            attended = torch.nn.functional.scaled_dot_product_attention(
                grouped,
                keys[i][:, :, :window],
                values[i][:, :, :window],
                attn_mask=mask.expand(*grouped.shape[:3], window),
                scale=config.attention_scale,
            )
            return attended.reshape(q.shape)

        (normed,) = self._run(tokens[:, None], positions[:, None], attend, [config.num_layers])
        return self.logits(normed[:, 0])

    def in_step(
        self, tokens: "Tensor", firsts: "Tensor", keys: "Tensor", values: "Tensor", at: int, keep: Sequence[int]
    ) -> "list[Tensor]":
        """States after some layers of one more token of each text, [texts, hidden_size].

        Args:
            tokens: [texts].
            firsts: The place in the cache of each text's first token, [texts].
            keys, values: [layers, texts, kv_heads, capacity, head_dim].
            at: The place of all tokens, whose keys and values are stored there.
        """
        import torch

        config, window = self.config, at + 1
        is_hidden = torch.arange(window, device=self.device) < firsts[:, None, None, None]
        mask = torch.zeros(is_hidden.shape, device=self.device).masked_fill(is_hidden, -torch.inf)

        def attend(i: int, q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
            keys[i][:, :, at], values[i][:, :, at] = k[:, :, 0], v[:, :, 0]
            # The heads that share keys are rows of one product, as in next_logits.
            grouped = q.reshape(len(q), config.num_kv_heads, -1, config.head_dim) * config.attention_scale
            scores = (grouped @ keys[i][:, :, :window].transpose(-1, -2)).float() + mask
            return (scores.softmax(-1).to(self.dtype) @ values[i][:, :, :window]).reshape(q.shape)

        return [each[:, 0] for each in self._run(tokens[:, None], (at - firsts)[:, None], attend, keep)]

    def logits(self, normed: "Tensor") -> "Tensor":
        """Logits in float32 of states after the final norm; of tokens that the target never writes, -inf."""
        import torch

        head = self._weights.get("head", self._weights["embedding"])
        logits = (normed @ head.T).float() * self.config.logit_scale
        cap = self.config.logit_cap
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        return logits.index_fill_(-1, self._unwritten, -torch.inf)

    def _run(
        self, tokens: "Tensor", positions: "Tensor", attend: "Callable[..., Tensor]", keep: Sequence[int]
    ) -> "list[Tensor]":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        # Not cuDNN's, which builds a plan for each new shape.
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return self._run_layers(tokens, positions, attend, keep)

    def _run_layers(
        self, tokens: "Tensor", positions: "Tensor", attend: "Callable[..., Tensor]", keep: Sequence[int]
    ) -> "list[Tensor]":
        config, kept = self.config, list["Tensor"]()
        x = self._weights["embedding"][tokens] * config.embedding_scale
        turns = {each: self._turn(positions, freq, each.scale) for each, freq in self._frequencies.items()}
        for i in range(config.num_layers):
            read = self._norm(x, f"{i}.input_norm")
            q, k, v = (self._heads(i, part, read) for part in "qkv")
            if (rotary := config.layers[i].rotary) is not None:
                q, k = (_rotate(each, *turns[rotary]) for each in (q, k))
            attended = self._linear(attend(i, q, k, v).transpose(1, 2).flatten(2), f"{i}.o")
            x = x.add(self._norm(attended, f"{i}.attended_norm"), alpha=config.residual_scale)
            read = self._norm(x, f"{i}.mlp_norm")
            gated = self._activate(self._linear(read, f"{i}.gate")) * self._linear(read, f"{i}.up")
            fed = self._norm(self._linear(gated, f"{i}.down"), f"{i}.fed_norm")
            x = x.add(fed, alpha=config.residual_scale)
            if i in keep:
                kept.append(x)
        if config.num_layers in keep:
            kept.append(self._norm(x, "final_norm"))
        return kept

    def _turn(self, positions: "Tensor", frequencies: "Tensor", scale: float) -> "tuple[Tensor, Tensor]":
        """Cosines and sines of positions, [texts, 1, rows, rotated / 2]."""
        angles = (positions[..., None] * frequencies)[:, None]
        return angles.cos() * scale, angles.sin() * scale

    def _heads(self, i: int, part: str, x: "Tensor") -> "Tensor":
        """Queries, keys or values, [texts, heads, rows, head_dim]."""
        made = self._linear(x, f"{i}.{part}")
        if (gain := self._weights.get(f"{i}.{part}_norm")) is not None:  # over a head, or over all at once
            made = self._norm(made.unflatten(-1, (-1, len(gain))), f"{i}.{part}_norm").flatten(-2)
        return made.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def _norm(self, x: "Tensor", role: str) -> "Tensor":
        import torch

        gain = self._weights.get(role)
        return x if gain is None else torch.nn.functional.rms_norm(x, gain.shape, gain, self.config.rms_eps)

    def _linear(self, x: "Tensor", role: str) -> "Tensor":
        from torch.nn.functional import linear

        return linear(x, self._weights[role], self._weights.get(f"{role}_bias"))

    def _activate(self, x: "Tensor") -> "Tensor":
        from torch.nn.functional import gelu, silu

        return silu(x) if self.config.activation == "silu" else gelu(x, approximate="tanh")


def _rotate(x: "Tensor", cos: "Tensor", sin: "Tensor") -> "Tensor":
    import torch

    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1).to(x.dtype)
