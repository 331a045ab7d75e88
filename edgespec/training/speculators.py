"""Writes a head in the speculators format, which vLLM reads and `edgespec export --drafter` too."""

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
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": _VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "transformer_layer_config": {
            "model_type": "llama",
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
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": shape.hidden_size,
        # Counted from the embedding, 0: i is the state that layer i reads, and that layer i - 1 gives.
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in shape.layers],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "torch_dtype": "float16",
    }
