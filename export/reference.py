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
from typing import Protocol

import numpy as np
from threadpoolctl import threadpool_limits

from edgespec.export.blocks import Floats
from edgespec.export.decoder_config import DecoderConfig
from edgespec.export.delta import recur
from edgespec.export.mamba import scan
from edgespec.export.rotary import Rotary
from edgespec.export.routing import Routing
from edgespec.export.tensors import Tensors
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
    with threadpool_limits(1, user_api="blas"):
        return _Reference(config, tensors, models, streams, observe).logits(tokens)


@dataclass(frozen=True, slots=True)
class _Reference:
    config: DecoderConfig
    tensors: Tensors
    models: Sequence[Mapping[str, Matrix]]
    streams: Sequence[Stream]
    observe: Observe

    def logits(self, tokens: TokenIds) -> list[Logits]:
        config = self.config
        scale, residual = np.float32(config.embedding_scale), np.float32(config.residual_scale)
        rows = [scale * self._embed(stream, tokens[: stream.num_tokens]) for stream in self.streams]
        inputs, kept = self._layer_inputs(rows, tokens), dict[int, tuple[list[Floats], list[Floats]]]()
        for i in range(config.num_layers):
            normed = self._norm(f"{i}.input_norm", rows)
            parts = [self._attention(i, normed, kept)] if config.layers[i].attends else []
            parts += [self._mixed(i, normed)] if config.layers[i].has_both or not parts else []
            attended = [sum(each[1:], each[0]) for each in zip(*parts, strict=True)]
            attended = self._norm(f"{i}.attended_norm", attended)
            rows = [x + residual * y for x, y in zip(rows, attended, strict=True)]
            normed, routing = self._norm(f"{i}.mlp_norm", rows), config.routing
            has_experts = routing is not None and i >= routing.num_dense
            fed = self._mix(i, routing, normed) if routing and has_experts else self._mlp(str(i), normed)
            fed = self._norm(f"{i}.fed_norm", fed)
            rows = [x + residual * y for x, y in zip(rows, fed, strict=True)]
            rows = self._end_layer(i, rows, inputs)
        normed = [x * np.float32(config.logit_scale) for x in self._norm("final_norm", rows)]
        head = "head" if "head" in self.tensors else "embedding"
        return [_cap(x, config.logit_cap) for x in self._linear(normed, head)]

    def _layer_inputs(self, embedded: list[Floats], tokens: TokenIds) -> list[Floats]:
        """The inputs of layers for each token beside the residual stream, [num_tokens, num_layers, size] each."""
        if not (size := self.config.layer_input_size):
            return []
        found: list[Floats] = []
        tables = [self.models[stream.model]["layer_embedding"] for stream in self.streams]
        made = self._linear(embedded, "layer_projection")
        made = self._norm("layer_projection_norm", [x * np.float32(self.config.hidden_size**-0.5) for x in made])
        for x, table, stream in zip(made, tables, self.streams, strict=True):
            own = np.concatenate([table.row(int(token)) for token in tokens[: stream.num_tokens]])
            both: Floats = ((x + own * math.sqrt(size)) * math.sqrt(0.5)).astype(np.float32)
            found.append(both.reshape(len(x), -1, size))
        return found

    def _end_layer(self, i: int, rows: list[Floats], inputs: list[Floats]) -> list[Floats]:
        if inputs:
            act, gates = _ACTIVATIONS[self.config.activation], self._linear(rows, f"{i}.input_gate")
            opened = [act(gate) * own[:, i] for gate, own in zip(gates, inputs, strict=True)]
            added = self._norm(f"{i}.added_norm", self._linear(opened, f"{i}.input_projection"))
            rows = [x + y for x, y in zip(rows, added, strict=True)]
        scale = self.tensors.get(f"{i}.output_scale")
        return rows if scale is None else [x * scale.vector() for x in rows]

    def _embed(self, stream: Stream, tokens: TokenIds) -> Floats:
        embedding = self.models[stream.model]["embedding"]
        rows = np.concatenate([embedding.row(int(token)) for token in tokens])
        if not stream.noise:
            return rows
        noise = np.random.default_rng(0).standard_normal(rows.shape, np.float32)
        noisy: Floats = rows * (1 + np.float32(stream.noise) * noise)
        return noisy

    def _mlp(self, i: str, rows: list[Floats], expert: str = "") -> list[Floats]:
        gates, ups = self._linear(rows, f"{i}.gate{expert}"), self._linear(rows, f"{i}.up{expert}")
        gates = _scaled(gates, self.config.gate_scale)
        active = [_gated(self.config, gate, up) for gate, up in zip(gates, ups, strict=True)]
        return _scaled(self._linear(active, f"{i}.down{expert}"), self.config.fed_scale)

    def _mix(self, i: int, routing: Routing, rows: list[Floats]) -> list[Floats]:
        """The experts' outputs for their tokens, weighted by the router's probabilities."""
        choice = self.tensors[f"{i}.router_choice"].vector() if f"{i}.router_choice" in self.tensors else None
        shares = [_chosen_shares(routing, scores, choice) for scores in self._linear(rows, f"{i}.router")]
        mixed = self._shared(f"{i}.shared", rows) if routing.shared_size else [np.zeros_like(x) for x in rows]
        for number in range(routing.num_experts):
            own = [np.flatnonzero(share[:, number]) for share in shares]
            fed = self._mlp(str(i), [x[at] for x, at in zip(rows, own, strict=True)], f".{number}")
            for total, share, at, y in zip(mixed, shares, own, fed, strict=True):
                total[at] += share[at, number, None] * y
        return mixed

    def _shared(self, name: str, rows: list[Floats]) -> list[Floats]:
        fed = self._mlp(name, rows)
        if f"{name}.router" not in self.tensors:
            return fed
        return [y * _sigmoid(own) for y, own in zip(fed, self._linear(rows, f"{name}.router"), strict=True)]

    def _linear(self, rows: list[Floats], role: str) -> list[Floats]:
        bias = self.tensors.get(f"{role}_bias")
        # The rows of all streams of a model are multiplied at once.
        stacked = [
            np.concatenate([x for x, stream in zip(rows, self.streams, strict=True) if stream.model == model])
            for model in range(len(self.models))
        ]
        products: list[list[Floats]] = [[] for _ in self.models]
        for parts in zip(*(model[role].floats() for model in self.models), strict=True):
            self.observe(role, parts)
            for product, x, part in zip(products, stacked, parts, strict=True):
                product.append(x @ part.T)
        joined = [np.concatenate(product, axis=-1) for product in products]
        found = self._unstack(joined, rows)
        return found if bias is None else [product + bias.vector() for product in found]

    def _unstack(self, stacked: list[Floats], rows: list[Floats]) -> list[Floats]:
        """Stacked products as one for each stream, with as many rows as it has."""
        starts = [0] * len(stacked)
        found = []
        for x, stream in zip(rows, self.streams, strict=True):
            start = starts[stream.model]
            starts[stream.model] += len(x)
            found.append(stacked[stream.model][start : start + len(x)])
        return found

    def _norm(self, role: str, rows: list[Floats]) -> list[Floats]:
        """RMSNorm over groups of as many values as gains; rows themselves where the model has no such norm."""
        if role not in self.tensors:
            return rows
        gain, eps = self.tensors[role].vector(), np.float32(self.config.rms_eps)
        return [_rms_norm(x.reshape(len(x), -1, len(gain)), gain, eps).reshape(x.shape) for x in rows]

    def _attention(
        self, i: int, rows: list[Floats], kept: dict[int, tuple[list[Floats], list[Floats]]]
    ) -> list[Floats]:
        """kept: Keys and values by layer, for those that read them later."""
        layer = self.config.layers[i]
        q, *own = (self._linear(rows, f"{i}.{part}") for part in self.config.projections(i))
        k, v = (own[0], own[-1]) if own else ([], [])
        if self.config.norms_values:
            v = [self._norm_heads(i, x) for x in v]
        if self.config.norms_rotated:
            q, k = self._rotate(i, q), self._rotate(i, k)
            q, k = self._norm(f"{i}.q_norm", q), self._norm(f"{i}.k_norm", k)
        else:
            q, k = self._norm(f"{i}.q_norm", q), self._norm(f"{i}.k_norm", k)
            q, k = self._rotate(i, q), self._rotate(i, k)
        k, v = kept[i] = (k, v) if layer.keys_of is None else kept[layer.keys_of]
        if (growth := self.config.query_growth) is not None:
            q = [x * growth.scales(len(x))[:, None] for x in q]
        sinks = self.tensors[f"{i}.sinks"].vector() if f"{i}.sinks" in self.tensors else None
        attended = [_attend(self.config, i, sinks, *one) for one in zip(q, k, v, strict=True)]
        if f"{i}.q_gate" in self.tensors:
            gates = self._linear(rows, f"{i}.q_gate")
            attended = [x * _sigmoid(gate) for x, gate in zip(attended, gates, strict=True)]
        return _scaled(self._linear(attended, f"{i}.o"), self.config.attended_scale)

    def _convolution(self, i: int, rows: list[Floats]) -> list[Floats]:
        count = self.config.layers[i].convolved
        weights = self.tensors[f"{i}.conv"].vector().reshape(-1, count)
        summed = []
        for row_gate, sum_gate, x in (np.split(y, 3, axis=-1) for y in self._linear(rows, f"{i}.conv_in")):
            summed.append(sum_gate * _convolve(row_gate * x, weights))
        return self._linear(summed, f"{i}.conv_out")

    def _mixed(self, i: int, rows: list[Floats]) -> list[Floats]:
        """The output of a layer without attention."""
        layer = self.config.layers[i]
        mix = self._convolution if layer.convolved else self._delta if layer.delta else self._mamba
        return mix(i, rows)

    def _mamba(self, i: int, rows: list[Floats]) -> list[Floats]:
        rule, eps = self.config.layers[i].mamba, np.float32(self.config.rms_eps)
        assert rule is not None
        own = {part: self.tensors[f"{i}.mamba_{part}"].vector() for part in ("conv", "decay", "shift", "skip")}
        bias, gain = (self.tensors.get(f"{i}.mamba_{part}") for part in ("conv_bias", "gain"))
        projected, gated = [self._linear(rows, f"{i}.mamba_{part}") for part in ("z", "mixed", "dt")], []
        for z, mixed, dt in zip(*projected, strict=True):
            convolved = _convolve(mixed, rule.convolution(own["conv"]))
            convolved = convolved if bias is None else convolved + bias.vector()
            steps = np.logaddexp(0, dt * np.float32(rule.scales.steps) + own["shift"])
            read, values = scan(rule, _silu(convolved), steps, rule.decay(own["decay"]))
            gate = _silu(z * np.float32(rule.scales.gate))
            opened = (read + values * own["skip"][:, None]).reshape(z.shape) * gate
            if gain is not None:
                groups = opened.reshape(len(z), rule.num_groups, -1)
                opened = _rms_norm(groups, np.ones(1, np.float32), eps).reshape(z.shape) * gain.vector()
            gated.append(opened)
        return _scaled(self._linear(gated, f"{i}.mamba_out"), rule.scales.output)

    def _delta(self, i: int, rows: list[Floats]) -> list[Floats]:
        rule = self.config.layers[i].delta
        assert rule is not None
        own = {part: self.tensors[f"{i}.delta_{part}"].vector() for part in _DELTA}
        projected = [self._linear(rows, f"{i}.delta_{part}") for part in ("qkv", "z", "a", "b")]
        gated = []
        for qkv, z, a, b in zip(*projected, strict=True):
            mixed = _silu(_convolve(qkv, own["conv"].reshape(-1, rule.convolved)))
            decay = rule.decay(own["decay"]) * np.logaddexp(0, a + own["shift"])
            read = recur(rule, mixed, decay, _sigmoid(b))
            normed = _rms_norm(read, own["gain"], np.float32(self.config.rms_eps)).reshape(z.shape)
            gated.append(normed * _silu(z))
        return self._linear(gated, f"{i}.delta_out")

    def _norm_heads(self, i: int, x: Floats) -> Floats:
        heads = x.reshape(len(x), -1, self.config.head_size(i))
        return _rms_norm(heads, np.ones(1, np.float32), np.float32(self.config.rms_eps)).reshape(x.shape)

    def _rotate(self, i: int, rows: list[Floats]) -> list[Floats]:
        rotary, size = self.config.layers[i].rotary, self.config.head_size(i)
        if rotary is None:
            return rows
        return [_rotate(x.reshape(len(x), -1, size), rotary).reshape(x.shape) for x in rows]


_DELTA = ("conv", "decay", "shift", "gain")


def _scaled(rows: list[Floats], scale: float) -> list[Floats]:
    return rows if scale == 1.0 else [x * np.float32(scale) for x in rows]


def _convolve(rows: Floats, weights: Floats) -> Floats:
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


def _rotate(x: Floats, rotary: Rotary) -> Floats:
    angles = np.outer(np.arange(len(x), dtype=np.float32), rotary.inv_freq)[:, None]
    cos, sin = np.cos(angles) * np.float32(rotary.scale), np.sin(angles) * np.float32(rotary.scale)
    half = rotary.rotated // 2
    first, second, rest = np.split(x, [half, 2 * half], axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
