"""Writes a head in the speculators format, as an EAGLE head with norms, for `edgespec export --drafter`.

The trimmed vocabulary head and its lists of tokens are named as in EAGLE-3 heads of that format.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec.system.disk import replace_file
from edgespec.training.shape import HeadShape
from edgespec.training.tensor_file import write_tensors
from edgespec.types import TokenIds

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_VERSION = "0.2.0"  # of the format


def write_head(
    folder: Path, shape: HeadShape, weights: Mapping[str, npt.NDArray[np.float32]], tokens: TokenIds, target: str
) -> None:
    """Write config.json and model.safetensors, in half floats; an earlier head in the folder is replaced.

    Args:
        tokens: The target's token of each row of the vocabulary head, ascending.
        target: The name of the target or its repository.
    """
    folder.mkdir(parents=True, exist_ok=True)
    is_known = np.zeros(shape.vocab_size, np.bool_)
    is_known[tokens] = True
    tensors: dict[str, npt.NDArray[np.generic]] = {name: each.astype(np.float16) for name, each in weights.items()}
    tensors["d2t"] = tokens.astype(np.int64) - np.arange(len(tokens))
    tensors["t2d"] = is_known
    write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
    replace_file(folder / CONFIG, (json.dumps(_config(shape, target), indent=2) + "\n").encode(), 0o644)


def _config(shape: HeadShape, target: str) -> dict[str, object]:
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
        "torch_dtype": "float16",
    }
