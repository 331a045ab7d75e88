"""Tiny drafting heads with random weights, as model folders for the tiny model, and numpy references for them.

Written node by node, so that they do not depend on how edgespec exports heads.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from shutil import copyfile
from typing import Any

import numpy as np
import onnx
import tiny
from onnx import TensorProto, helper, numpy_helper

from edgespec.manifest import Head, Manifest, Signature, read_manifest, write_manifest
from edgespec.manifest.caches import KVCache
from edgespec.system.file_hashes import file_record
from edgespec.types import TokenIds

LAYERS = (0, 1, 2)  # the last is the state behind the final norm
H, INNER = tiny.HIDDEN, tiny.INNER
_QUERIES, _KEYS = tiny.HEADS * tiny.HEAD_DIM, tiny.KV_HEADS * tiny.HEAD_DIM
_OPSETS = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
Weights = dict[str, np.ndarray]


def recurrent_weights(seed: int = 0, *, num_rows: int = tiny.VOCAB) -> Weights:
    """Weights of a head like EAGLE-3's, [columns, rows] as MatMul takes them."""
    rng = np.random.default_rng(seed)

    def matrix(columns: int, rows: int, scale: float = 1.0) -> np.ndarray:
        return rng.normal(0, scale / np.sqrt(columns), (columns, rows)).astype(np.float32)

    return {
        "embedding": rng.normal(0, 0.3, (tiny.VOCAB, H)).astype(np.float32),
        "fuse": matrix(len(LAYERS) * H, H),
        **{f"norm_{name}": 1 + matrix(1, H, 0.1)[0] for name in ("token", "state", "mlp", "final")},
        "q": matrix(2 * H, _QUERIES),
        "k": matrix(2 * H, _KEYS),
        "v": matrix(2 * H, _KEYS),
        "o": matrix(_QUERIES, H),
        "gate": matrix(H, INNER),
        "up": matrix(H, INNER),
        "down": matrix(INNER, H),
        "head": matrix(H, num_rows, 2),
    }


def recurrent_states(
    weights: Weights, tokens: TokenIds, features: np.ndarray, places: Sequence[int] | None = None
) -> np.ndarray:
    """The state behind each token but the first, [num_tokens - 1, H], in float64.

    Args:
        features: Hidden states of the first tokens; behind them the head's own are read.
        places: For each token the one before it, of a tree; a chain by default.
    """
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    before = [*range(-1, len(tokens) - 1)] if places is None else [*places]
    states: dict[int, np.ndarray] = {}
    keys: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for at in range(1, len(tokens)):
        above = _path(before, at)
        position = len(above) - 2  # the first token has no slot
        hidden = features[before[at]] @ w["fuse"] if before[at] < len(features) else states[before[at]]
        token = w["embedding"][tokens[at]]
        x = np.concatenate([_norm(token, w["norm_token"]), _norm(hidden, w["norm_state"])])
        q, k, v = ((x @ w[part]).reshape(-1, tiny.HEAD_DIM) for part in "qkv")
        keys[at] = (_rotate(k, position), v)
        seen = [keys[each] for each in above if each > 0]
        q, share = _rotate(q, position), tiny.HEADS // tiny.KV_HEADS
        attended = []
        for number, query in enumerate(q):
            scores = np.array([query @ key[number // share] for key, _ in seen]) / np.sqrt(tiny.HEAD_DIM)
            chances = np.exp(scores - scores.max())
            attended.append(chances / chances.sum() @ np.array([value[number // share] for _, value in seen]))
        residual = hidden + np.concatenate(attended) @ w["o"]
        h = _norm(residual, w["norm_mlp"])
        gate = h @ w["gate"]
        states[at] = residual + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]
    return np.array([states[at] for at in range(1, len(tokens))])


def recurrent_rows(weights: Weights, states: np.ndarray) -> np.ndarray:
    """Logits behind each state, [num_states, num_rows]."""
    return _norm(states, weights["norm_final"]) @ weights["head"]


def write_recurrent(
    folder: Path,
    target: Path,
    weights: Weights,
    *,
    subset: TokenIds | None = None,
    gives_all: bool = False,
    **changes: Any,
) -> Manifest:
    """Write the folder of a head for the tiny model in target.

    gives_all: Its graphs give the states of all tokens, as those that were exported before do.
    """
    folder.mkdir(parents=True)
    head = Head(
        method="eagle3",
        kind="recurrent",
        target_layers=LAYERS,
        target_hidden_size=H,
        state_size=H,
        fuse_graph="model_fuse.onnx",
    )
    _save(folder / "model.onnx", _recurrent_graph(weights, has_tree=False, gives_all=gives_all), has_data=True)
    _save(folder / "model_tree.onnx", _recurrent_graph(weights, has_tree=True, gives_all=gives_all))
    fuse = _Graph(weights)
    fuse.op("MatMul", "features", "fuse", out="hidden")
    floats = TensorProto.FLOAT
    inputs = [("features", floats, [1, "num_tokens", len(LAYERS) * H])]
    _save(folder / "model_fuse.onnx", fuse.model(inputs, [("hidden", floats, [1, "num_tokens", H])]))
    if subset is not None:
        np.save(folder / "vocab_subset.npy", subset)
    kv = KVCache(num_layers=1, num_kv_heads=tiny.KV_HEADS, head_dim=tiny.HEAD_DIM)
    named = {"vocab_subset": "vocab_subset.npy"} if subset is not None else {}
    return _finish(folder, target, head, kv_cache=kv, tree_graph="model_tree.onnx", **named, **changes)


def step_weights(seed: int = 0, num_steps: int = 3) -> Weights:
    """Weights of a head like an MLP speculator: an embedding, a projection and a vocabulary head for each step."""
    rng = np.random.default_rng(seed)
    width = {0: len(LAYERS) * H}
    weights: Weights = {}
    for step in range(num_steps):
        columns = width.get(step, H)
        weights[f"embedding_{step}"] = rng.normal(0, 0.5, (tiny.VOCAB, H)).astype(np.float32)
        weights[f"project_{step}"] = rng.normal(0, 1 / np.sqrt(columns), (columns, H)).astype(np.float32)
        weights[f"head_{step}"] = rng.normal(0, 2 / np.sqrt(H), (H, tiny.VOCAB)).astype(np.float32)
    return weights


def step_rows(weights: Weights, taken: Iterable[int], state: np.ndarray) -> np.ndarray:
    """Logits of the steps that take these tokens, from the hidden state of the target, [num_steps, vocab_size]."""
    rows = []
    for step, token in enumerate(taken):
        state = np.tanh(state @ weights[f"project_{step}"] + weights[f"embedding_{step}"][token])
        rows.append(state @ weights[f"head_{step}"])
    return np.array(rows)


def write_steps(folder: Path, target: Path, weights: Weights, **changes: Any) -> Manifest:
    """Write the folder of a head of steps for the tiny model in target."""
    folder.mkdir(parents=True)
    names = [f"model_step_{step}.onnx" for step in range(len(weights) // 3)]
    for step, name in enumerate(names):
        graph = _Graph(weights)
        graph.op("Gather", f"embedding_{step}", "input_ids", out="token")
        graph.op("MatMul", "hidden", f"project_{step}", out="projected")
        graph.op("Tanh", graph.op("Add", "token", "projected"), out="state")
        graph.op("MatMul", "state", f"head_{step}", out="logits")
        width = weights[f"project_{step}"].shape[0]
        inputs = [("input_ids", TensorProto.INT64, [1, 1]), ("hidden", TensorProto.FLOAT, [1, 1, width])]
        outputs = [("logits", TensorProto.FLOAT, [1, 1, tiny.VOCAB]), ("state", TensorProto.FLOAT, [1, 1, H])]
        _save(folder / name, graph.model(inputs, outputs), has_data=step == 0)
    head = Head(
        method="mlp_speculator",
        kind="steps",
        target_layers=LAYERS,
        target_hidden_size=H,
        state_size=len(LAYERS) * H,
        step_graphs=tuple(names),
    )
    kv = KVCache(num_layers=0, num_kv_heads=1, head_dim=1)
    return _finish(folder, target, head, kv_cache=kv, graph=names[0], **changes)


def _finish(folder: Path, target: Path, head: Head, **changes: Any) -> Manifest:
    copyfile(target / "tokenizer.json", folder / "tokenizer.json")
    head = replace(head, **{name: changes.pop(name) for name in list(changes) if name in asdict(head)})
    manifest = replace(
        read_manifest(target),
        name=folder.name,
        architecture=head.method,
        head=head,
        hidden_layers=(),
        tree_graph=None,
        chat_template=None,
        signature=Signature(),
    )
    manifest = replace(manifest, **changes)
    manifest = replace(manifest, files={path.name: file_record(path) for path in sorted(folder.iterdir())})
    write_manifest(folder, manifest)
    return manifest


class _Graph:
    """A graph over some of the weights, written node by node."""

    def __init__(self, weights: Weights) -> None:
        self.weights = dict(weights)
        self.nodes: list[onnx.NodeProto] = []

    def op(self, kind: str, *inputs: str, out: str | None = None, **attributes: Any) -> str:
        out = out or f"value_{len(self.nodes)}"
        domain = "com.microsoft" if kind == "GroupQueryAttention" else ""
        self.nodes.append(helper.make_node(kind, [*inputs], [out], domain=domain, **attributes))
        return out

    def constant(self, name: str, value: np.ndarray) -> str:
        self.weights[name] = value
        return name

    def norm(self, x: str, gain: str) -> str:
        return self.op("SimplifiedLayerNormalization", x, gain, epsilon=tiny.EPS, axis=-1)

    def model(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> onnx.ModelProto:
        used = {name for node in self.nodes for name in node.input}
        values = [[helper.make_tensor_value_info(*value) for value in each] for each in (inputs, outputs)]
        tensors = [
            numpy_helper.from_array(self.weights[name], name) for name in sorted(used & self.weights.keys())
        ]
        graph = helper.make_graph(self.nodes, "head", *values, tensors)
        return helper.make_model(graph, opset_imports=_OPSETS, ir_version=10)


def _recurrent_graph(weights: Weights, *, has_tree: bool, gives_all: bool) -> onnx.ModelProto:
    graph = _Graph(weights)
    op, constant = graph.op, graph.constant
    angles = np.outer(np.arange(tiny.CONTEXT), tiny.THETA ** (-np.arange(0, tiny.HEAD_DIM, 2) / tiny.HEAD_DIM))
    constant("cos", np.cos(angles).astype(np.float32))
    constant("sin", np.sin(angles).astype(np.float32))
    summed = op("ReduceSum", "attention_mask", constant("axis", np.array([1])), keepdims=0)
    last = op("Cast", op("Sub", summed, constant("one", np.array([1]))), to=TensorProto.INT32)
    whole = op("Gather", op("Shape", "attention_mask"), constant("at", np.array(1)), axis=0)
    total = op("Cast", whole, to=TensorProto.INT32)
    token = graph.norm(op("Gather", "embedding", "input_ids"), "norm_token")
    x = op("Concat", token, graph.norm("hidden", "norm_state"), axis=-1)
    past = ["past_key_values.0.key", "past_key_values.0.value"]
    present = ["present.0.key", "present.0.value"]
    more = ["position_ids", "attention_bias"] if has_tree else []
    graph.nodes.append(
        helper.make_node(
            "GroupQueryAttention",
            [*(op("MatMul", x, part) for part in "qkv"), *past, last, total, "cos", "sin", *more],
            ["attended", *present],
            domain="com.microsoft",
            do_rotary=1,
            num_heads=tiny.HEADS,
            kv_num_heads=tiny.KV_HEADS,
        )
    )
    residual = op("Add", "hidden", op("MatMul", "attended", "o"))
    normed = graph.norm(residual, "norm_mlp")
    gate = op("MatMul", normed, "gate")
    active = op("Mul", op("Mul", gate, op("Sigmoid", gate)), op("MatMul", normed, "up"))
    op("Add", residual, op("MatMul", active, "down"), out="all")
    start = op("Sub", op("Shape", "all", start=1, end=2), "num_logits_to_keep")
    end = constant("end", np.array([np.iinfo(np.int64).max]))
    kept = op("Slice", "all", start, end, "axis", out="kept")
    op("MatMul", graph.norm(kept, "norm_final"), "head", out="logits")
    op("Identity", "all" if gives_all else kept, out="state")
    ints, floats = TensorProto.INT64, TensorProto.FLOAT
    cache = [1, tiny.KV_HEADS, "capacity", tiny.HEAD_DIM]
    inputs = [
        ("input_ids", ints, [1, "num_tokens"]),
        ("hidden", floats, [1, "num_tokens", H]),
        ("attention_mask", ints, [1, "total"]),
        ("num_logits_to_keep", ints, [1]),
        *((name, floats, cache) for name in past),
    ]
    if has_tree:
        inputs += [
            ("position_ids", ints, [1, "num_tokens"]),
            ("attention_bias", floats, [1, 1, "num_tokens", "total"]),
        ]
    rows = weights["head"].shape[1]
    outputs = [
        ("logits", floats, [1, "num_logits", rows]),
        ("state", floats, [1, "num_tokens" if gives_all else "num_logits", H]),
        *((name, floats, cache) for name in present),
    ]
    return graph.model(inputs, outputs)


def _save(path: Path, model: onnx.ModelProto, *, has_data: bool = False) -> None:
    if not has_data:
        onnx.save_model(model, path)
        return
    onnx.save_model(model, path, save_as_external_data=True, location="model.onnx.data", size_threshold=1024)


def _norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + tiny.EPS) * gain


def _rotate(x: np.ndarray, position: int) -> np.ndarray:
    angles = position * tiny.THETA ** (-np.arange(0, tiny.HEAD_DIM, 2) / tiny.HEAD_DIM)
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _path(before: Sequence[int], at: int) -> list[int]:
    found = []
    while at >= 0:
        found.append(at)
        at = before[at]
    return found[::-1]


def fit_vocabulary_head(
    rows: Sequence[np.ndarray], following: Sequence[TokenIds], size: int = tiny.VOCAB
) -> np.ndarray:
    """A vocabulary head that gives, behind each state, the token that followed it, [H, size]; by least squares."""
    x, tokens = np.concatenate(rows), np.concatenate(following)
    wanted = np.zeros((len(tokens), size))
    wanted[np.arange(len(tokens)), tokens] = 12.0
    fitted = np.linalg.solve(x.T @ x + 1e-3 * np.eye(x.shape[1]), x.T @ wanted)
    return fitted.astype(np.float32)


def fit_recurrent(target: Weights, weights: Weights, texts: Sequence[TokenIds]) -> Weights:
    """A head whose vocabulary head knows texts of its target."""
    rows = [
        _norm(recurrent_states(weights, text, features(target, text)), weights["norm_final"])[:-1]
        for text in texts
    ]
    return {**weights, "head": fit_vocabulary_head(rows, [text[2:] for text in texts])}


def fit_steps(target: Weights, weights: Weights, texts: Sequence[TokenIds]) -> Weights:
    """A head of steps whose vocabulary heads know texts of its target."""
    fitted, num_steps = dict(weights), len(weights) // 3
    for step in range(num_steps):
        rows, following = [], []
        for text in texts:
            state = features(target, text)[: len(text) - num_steps - 1]
            for before in range(step + 1):
                tokens = text[before + 1 : before + 1 + len(state)]
                state = np.tanh(state @ weights[f"project_{before}"] + weights[f"embedding_{before}"][tokens])
            rows.append(state)
            following.append(text[step + 2 : step + 2 + len(state)])
        fitted[f"head_{step}"] = fit_vocabulary_head(rows, following)
    return fitted


def features(target: Weights, tokens: TokenIds) -> np.ndarray:
    """Hidden states of the tiny model as the heads read them, [num_tokens, len(LAYERS) * H]."""
    states = tiny.reference_states(target, tokens)
    return np.concatenate([states[layer] for layer in LAYERS], axis=1)
