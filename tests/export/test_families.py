"""Each family against transformers' own logits, drawn from tests/support/make_references.py."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from families import CONTEXT_LENGTHS, FAMILIES, LOGITS, SOURCES, TOKENS, weights_of, write_source

from edgespec.errors import SourceError
from edgespec.export.convert import export_model
from edgespec.export.families import DecoderConfig, config_from_gguf
from edgespec.export.gguf import read_gguf
from edgespec.export.sources import read_source
from edgespec.export.tensors import StoredTensor
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.onnx import OnnxDecoder

pytestmark = pytest.mark.slow  # a module of many models or processes


def largest_difference(source: Path, output: Path, family: str) -> float:
    manifest = export_model(source, output, precision="fp32", context_length=CONTEXT_LENGTHS.get(family))
    decoder = OnnxDecoder(output, manifest, find_device("cpu"))
    wanted = LOGITS[family]
    decoder.logits(TOKENS[:23], 1)  # the rest goes on from a cache
    return float(np.abs(decoder.logits(TOKENS, len(wanted)) - wanted).max())


@pytest.mark.parametrize(("family", "form"), SOURCES)
def test_export_gives_the_logits_of_transformers(tmp_path: Path, family: str, form: str) -> None:
    assert largest_difference(write_source(tmp_path, family, form), tmp_path / "out", family) < 1e-4


OLD_CONFIGS = {  # as the models' own folders have them, without what transformers takes for granted
    "gemma3": {
        "model_type": "gemma3_text",
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        **{
            key: FAMILIES["gemma3"]["config"][key]
            for key in ("head_dim", "query_pre_attn_scalar", "sliding_window")
        },
    },
    "gemma2": {
        "model_type": "gemma2",
        "hidden_act": "gelu_pytorch_tanh",
        **{
            key: FAMILIES["gemma2"]["config"][key]
            for key in ("head_dim", "query_pre_attn_scalar", "sliding_window")
        },
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 6.0,
    },
    "phi3-longrope": {
        "model_type": "phi3",
        "original_max_position_embeddings": 64,
        "rope_scaling": {
            "type": "su",
            "short_factor": FAMILIES["phi3-longrope"]["config"]["rope_parameters"]["short_factor"],
            "long_factor": FAMILIES["phi3-longrope"]["config"]["rope_parameters"]["long_factor"],
        },
        "tie_word_embeddings": False,
    },
}


def old_config(family: str) -> dict[str, Any]:
    common = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    kept = (*common, "rms_norm_eps", "max_position_embeddings")
    return {key: FAMILIES[family]["config"][key] for key in kept} | OLD_CONFIGS[family]


@pytest.mark.parametrize("family", OLD_CONFIGS)
def test_config_that_leaves_the_usual_out_gives_the_same_logits(tmp_path: Path, family: str) -> None:
    tiny.write_huggingface(tmp_path / "hf", weights_of(family), config=old_config(family))
    assert largest_difference(tmp_path / "hf", tmp_path / "out", family) < 1e-4


@pytest.mark.parametrize(
    "prefixes", [("language_model.model.", "vision_tower."), ("model.language_model.", "model.vision_tower.")]
)
def test_text_part_of_a_model_that_sees_is_read_alone(tmp_path: Path, prefixes: tuple[str, str]) -> None:
    text, vision = prefixes
    weights = {name.replace("model.", text, 1): value for name, value in weights_of("gemma3").items()}
    weights |= {vision + "encoder.layers.0.mlp.fc1.weight": np.ones((2, 2), np.float32)}
    config = {"model_type": "gemma3", "text_config": old_config("gemma3"), "vision_config": {"hidden_size": 2}}
    tiny.write_huggingface(tmp_path / "hf", weights, config=config)
    assert largest_difference(tmp_path / "hf", tmp_path / "out", "gemma3") < 1e-4
    said: list[str] = []
    export_model(tmp_path / "hf", tmp_path / "again", report=said.append)
    assert any("1 tensors that see images" in line for line in said)


@pytest.mark.parametrize("form", ["huggingface", "gguf"])
def test_longrope_has_the_length_first_trained_for_as_its_context(tmp_path: Path, form: str) -> None:
    source = write_source(tmp_path, "phi3-longrope", form)
    assert read_source(source).config.context_length == 64
    assert read_source(source, 20).config.context_length == 20
    short, long = (read_source(source, length).config.layers[0].rotary for length in (64, 512))
    assert short is not None
    assert long is not None
    assert (short.inv_freq[1:] > long.inv_freq[1:]).all()
    with pytest.raises(SourceError, match="up to 512 tokens, not 513"):
        read_source(source, 513)


@pytest.mark.parametrize("form", ["huggingface", "gguf"])
def test_yarn_has_the_context_that_it_stretches_to(tmp_path: Path, form: str) -> None:
    assert read_source(write_source(tmp_path, "qwen2-yarn", form)).config.context_length == 64


@pytest.mark.parametrize("storage", ["Q4_0", "Q8_0"])
def test_fused_matrices_come_apart_where_they_are_stored_in_blocks(tmp_path: Path, storage: str) -> None:
    tiny.write_gguf(
        tmp_path / "a.gguf",
        weights_of("phi3"),
        architecture="phi3",
        storage=storage,
        override={
            "phi3.block_count": 3,
            "phi3.attention.sliding_window": 7,
        },
    )
    source = read_source(tmp_path / "a.gguf")
    whole = read_gguf(tmp_path / "a.gguf").tensors
    for fused, roles in {"attn_qkv": "qkv", "ffn_up": ("gate", "up")}.items():
        parts = [np.concatenate(list(source.tensors[f"1.{role}"].floats())) for role in roles]
        assert np.array_equal(np.concatenate(parts), np.concatenate(list(whole[f"blk.1.{fused}.weight"].floats())))


WINDOW = {"attention.sliding_window": 5}


def gguf_config(architecture: str, **keys: Any) -> DecoderConfig:
    common = {
        "block_count": 2,
        "context_length": 4096,
        "embedding_length": 5376,
        "feed_forward_length": 96,
        "attention.head_count": 32,
        "attention.key_length": 128,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    metadata = {f"{architecture}.{key}": value for key, value in (common | keys).items()}
    embedding = StoredTensor("token_embd.weight", Path("a.gguf"), 0, 99, 5376, "F32")
    return config_from_gguf(
        "a.gguf", {"general.architecture": architecture} | metadata, {embedding.name: embedding}
    )


def test_gguf_of_the_27b_gemma3_scales_attention_by_width() -> None:
    window = {"attention.sliding_window": 1024}
    assert gguf_config("gemma3", block_count=62, **window).attention_scale == 168**-0.5
    assert gguf_config("gemma3", block_count=48, **window).attention_scale == 128**-0.5


@pytest.mark.parametrize(
    ("architecture", "keys", "windows"),
    [
        ("gemma3", {**WINDOW, "attention.sliding_window_pattern": 2}, (5, None, 5, None)),
        ("gemma3", {**WINDOW, "attention.sliding_window_pattern": [True, False, False, True]}, (5, None, None, 5)),
        ("gemma2", {"context_length": 8192}, (4096, None, 4096, None)),
        ("phi3", {}, (2047,) * 4),
        ("phi3", {"attention.sliding_window": 0}, (None,) * 4),
        ("phi3", {"context_length": 131072}, (None,) * 4),
        ("llama", WINDOW, (5,) * 4),
    ],
)  # fmt: skip
def test_gguf_says_which_layers_see_a_window(
    architecture: str, keys: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    layers = gguf_config(architecture, block_count=4, **keys).layers
    assert tuple(layer.sliding_window for layer in layers) == windows


@pytest.mark.parametrize(
    ("architecture", "keys", "words"),
    [
        ("olmo2", WINDOW, "no olmo2 model has"),
        ("gemma3", {}, "attention.sliding_window is None"),
        (
            "gemma3",
            {**WINDOW, "attention.sliding_window_pattern": [True]},
            "layers of attention",
        ),
        ("phi3", {"rope.dimension_count": 40}, "rotates 40 of"),
        ("llama", {"rope.dimension_count": 16}, "rotates only a part"),
        ("phi3", {"rope.scaling.type": "longrope"}, "longrope"),
        ("phi3", {"rope.scaling.type": "yarn"}, "factor is None"),
        ("phi3", {"rope.scaling.type": "dynamic"}, "known are none, linear, llama3, yarn and longrope"),
        ("gemma", {}, "gemma"),
    ],
)
def test_gguf_feature_that_the_graph_lacks_is_refused(architecture: str, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(SourceError, match=words):
        gguf_config(architecture, **keys)


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 7}, "layers of attention"),
        ("gemma3", {"layer_types": ["full_attention"]}, "layers of attention"),
        ("gemma2", {"hidden_activation": "gelu"}, "activation gelu"),
        ("olmo2", {"layer_types": ["sliding_attention"] * 3}, "layers of attention"),
        ("phi3", {"rope_parameters": {"rope_type": "yarn"}}, "factor is None"),
        ("phi3", {"rope_parameters": {"rope_type": "dynamic"}}, "known are default"),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.75}}, "rotates 12 of the 16"),
        ("phi3", {"num_key_value_heads": 4}, "has 128 rows, its settings want 192"),
        (
            "phi3-longrope",
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}},
            "wanted 8 positive numbers",
        ),
    ],
)
def test_setting_that_the_graph_lacks_is_refused(
    tmp_path: Path, family: str, change: dict[str, Any], words: str
) -> None:
    tiny.write_huggingface(tmp_path / "hf", weights_of(family), config=FAMILIES[family]["config"] | change)
    with pytest.raises(SourceError, match=words):
        read_source(tmp_path / "hf")


def test_query_norms_in_a_family_without_them_are_refused(tmp_path: Path) -> None:
    config = FAMILIES["qwen3"]["config"] | {"model_type": "llama"}
    tiny.write_huggingface(tmp_path / "hf", weights_of("qwen3"), config=config)
    with pytest.raises(SourceError, match=r"norm\.weight, which no llama model uses"):
        export_model(tmp_path / "hf", tmp_path / "out")
