"""Models with random weights in the shapes of real ones, written row by row, and a drafter that each agrees with.

The time of a pass does not depend on the values of weights, so these models stand for models that would have to be
fetched. A model of random weights would not agree with any drafter, so agreement is built in: the drafter is the
first two layers of the model, with the rows of the head that answers are made of. The later layers add almost
nothing to the residual stream, and tokens that the drafter lacks get small logits. What is left to disagree on is
this remainder, and the rounding of both. The share of accepted tokens stands for no real pair.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NUM_KNOWN = 2048  # tokens in the tokenizer; answers consist of these
DRAFTER_LAYERS = 2
_CONTEXT = 8192
_QUIET = 0.02  # scale of what later layers add, relative to the drafter's layers
_UNKNOWN = 0.05  # scale of the logits of tokens that the tokenizer lacks
_POOL = 4_194_301  # a prime, so that rows begin at different places of the pool
_CHUNK = 1 << 21
_END = "<|end|>"


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


def write_model(folder: Path, shape: Shape) -> None:
    """Write a Hugging Face folder in half floats. A drafter's values are those of its model at the same places."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_config(shape)))
    (folder / "tokenizer.json").write_text(_tokenizer().to_str())
    tensors = list(_tensors(shape))
    header, position = {}, 0
    for tensor in tensors:
        end = position + 2 * tensor.rows * tensor.columns
        dimensions = [tensor.rows] if tensor.columns == 1 else [tensor.rows, tensor.columns]
        header[tensor.name] = {"dtype": "F16", "shape": dimensions, "data_offsets": [position, end]}
        position = end
    metadata = json.dumps(header).encode()
    pool = np.random.default_rng(0).standard_normal(_POOL, np.float32)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(metadata)) + metadata)
        for tensor in tensors:
            for rows in _rows(tensor, pool):
                file.write(rows.astype("<f2").tobytes())


def _rows(tensor: _Tensor, pool: npt.NDArray[np.float32]) -> Iterator[npt.NDArray[np.float32]]:
    """The rows of a tensor, in chunks."""
    if tensor.columns == 1:
        yield np.ones(tensor.rows, np.float32)
        return
    begin, step = crc32(tensor.name.encode()) % _POOL, max(1, _CHUNK // tensor.columns)
    for first in range(0, tensor.rows, step):
        rows = np.arange(first, min(first + step, tensor.rows))
        places = (begin + first * tensor.columns + np.arange(len(rows) * tensor.columns)) % _POOL
        scales = np.full(len(rows), tensor.scale, np.float32)
        if tensor.is_head:  # the first token ends answers
            scales[(rows >= NUM_KNOWN) | (rows == 0)] *= _UNKNOWN
        yield pool[places].reshape(len(rows), -1) * scales[:, None]


def _tensors(shape: Shape) -> Iterator[_Tensor]:
    hidden, keys = shape.hidden, shape.num_kv_heads * shape.head_dim
    yield _Tensor("model.embed_tokens.weight", shape.vocab_size, hidden, 2.4 / hidden**0.5, is_head=True)
    for i in range(shape.num_layers):
        layer, loud = f"model.layers.{i}.", 1.0 if i < DRAFTER_LAYERS else _QUIET
        heads = shape.num_heads * shape.head_dim
        for name, rows, columns, scale in (
            ("self_attn.q_proj", heads, hidden, 1.0),
            ("self_attn.k_proj", keys, hidden, 1.0),
            ("self_attn.v_proj", keys, hidden, 1.0),
            ("self_attn.o_proj", hidden, heads, 2.0 * loud),
            ("mlp.gate_proj", shape.inner, hidden, 1.0),
            ("mlp.up_proj", shape.inner, hidden, 1.0),
            ("mlp.down_proj", hidden, shape.inner, 3.0 * loud),
        ):
            yield _Tensor(f"{layer}{name}.weight", rows, columns, scale / columns**0.5)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield _Tensor(f"{layer}{norm}.weight", hidden, 1, 1.0)
    yield _Tensor("model.norm.weight", hidden, 1, 1.0)
    if not shape.is_tied:
        yield _Tensor("lm_head.weight", shape.vocab_size, hidden, 2.4 / hidden**0.5, is_head=True)


def _config(shape: Shape) -> dict[str, object]:
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": _CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eos_token_id": 0,
        "tie_word_embeddings": shape.is_tied,
    }


def _tokenizer() -> Tokenizer:
    """A tokenizer of bytes, and of words that no text is split into."""
    pieces = [_END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [f"w{i}" for i in range(len(pieces), NUM_KNOWN)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(_END, special=True)])
    return tokenizer
