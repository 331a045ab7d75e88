"""An answer of a target whose layers differ is one text with the head that is published for it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from families import FAMILIES, weights_of
from head_answers import answers
from made_assistants import MadeAssistant
from tiny_blocks import specforge

from edgespec import load
from edgespec.cli.main import main
from edgespec.engine import pair_export
from edgespec.errors import UsageError
from edgespec.manifest import read_manifest

PROMPTS = ("the in the an on er in the", "in the an")
LAST = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "w2.weight")  # of what a layer adds
NORMS = tuple(f"post_{part}norm.weight" for part in ("attention_layer", "feedforward_layer", "per_layer_input_"))
SHARE = 0.1  # of it that is left, so that the next token follows from the last one more often than not
Weights = dict[str, np.ndarray]


def with_mtp(folder: Path, weights: Weights) -> list[str]:
    """A Qwen3.5 checkpoint whose layer for multi-token prediction names what the last token alone would give."""
    config = FAMILIES["qwen3_5"]["config"]
    hidden, inner, size = (config[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rng, layer = np.random.default_rng(3), "mtp.layers.0."
    shapes = {f"{layer}self_attn.{part}_proj.weight": (kv_heads * size, hidden) for part in "kv"}
    shapes |= {f"{layer}self_attn.q_proj.weight": (2 * heads * size, hidden)}
    shapes |= {f"{layer}mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
    made = {name: rng.normal(0, hidden**-0.5, shape) for name, shape in shapes.items()}
    made |= {f"{layer}self_attn.{part}_norm.weight": np.zeros(size) for part in "qk"}
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "layers.0.input_layernorm")
    made |= {f"mtp.{name}.weight": np.zeros(hidden) for name in (*names, "layers.0.post_attention_layernorm")}
    made["mtp.norm.weight"] = weights["model.norm.weight"]
    made["mtp.fc.weight"] = np.concatenate([np.eye(hidden), np.zeros((hidden, hidden))], axis=1)
    made[f"{layer}self_attn.o_proj.weight"] = np.zeros((hidden, heads * size))
    made[f"{layer}mlp.down_proj.weight"] = np.zeros((hidden, inner))
    own = {name: value.astype(np.float32) for name, value in made.items()}
    tiny.write_huggingface(folder / "target", weights | own, config=config)
    return ["--drafter", "mtp"]


def with_dspark(folder: Path, weights: Weights) -> list[str]:
    """An LFM2 checkpoint, and a head in Liquid's form that names what the token before alone would give."""
    tiny.write_huggingface(folder / "target", weights, config=FAMILIES["lfm2"]["config"])
    embedding, gain = weights["model.embed_tokens.weight"], weights["model.embedding_norm.weight"]
    known = embedding / np.sqrt((embedding**2).mean(-1, keepdims=True)) * gain
    case = specforge(change={"norm.weight": gain})
    case.change.update(
        {name: np.zeros_like(value) for name, value in case.tensors().items() if name.endswith(LAST)}
    )
    case.change.update({"markov_head.markov_w1.weight": 8 * known, "markov_head.markov_w2.weight": embedding})
    case.change["confidence_head.proj.weight"] = np.zeros((1, 2 * embedding.shape[1]), np.float32)
    parts = ("gate_proj.weight", "gate_proj.bias")
    left = ("embed_tokens.weight", "lm_head.weight", *(f"markov_head.{part}" for part in parts))
    own = {key: value for key, value in case.config["dflash_config"].items() if key != "projector_type"}
    config = {**case.config, "architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False}
    replace(case, config=config | {"dflash_config": own | {"markov_head_type": "vanilla"}}, leave_out=left).write(
        folder / "head"
    )
    return ["--drafter", str(folder / "head")]


def with_assistant(folder: Path, weights: Weights) -> list[str]:
    """A Gemma 4 checkpoint, and an assistant that names what the last token alone would give."""
    family = "gemma4-shared"
    weights |= {name: value * SHARE for name, value in weights.items() if name.endswith(NORMS)}
    tiny.write_huggingface(folder / "target", weights, config=FAMILIES[family]["config"])
    made = MadeAssistant(family=family, hidden=64)
    change = {name: np.zeros_like(value) for name, value in made.tensors().items() if name.endswith(LAST)}
    change["pre_projection.weight"] = np.concatenate([np.eye(64), np.zeros((64, 64))], axis=1).astype(np.float32)
    change["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    change["model.norm.weight"] = weights["model.norm.weight"]
    replace(made, change=change).write(folder / "head")
    return ["--drafter", str(folder / "head")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "make", "method"),
    [
        ("qwen3_5", with_mtp, "mtp"),
        ("lfm2", with_dspark, "dspark"),
        ("gemma4-shared", with_assistant, "assistant"),
    ],
)
def test_a_hybrid_and_its_head_write_the_targets_text(
    family: str,
    make: Callable[[Path, Weights], list[str]],
    method: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pair_export, "check_if_here", lambda *arguments: None)
    weights = {
        name: value * np.float32(SHARE if name.endswith(LAST) else 1) for name, value in weights_of(family).items()
    }
    pair, drafter = tmp_path / "pair", make(tmp_path, weights)
    command = ["export", str(tmp_path / "target"), *drafter, "--output", str(pair), "--no-check"]
    assert main([*command, "--precision", "fp32", "--drafter-precision", "fp32"]) == 0
    head = read_manifest(pair / "drafter").head
    assert head is not None
    assert head.method == method
    plain, *_ = answers(PROMPTS, pair / "target", drafter="none", deterministic=True)
    for schedule in ("serial", "pipelined", "hedged"):
        if schedule == "hedged" and method != "mtp":
            with pytest.raises(UsageError, match="has no tree graph"):
                load(pair, schedule=schedule)
            continue
        for length in (1, 4):
            options = {"schedule": schedule, "draft_length": length, "deterministic": True}
            found, drafted, accepted = answers(PROMPTS, pair, **options)
            assert found == plain
            assert 0 < accepted < drafted
