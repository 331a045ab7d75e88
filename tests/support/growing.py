"""Tiny decoders with growing caches, the form that graphs traced from PyTorch have."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import tiny
from onnx import numpy_helper

from edgespec.export.vocabulary import vocabulary_from_gguf
from edgespec.manifest import Manifest, Signature, Source, write_manifest
from edgespec.manifest.caches import KVCache
from edgespec.system.file_hashes import file_record
from edgespec.text.tokenizer import vocabulary_sha256

LAYERS, HEADS, HEAD_DIM = 2, 2, 16
WIDTH = HEADS * HEAD_DIM

# One layer; {i} is its number. The causal mask is cut from the shapes of past and present.
_LAYER = """
    q{i} = MatMul(x{i}, wq{i})
    k{i} = MatMul(x{i}, wk{i})
    v{i} = MatMul(x{i}, wv{i})
    q{i}_split = Reshape(q{i}, heads)
    k{i}_split = Reshape(k{i}, heads)
    v{i}_split = Reshape(v{i}, heads)
    query{i} = Transpose<perm = [0, 2, 1, 3]>(q{i}_split)
    key{i} = Transpose<perm = [0, 2, 1, 3]>(k{i}_split)
    value{i} = Transpose<perm = [0, 2, 1, 3]>(v{i}_split)
    present_key{i} = Concat<axis = 2>(past_key{i}, key{i})
    present_value{i} = Concat<axis = 2>(past_value{i}, value{i})
    turned{i} = Transpose<perm = [0, 1, 3, 2]>(present_key{i})
    scores{i} = MatMul(query{i}, turned{i})
    masked{i} = Add(scores{i}, mask)
    share{i} = Softmax<axis = -1>(masked{i})
    attended{i} = MatMul(share{i}, present_value{i})
    together{i} = Transpose<perm = [0, 2, 1, 3]>(attended{i})
    flat{i} = Reshape(together{i}, width)
    mixed{i} = MatMul(flat{i}, wo{i})
    x{next} = Add(x{i}, mixed{i})
"""

_GRAPH = """
<ir_version: 9, opset_import: ["" : 18]>
decoder ({inputs}) => ({outputs})
{{
    embedded = Gather(embedding, tokens)
    num_past = Shape<start = 2, end = 3>(past_key0)
    num_new = Shape<start = 1, end = 2>(tokens)
    total = Add(num_past, num_new)
    {positions}
    placed = Gather(places, positions)
    x0 = Add(embedded, placed)
    square = Concat<axis = 0>(num_new, total)
    hidden = Expand(minus, square)
    behind = Add(num_past, one)
    behind_scalar = Squeeze(behind)
    causal = Trilu<upper = 1>(hidden, behind_scalar)
    {masked}
    {layers}
    rows = MatMul(x{num_layers}, head)
}}
"""


def write_growing(
    folder: Path,
    *,
    position_ids: bool = True,
    attention_mask: bool = True,
    context_length: int = 700,
    dtype: str = "float32",
) -> Path:
    """A model folder with its manifest."""
    names = Signature(
        attention_mask="attention_mask" if attention_mask else None,
        position_ids="position_ids" if position_ids else None,
        num_logits_to_keep=None,
    )
    folder.mkdir(parents=True)
    write_graph(folder / "model.onnx", names, context_length, dtype=dtype)
    write_tokenizer(folder)
    tokenizer = vocabulary()
    manifest = Manifest(
        name=folder.name,
        architecture="growing",
        precision="fp32",
        context_length=context_length,
        kv_cache=KVCache(form="growing", num_layers=LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype=dtype),
        signature=names,
        vocab_size=tiny.VOCAB,
        vocab_sha256=vocabulary_sha256(tokenizer),
        bos_token_id=1,
        eos_token_ids=(),
        add_bos=False,
        source=Source(name="growing", format="test", sha256=""),
        weights="model.onnx",
        files={path.name: file_record(path) for path in folder.iterdir()},
    )
    write_manifest(folder, manifest)
    return folder


def write_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(vocabulary().to_str())
    (folder / "chat_template.jinja").write_text(tiny.TEMPLATE)


def vocabulary() -> Any:
    from tokenizers import Tokenizer

    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tiny.PIECES,
        "tokenizer.ggml.token_type": tiny.TYPES,
        "tokenizer.ggml.merges": tiny.MERGES,
    }
    return Tokenizer.from_str(vocabulary_from_gguf("tiny", metadata).tokenizer_json)


def write_graph(
    path: Path, names: Signature, context_length: int, *, external: str | None = None, dtype: str = "float32"
) -> None:
    """The graph, with its weights inside or, given a name, in that file beside it."""
    text = _text(names)
    if dtype == "float16":
        text = text.replace("float[", "float16[").replace("to = 1>", "to = 10>")
    model = onnx.parser.parse_model(text)
    _rename(model.graph, names)
    for name, value in _weights(context_length).items():
        stored = value.astype(dtype) if value.dtype == np.float32 else value
        model.graph.initializer.append(numpy_helper.from_array(stored, name))
    if external:
        onnx.save(model, path, save_as_external_data=True, location=external, size_threshold=1024)
    else:
        onnx.save(model, path)


def _text(names: Signature) -> str:
    """The graph in ONNX's own notation, under names without dots."""
    cache = f"float[1, {HEADS}, {{}}, {HEAD_DIM}]"
    inputs, outputs = ["int64[1, new] tokens"], [f"float[1, new, {tiny.VOCAB}] rows"]
    inputs += ["int64[1, total] attended"] if names.attention_mask else []
    inputs += ["int64[1, new] given"] if names.position_ids else []
    for i in range(LAYERS):
        inputs += [f"{cache.format('past')} past_{part}{i}" for part in ("key", "value")]
        outputs += [f"{cache.format('total')} present_{part}{i}" for part in ("key", "value")]
    counted = "start = Squeeze(num_past)\n stop = Squeeze(total)\n positions = Range(start, stop, step)"
    seen = "seen = Cast<to = 1>(attended)\n absent = Sub(unit, seen)\n far = Mul(absent, minus)\n"
    return _GRAPH.format(
        inputs=", ".join(inputs),
        outputs=", ".join(outputs),
        positions="positions = Identity(given)" if names.position_ids else counted,
        masked=f"{seen} mask = Add(causal, far)" if names.attention_mask else "mask = Identity(causal)",
        layers="".join(_LAYER.format(i=i, next=i + 1) for i in range(LAYERS)),
        num_layers=LAYERS,
    )


def _rename(graph: onnx.GraphProto, names: Signature) -> None:
    new = {"tokens": names.input_ids, "attended": names.attention_mask, "given": names.position_ids}
    new["rows"] = names.logits
    parts = [f"{part}{i}" for i in range(LAYERS) for part in ("key", "value")]
    for part, (past, present) in zip(parts, names.caches(range(LAYERS)), strict=True):
        new |= {f"past_{part}": past, f"present_{part}": present}
    for value in [*graph.input, *graph.output]:
        value.name = new[value.name]
    for node in graph.node:
        for values in (node.input, node.output):
            values[:] = [new.get(value, value) for value in values]


def _weights(context_length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        return rng.normal(0, scale / np.sqrt(rows), (rows, columns)).astype(np.float32)

    weights = {
        "embedding": matrix(tiny.VOCAB, WIDTH, 12),
        "places": matrix(context_length, WIDTH, 12),
        "head": matrix(WIDTH, tiny.VOCAB, 2),
        "heads": np.array([1, -1, HEADS, HEAD_DIM], np.int64),
        "width": np.array([1, -1, WIDTH], np.int64),
        "one": np.array([1], np.int64),
        "step": np.array(1, np.int64),
        "unit": np.array(1, np.float32),
        "minus": np.array(-10000, np.float32),
    }
    for i in range(LAYERS):
        weights |= {f"w{part}{i}": matrix(WIDTH, WIDTH) for part in "qkvo"}
    return weights
