"""Models with random weights in the shapes of real ones, written as GGUF, and a drafter that each agrees with.

The time of a pass does not depend on the values of weights, so these models stand for models that would have to
be fetched. Their blocks are Q4_0 with random bits, so that a model of 7 billion weights is written and exported
within a minute. A model of random weights would not agree with any drafter, so agreement is built in: the drafter
is the first two layers of the model, with the rows of the head that answers are made of. The later layers add
almost nothing to the residual stream, and tokens that the drafter lacks get small logits. What is left to disagree
on is this remainder, and the rounding of both. The share of accepted tokens stands for no real pair.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt
from tokenizers import pre_tokenizers

NUM_KNOWN = 2048  # tokens that answers consist of
DRAFTER_LAYERS = 2
_CONTEXT = 8192
_QUIET = 0.02  # scale of what later layers add, relative to the drafter's layers
_UNKNOWN = 0.05  # scale of the logits of tokens that the drafter lacks
_POOL = 1_048_573  # blocks; a prime, so that rows begin at different places of the pool
_CHUNK = 1 << 18  # blocks that are written at once
_BLOCK, _BLOCK_BYTES = 32, 18  # Q4_0: a scale in half floats, and 32 numbers from -8 to 7
_DEVIATION = 4.61  # of such a number where all are equally likely
_END = "<|end|>"
# GGUF's numbers for types: of values, and of tensors.
_UINT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 6, 7, 8, 9
_FORMATS = {int: (_UINT32, "<I"), float: (_FLOAT32, "<f"), bool: (_BOOL, "<?")}
_F32, _Q4_0 = 0, 2
_ALIGNMENT = 32


class Shape(NamedTuple):
    """The sizes of a llama."""

    hidden: int
    inner: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool

    @property
    def num_weights(self) -> int:
        return sum(tensor.rows * tensor.columns for tensor in _tensors(self))


# The shapes of Qwen2.5, and one for trying out the check itself.
SHAPES = {
    "tiny": Shape(128, 256, 4, 4, 2, 32, 4096, True),
    "0.5b": Shape(896, 4864, 24, 14, 2, 64, 151_936, True),
    "1.5b": Shape(1536, 8960, 28, 12, 2, 128, 151_936, True),
    "3b": Shape(2048, 11_008, 36, 16, 2, 128, 151_936, True),
    "7b": Shape(3584, 18_944, 28, 28, 4, 128, 152_064, False),
    "14b": Shape(5120, 13_824, 48, 40, 8, 128, 152_064, False),
}


def drafter_of(shape: Shape) -> Shape:
    return shape._replace(num_layers=DRAFTER_LAYERS, vocab_size=NUM_KNOWN)


class _Tensor(NamedTuple):
    """A matrix of normally distributed values, or with one column a vector of ones."""

    name: str
    rows: int
    columns: int
    scale: float
    is_head: bool = False

    @property
    def num_bytes(self) -> int:
        return 4 * self.rows if self.columns == 1 else self.rows * self.columns // _BLOCK * _BLOCK_BYTES


def write_model(path: Path, shape: Shape) -> None:
    """Write a GGUF file in Q4_0. A drafter's values are those of its model at the same places."""
    tensors, header, position = list(_tensors(shape)), b"", 0
    for tensor in tensors:
        kind, dimensions = (_F32, [tensor.rows]) if tensor.columns == 1 else (_Q4_0, [tensor.columns, tensor.rows])
        header += _string(tensor.name) + struct.pack(
            f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, position
        )
        position += _aligned(tensor.num_bytes)
    metadata = _metadata(shape)
    entries = b"".join(_string(key) + _value(value) for key, value in metadata.items())
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + entries + header)
        file.write(bytes(_aligned(file.tell()) - file.tell()))
        pool = np.random.default_rng(0).integers(0, 256, (_POOL, _BLOCK_BYTES), np.uint8)
        for tensor in tensors:
            for rows in _rows(tensor, pool):
                file.write(rows.tobytes())
            file.write(bytes(_aligned(file.tell()) - file.tell()))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    """A value of the header, after its type; of a list, whose values have one type, that of these too."""
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, list):
        each = [_value(item) for item in value]
        return (
            struct.pack("<I", _ARRAY) + each[0][:4] + struct.pack("<Q", len(each)) + b"".join(e[4:] for e in each)
        )
    kind, layout = _FORMATS[type(value)]
    return struct.pack("<I", kind) + struct.pack(layout, value)


def _rows(tensor: _Tensor, pool: npt.NDArray[np.uint8]) -> Iterator[npt.NDArray[Any]]:
    """The bytes of a tensor, in chunks of rows."""
    if tensor.columns == 1:
        yield np.ones(tensor.rows, np.float32)
        return
    num_blocks = tensor.columns // _BLOCK
    begin, step = crc32(tensor.name.encode()) % _POOL, max(1, _CHUNK // num_blocks)
    for first in range(0, tensor.rows, step):
        rows = np.arange(first, min(first + step, tensor.rows))
        blocks = pool[(begin + first * num_blocks + np.arange(len(rows) * num_blocks)) % _POOL]
        scales = np.full(len(rows), tensor.scale / _DEVIATION, np.float32)
        if tensor.is_head:  # the first token ends answers
            scales[(rows >= NUM_KNOWN) | (rows == 0)] *= _UNKNOWN
        blocks[:, :2] = np.repeat(scales.astype("<f2"), num_blocks)[:, None].view(np.uint8)
        yield blocks


def _tensors(shape: Shape) -> Iterator[_Tensor]:
    hidden, keys = shape.hidden, shape.num_kv_heads * shape.head_dim
    yield _Tensor("token_embd.weight", shape.vocab_size, hidden, 2.4 / hidden**0.5, is_head=True)
    for i in range(shape.num_layers):
        layer, loud = f"blk.{i}.", 1.0 if i < DRAFTER_LAYERS else _QUIET
        heads = shape.num_heads * shape.head_dim
        for name, rows, columns, scale in (
            ("attn_q", heads, hidden, 1.0),
            ("attn_k", keys, hidden, 1.0),
            ("attn_v", keys, hidden, 1.0),
            ("attn_output", hidden, heads, 2.0 * loud),
            ("ffn_gate", shape.inner, hidden, 1.0),
            ("ffn_up", shape.inner, hidden, 1.0),
            ("ffn_down", hidden, shape.inner, 3.0 * loud),
        ):
            yield _Tensor(f"{layer}{name}.weight", rows, columns, scale / columns**0.5)
        for norm in ("attn_norm", "ffn_norm"):
            yield _Tensor(f"{layer}{norm}.weight", hidden, 1, 1.0)
    yield _Tensor("output_norm.weight", hidden, 1, 1.0)
    if not shape.is_tied:
        yield _Tensor("output.weight", shape.vocab_size, hidden, 2.4 / hidden**0.5, is_head=True)


def _metadata(shape: Shape) -> dict[str, Any]:
    """Sizes, and a tokenizer of bytes, with words that no text is split into."""
    pieces = [_END, *sorted(pre_tokenizers.ByteLevel.alphabet()), "!!"]
    pieces += [f"w{i}" for i in range(len(pieces), shape.vocab_size)]
    return {
        "general.architecture": "llama",
        "llama.context_length": _CONTEXT,
        "llama.embedding_length": shape.hidden,
        "llama.block_count": shape.num_layers,
        "llama.feed_forward_length": shape.inner,
        "llama.attention.head_count": shape.num_heads,
        "llama.attention.head_count_kv": shape.num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.attention.key_length": shape.head_dim,
        "llama.attention.value_length": shape.head_dim,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": shape.head_dim,
        "llama.vocab_size": shape.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [3] + [1] * (shape.vocab_size - 1),
        "tokenizer.ggml.merges": ["! !"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }
