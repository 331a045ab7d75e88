"""The transformer written out in numpy over the stored weights, to check an export against.

Reads one chunk of one matrix at a time, so it needs little memory for any model. It shares with the graph only the
description of the model and the decoding of blocks. Several texts or weights can go through it together, each a
stream of activations, so that a matrix is decoded once for all of them.

numpy's products run on one thread here. Threads of theirs would spin while matrices are decoded, which takes more
time than multiplying: for SmolLM2 and its export 3.1 s of processor time instead of 1.6, and 12 on a busy machine.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from threadpoolctl import threadpool_limits

from edgespec.export.blocks import Floats
from edgespec.export.decoder_config import DecoderConfig
from edgespec.export.delta import recur
from edgespec.export.mamba import scan
from edgespec.export.rotary import Rotary
from edgespec.export.routing import Routing
from edgespec.export.tensors import Index, Tensors
from edgespec.types import Logits, TokenIds


class Matrix(Protocol):
    """A matrix that is read some rows at a time."""

    def row(self, index: int) -> Floats: ...

    def floats(self) -> Iterator[Floats]: ...


Observe = Callable[[str, Sequence[Floats]], None]
"""Takes the role of a matrix and some of its rows as each of the models has them."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A run of the first tokens of a text: by which model, how many, and with what noise on its embedding."""

    model: int = 0
    num_tokens: int | None = None  # all unless given
    noise: float = 0.0


def reference_logits(config: DecoderConfig, tensors: Tensors, tokens: TokenIds) -> Logits:
    """Logits that follow each token, [num_tokens, vocab_size], in float32."""
    return stream_logits(config, tensors, [tensors], [Stream()], tokens)[0]


def stream_logits(
    config: DecoderConfig,
    tensors: Tensors,
    models: Sequence[Mapping[str, Matrix]],
    streams: Sequence[Stream],
    tokens: TokenIds,
    observe: Observe = lambda role, parts: None,
) -> list[Logits]:
    """Logits that follow each token of each stream, [num_tokens, vocab_size] each.

    Args:
        tensors: The source's, of which norms and biases are read.
        models: Matrices by their roles; streams name them by number. Their rows come in equal parts.
        observe: Called with every part of every matrix that is multiplied.
    """
    texts = [tokens[: stream.num_tokens] for stream in streams]
    with threadpool_limits(1, user_api="blas"):
        return _Reference(config, tensors, models, streams, texts, observe).logits()


@dataclass(frozen=True, slots=True)
class _Reference:
    """The rows of all streams lie one after another, [num_rows, size]; texts are the tokens of each stream."""

    config: DecoderConfig
    tensors: Tensors
    models: Sequence[Mapping[str, Matrix]]
    streams: Sequence[Stream]
    texts: Sequence[TokenIds]
    observe: Observe

    def logits(self) -> list[Logits]:
        config, residual = self.config, np.float32(self.config.residual_scale)
        rows = np.float32(config.embedding_scale) * self._embed()
        inputs, kept = self._layer_inputs(rows), dict[int, tuple[Floats, Floats]]()
        for i in range(config.num_layers):
            normed = self._norm(f"{i}.input_norm", rows)
            parts = [self._attention(i, normed, kept)] if config.layers[i].attends else []
            parts += [self._mixed(i, normed)] if config.layers[i].has_both or not parts else []
            rows = rows + residual * self._norm(f"{i}.attended_norm", sum(parts[1:], parts[0]))
            normed, routing = self._norm(f"{i}.mlp_norm", rows), config.routing
            has_experts = routing is not None and i >= routing.num_dense
            fed = self._mix(i, routing, normed) if routing and has_experts else self._mlp(str(i), normed)
            rows = rows + residual * self._norm(f"{i}.fed_norm", fed)
            rows = self._end_layer(i, rows, inputs)
        normed = self._norm("final_norm", rows) * np.float32(config.logit_scale)
        head = "head" if "head" in self.tensors else "embedding"
        return self._apart(_cap(self._linear(normed, head), config.logit_cap))

    def _apart(self, rows: Floats) -> list[Floats]:
        """The rows of each stream."""
        return np.split(rows, np.cumsum([len(text) for text in self.texts])[:-1])

    def _by_stream(self, function: Callable[..., Floats], *rows: Floats) -> Floats:
        """The rows that a function gives, of those of each stream alone."""
        return np.concatenate([function(*each) for each in zip(*map(self._apart, rows), strict=True)])

    @property
    def _positions(self) -> TokenIds:
        return np.concatenate([np.arange(len(text), dtype=np.int32) for text in self.texts])

    def _look_up(self, role: str) -> list[Floats]:
        """The rows of a matrix for the tokens of each stream."""
        matrices = [self.models[stream.model][role] for stream in self.streams]
        return [
            np.concatenate([matrix.row(int(token)) for token in text])
            for matrix, text in zip(matrices, self.texts, strict=True)
        ]

    def _embed(self) -> Floats:
        found = self._look_up("embedding")
        for at, stream in enumerate(self.streams):
            if stream.noise:
                noise = np.random.default_rng(0).standard_normal(found[at].shape, np.float32)
                found[at] = found[at] * (1 + np.float32(stream.noise) * noise)
        return np.concatenate(found)

    def _layer_inputs(self, embedded: Floats) -> Floats | None:
        """The inputs of layers for each row beside the residual stream, [num_rows, num_layers, size]."""
        if not (size := self.config.layer_input_size):
            return None
        made = self._linear(embedded, "layer_projection") * np.float32(self.config.hidden_size**-0.5)
        made = self._norm("layer_projection_norm", made)
        own = np.concatenate(self._look_up("layer_embedding"))
        both: Floats = ((made + own * math.sqrt(size)) * math.sqrt(0.5)).astype(np.float32)
        return both.reshape(len(made), -1, size)

    def _end_layer(self, i: int, rows: Floats, inputs: Floats | None) -> Floats:
        if inputs is not None:
            opened = _ACTIVATIONS[self.config.activation](self._linear(rows, f"{i}.input_gate")) * inputs[:, i]
            rows = rows + self._norm(f"{i}.added_norm", self._linear(opened, f"{i}.input_projection"))
        scale = self.tensors.get(f"{i}.output_scale")
        return rows if scale is None else rows * scale.vector()

    def _mlp(self, i: str, rows: Floats, expert: str = "", at: Index | None = None) -> Floats:
        """at: The numbers of the rows, where these are not all."""
        gate, up = (self._linear(rows, f"{i}.{part}{expert}", at) for part in ("gate", "up"))
        active = _gated(self.config, gate * np.float32(self.config.gate_scale), up)
        return self._linear(active, f"{i}.down{expert}", at) * np.float32(self.config.fed_scale)

    def _mix(self, i: int, routing: Routing, rows: Floats) -> Floats:
        """The experts' outputs for their tokens, weighted by the router's probabilities."""
        choice = self.tensors[f"{i}.router_choice"].vector() if f"{i}.router_choice" in self.tensors else None
        shares = _chosen_shares(routing, self._linear(rows, f"{i}.router"), choice)
        mixed = self._shared(f"{i}.shared", rows) if routing.shared_size else np.zeros_like(rows)
        for number in range(routing.num_experts):
            at = np.flatnonzero(shares[:, number])
            mixed[at] += shares[at, number, None] * self._mlp(str(i), rows[at], f".{number}", at)
        return mixed

    def _shared(self, name: str, rows: Floats) -> Floats:
        fed, router = self._mlp(name, rows), f"{name}.router"
        return fed * _sigmoid(self._linear(rows, router)) if router in self.tensors else fed

    def _linear(self, rows: Floats, role: str, at: Index | None = None) -> Floats:
        """Rows times a matrix of the model of each; at: the numbers of the rows, where these are not all."""
        numbers = np.repeat([stream.model for stream in self.streams], [len(text) for text in self.texts])
        owners = numbers if at is None else numbers[at]
        places = [np.flatnonzero(owners == model) for model in range(len(self.models))]
        stacked, products = [rows[own] for own in places], []
        for parts in zip(*(model[role].floats() for model in self.models), strict=True):
            self.observe(role, parts)
            product = np.empty((len(rows), len(parts[0])), np.float32)
            for own, x, part in zip(places, stacked, parts, strict=True):
                product[own] = x @ part.T
            products.append(product)
        bias, product = self.tensors.get(f"{role}_bias"), np.concatenate(products, axis=-1)
        return product if bias is None else product + bias.vector()

    def _norm(self, role: str, rows: Floats) -> Floats:
        """RMSNorm over groups of as many values as gains; rows themselves where the model has no such norm."""
        if role not in self.tensors:
            return rows
        gain, eps = self.tensors[role].vector(), np.float32(self.config.rms_eps)
        return _rms_norm(rows.reshape(len(rows), -1, len(gain)), gain, eps).reshape(rows.shape)

    def _attention(self, i: int, rows: Floats, kept: dict[int, tuple[Floats, Floats]]) -> Floats:
        """kept: Keys and values by layer, for those that read them later."""
        layer = self.config.layers[i]
        q, *own = (self._linear(rows, f"{i}.{part}") for part in self.config.projections(i))
        q = self._place(i, q, f"{i}.q_norm")
        if own:
            value = self._norm_heads(i, own[-1]) if self.config.norms_values else own[-1]
            kept[i] = self._place(i, own[0], f"{i}.k_norm"), value
        k, v = kept[i if layer.keys_of is None else layer.keys_of]
        if (growth := self.config.query_growth) is not None:
            q = q * growth.scales(len(rows))[self._positions, None]
        sinks = self.tensors[f"{i}.sinks"].vector() if f"{i}.sinks" in self.tensors else None
        attended = self._by_stream(partial(_attend, self.config, i, sinks), q, k, v)
        if f"{i}.q_gate" in self.tensors:
            attended = attended * _sigmoid(self._linear(rows, f"{i}.q_gate"))
        return self._linear(attended, f"{i}.o") * np.float32(self.config.attended_scale)

    def _place(self, i: int, x: Floats, norm: str) -> Floats:
        """Queries or keys, normed and rotated by position."""
        if self.config.norms_rotated:
            return self._norm(norm, self._rotate(i, x))
        return self._rotate(i, self._norm(norm, x))

    def _convolution(self, i: int, rows: Floats) -> Floats:
        weights = self.tensors[f"{i}.conv"].vector().reshape(-1, self.config.layers[i].convolved)
        row_gate, sum_gate, x = np.split(self._linear(rows, f"{i}.conv_in"), 3, axis=-1)
        summed = self._by_stream(partial(_convolve, weights), row_gate * x)
        return self._linear(sum_gate * summed, f"{i}.conv_out")

    def _mixed(self, i: int, rows: Floats) -> Floats:
        """The output of a layer without attention."""
        layer = self.config.layers[i]
        mix = self._convolution if layer.convolved else self._delta if layer.delta else self._mamba
        return mix(i, rows)

    def _mamba(self, i: int, rows: Floats) -> Floats:
        rule, eps = self.config.layers[i].mamba, np.float32(self.config.rms_eps)
        assert rule is not None
        own = {part: self.tensors[f"{i}.mamba_{part}"].vector() for part in ("conv", "decay", "shift", "skip")}
        bias, gain = (self.tensors.get(f"{i}.mamba_{part}") for part in ("conv_bias", "gain"))
        z, mixed, dt = (self._linear(rows, f"{i}.mamba_{part}") for part in ("z", "mixed", "dt"))
        convolved = self._by_stream(partial(_convolve, rule.convolution(own["conv"])), mixed)
        convolved = convolved if bias is None else convolved + bias.vector()
        steps = np.logaddexp(0, dt * np.float32(rule.scales.steps) + own["shift"])
        active = _silu(convolved)
        read = self._by_stream(partial(scan, rule, factor=rule.decay(own["decay"])), active, steps)
        values = active[:, : rule.num_values].reshape(read.shape)
        gate = _silu(z * np.float32(rule.scales.gate))
        opened = (read + values * own["skip"][:, None]).reshape(z.shape) * gate
        if gain is not None:
            groups = opened.reshape(len(z), rule.num_groups, -1)
            opened = _rms_norm(groups, np.ones(1, np.float32), eps).reshape(z.shape) * gain.vector()
        return self._linear(opened, f"{i}.mamba_out") * np.float32(rule.scales.output)

    def _delta(self, i: int, rows: Floats) -> Floats:
        rule = self.config.layers[i].delta
        assert rule is not None
        own = {part: self.tensors[f"{i}.delta_{part}"].vector() for part in _DELTA}
        qkv, z, a, b = (self._linear(rows, f"{i}.delta_{part}") for part in ("qkv", "z", "a", "b"))
        weights = own["conv"].reshape(-1, rule.convolved)
        mixed = _silu(self._by_stream(partial(_convolve, weights), qkv))
        decay = rule.decay(own["decay"]) * np.logaddexp(0, a + own["shift"])
        read = self._by_stream(partial(recur, rule), mixed, decay, _sigmoid(b))
        normed = _rms_norm(read, own["gain"], np.float32(self.config.rms_eps)).reshape(z.shape)
        return self._linear(normed * _silu(z), f"{i}.delta_out")

    def _norm_heads(self, i: int, x: Floats) -> Floats:
        heads = x.reshape(len(x), -1, self.config.head_size(i))
        return _rms_norm(heads, np.ones(1, np.float32), np.float32(self.config.rms_eps)).reshape(x.shape)

    def _rotate(self, i: int, rows: Floats) -> Floats:
        rotary, size = self.config.layers[i].rotary, self.config.head_size(i)
        if rotary is None:
            return rows
        return _rotate(rows.reshape(len(rows), -1, size), self._positions, rotary).reshape(rows.shape)


_DELTA = ("conv", "decay", "shift", "gain")


def _convolve(weights: Floats, rows: Floats) -> Floats:
    """Sums of rows with the weights of each of their tokens, which are [width, num_tokens]."""
    count = weights.shape[1]
    padded = np.concatenate([np.zeros((count - 1, rows.shape[1]), np.float32), rows])
    summed: Floats = np.sum([padded[at : at + len(rows)] * weights[:, at] for at in range(count)], axis=0)
    return summed


def _rms_norm(x: Floats, gain: Floats, eps: np.float32) -> Floats:
    scaled: Floats = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps) * gain
    return scaled


def _attend(config: DecoderConfig, i: int, sinks: Floats | None, q: Floats, k: Floats, v: Floats) -> Floats:
    """sinks: A score for each head, [num_heads], that takes its share and has no value."""
    num_tokens = len(q)
    q, k, v = (y.reshape(num_tokens, -1, config.head_size(i)) for y in (q, k, v))
    groups = config.num_heads // config.kv_heads(i)
    k, v = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k, optimize=True) * np.float32(config.attention_scale)
    scores = _cap(scores, config.attention_cap) + _mask(config.layers[i].sliding_window, num_tokens)
    sink = np.full((1, 1, 1), -np.inf, np.float32) if sinks is None else sinks[:, None, None]
    largest = np.maximum(scores.max(axis=-1, keepdims=True), sink)
    share = np.exp(scores - largest)
    share /= share.sum(axis=-1, keepdims=True) + np.exp(sink - largest)
    attended: Floats = np.einsum("hqk,khd->qhd", share, v, optimize=True).reshape(num_tokens, -1)
    return attended


def _chosen_shares(routing: Routing, scores: Floats, choice: Floats | None) -> Floats:
    """The weights of the experts that a token chooses, and 0 for the others."""
    if routing.is_sigmoid:
        share = _sigmoid(scores)
    else:
        share = np.exp(scores - scores.max(axis=-1, keepdims=True))
        share /= share.sum(axis=-1, keepdims=True)
    judged = share if choice is None else share + choice
    if routing.num_used_groups < routing.num_groups:
        groups = judged.reshape(len(judged), routing.num_groups, -1)
        sums = np.sort(groups, axis=-1)[..., -2:].sum(axis=-1)
        least = np.sort(sums, axis=-1)[:, -routing.num_used_groups, None]
        judged = np.where((sums >= least)[..., None], groups, -np.inf).reshape(judged.shape)
    chosen = np.argsort(-judged, axis=-1, kind="stable")[:, : routing.num_used]
    kept: Floats = np.zeros_like(share)
    np.put_along_axis(kept, chosen, np.take_along_axis(share, chosen, axis=-1), axis=-1)
    if routing.is_normalized:
        kept /= kept.sum(axis=-1, keepdims=True)
    return kept * np.float32(routing.scale)


def _sigmoid(x: Floats) -> Floats:
    result: Floats = np.exp(-np.logaddexp(0, -x))
    return result


def _silu(x: Floats) -> Floats:
    return x * _sigmoid(x)


def _gelu_tanh(x: Floats) -> Floats:
    """The approximation by tanh of Hendrycks and Gimpel, arXiv:1606.08415."""
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)
    result: Floats = np.float32(0.5) * x * (1 + np.tanh(inner))
    return result


_ACTIVATIONS = {"silu": _silu, "gelu_pytorch_tanh": _gelu_tanh}


def _gated(config: DecoderConfig, gate: Floats, up: Floats) -> Floats:
    if (gates := config.gate_limit) is None:
        return _ACTIVATIONS[config.activation](gate) * up
    slope, limit = np.float32(gates.slope), np.float32(gates.limit)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    gated: Floats = gate / (1 + np.exp(-slope * gate)) * (up + 1)
    return gated


def _cap(x: Floats, cap: float | None) -> Floats:
    return x if cap is None else np.float32(cap) * np.tanh(x / np.float32(cap))


def _mask(sliding_window: int | None, num_tokens: int) -> Floats:
    """−∞ where a key lies ahead of the query, or as far behind as the sliding window is wide."""
    ahead = np.arange(num_tokens) - np.arange(num_tokens)[:, None]
    hidden = ahead > 0
    if sliding_window is not None:
        hidden |= ahead <= -sliding_window
    return np.where(hidden, np.float32(-np.inf), np.float32(0))


def _rotate(x: Floats, positions: TokenIds, rotary: Rotary) -> Floats:
    angles = np.outer(positions.astype(np.float32), rotary.inv_freq)[:, None]
    cos, sin = np.cos(angles) * np.float32(rotary.scale), np.sin(angles) * np.float32(rotary.scale)
    half = rotary.rotated // 2
    first, second, rest = np.split(x, [half, 2 * half], axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
