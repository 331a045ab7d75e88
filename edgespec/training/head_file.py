"""The files of a head: safetensors, and the speculators format, as `edgespec export --drafter` reads it.

A head is an EAGLE head with norms; its trimmed vocabulary head, its lists of tokens and the matrix over several
states are named as in EAGLE-3 heads of that format, its Markov head as DSpark's. Safetensors files are written at
once and read whole, by hand, since that is thirty lines, and since nothing in one is ever run, other than in a
pickle of torch. Format: the safetensors README.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec import ModelError, TokenIds
from edgespec.system.disk import explain_write_errors, replace_file
from edgespec.training.network import HeadShape

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_LAYERS = "eagle_aux_hidden_state_layer_ids"  # counted from the embedding
_VERSION = "0.2.0"  # of the speculators format
_DTYPES = {"F32": "<f4", "F16": "<f2", "I64": "<i8", "BOOL": "|b1"}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_ALIGNMENT = 8

Array = npt.NDArray[Any]


def write_head(
    folder: Path,
    shape: HeadShape,
    weights: Mapping[str, npt.NDArray[np.float32]],
    tokens: TokenIds,
    target: str,
    layers: Sequence[int] = (),
) -> None:
    """Write config.json and model.safetensors, in half floats; an earlier head in the folder is replaced.

    Args:
        tokens: The target's token of each row of the vocabulary head, ascending.
        target: The name of the target or its repository.
        layers: Of the target whose states are read beside the one after its final norm.

    Raises DiskFull: There is no room; earlier weights stay then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    is_known = np.zeros(shape.vocab_size, np.bool_)
    is_known[tokens] = True
    tensors: dict[str, npt.NDArray[np.generic]] = {name: each.astype(np.float16) for name, each in weights.items()}
    tensors["d2t"] = tokens.astype(np.int64) - np.arange(len(tokens))
    tensors["t2d"] = is_known
    config = (json.dumps(_config(shape, target, layers), indent=2) + "\n").encode()
    with explain_write_errors(folder, len(config)):
        replace_file(folder / CONFIG, config, 0o644)  # first, since another run takes weights for a whole head
    write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})


def read_weights(folder: Path, shape: HeadShape) -> dict[str, npt.NDArray[np.float32]]:
    """The weights of a head that write_head wrote; raises ModelError: They are damaged, or of other sizes."""
    tensors, _ = read_tensors(folder / WEIGHTS)
    if any(name not in tensors or tensors[name].shape != size for name, size in shape.weights.items()):
        raise ModelError(f"{folder / WEIGHTS} is a head of other sizes; remove it and train again")
    return {name: tensors[name].astype(np.float32) for name in shape.weights}


def _config(shape: HeadShape, target: str, layers: Sequence[int]) -> dict[str, object]:
    return {
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
        "speculators_model_type": "eagle",
        "speculators_version": _VERSION,
        "speculators_config": {
            "algorithm": "eagle",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": {
            "model_type": "qwen3" if shape.has_head_norms else "llama",
            "num_hidden_layers": 1,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "rms_norm_eps": shape.rms_eps,
            "rope_theta": shape.rope_theta,
            "max_position_embeddings": shape.context_length,
            "hidden_act": shape.activation,
            "attention_bias": shape.has_biases,
            "mlp_bias": False,
            "vocab_size": shape.vocab_size,
        },
        "layernorms": True,
        "fusion_bias": False,
        "draft_vocab_size": shape.draft_vocab_size,
        **({_LAYERS: [layer + 1 for layer in layers]} if shape.num_states > 1 else {}),
        "torch_dtype": "float16",
    }


def write_tensors(path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Raises DiskFull: There is no room; an earlier file stays then."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, tensor in tensors.items():
        stop = start + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    parts = [
        struct.pack("<Q", len(text)),
        text,
        *(np.ascontiguousarray(tensor).tobytes() for tensor in tensors.values()),
    ]
    with explain_write_errors(path.parent, sum(map(len, parts))):
        replace_file(path, b"".join(parts), 0o644)


def read_tensors(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """Arrays by name, and the metadata. Raises ModelError: The file is damaged."""
    content = path.read_bytes()
    try:
        (length,) = struct.unpack_from("<Q", content)
        header = json.loads(content[8 : 8 + length])
        metadata = header.pop("__metadata__", {})
        body = memoryview(content)[8 + length :]
        tensors = {
            name: np.frombuffer(body[slice(*info["data_offsets"])], _DTYPES[info["dtype"]]).reshape(info["shape"])
            for name, info in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(f"{path} is damaged ({error}); remove it and train again") from None
    return tensors, metadata
