"""Settings that a source leaves out, and the sampling that its files suggest, from the source to the manifest."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tiny
from families import FAMILIES, GGUF_KEYS, weights_of, write_source

from edgespec.errors import SourceError
from edgespec.export.convert import export_model
from edgespec.export.decoder_config import DecoderConfig
from edgespec.export.options import ExportOptions
from edgespec.export.plan import plan_model
from edgespec.export.read_config import config_from_huggingface
from edgespec.export.settings import SourceSettings, sampling_from_json
from edgespec.export.sources import read_source
from edgespec.export.tensors import StoredTensor
from edgespec.export.text_part import decoder_part
from edgespec.manifest import SuggestedSampling, read_manifest

# As the files of three models have them, and of others that say less or otherwise.
STATED: list[tuple[dict[str, Any], SuggestedSampling | None]] = [
    ({"bos_token_id": 1, "eos_token_id": 2}, None),
    (
        {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1},
        SuggestedSampling(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.1),
    ),
    ({"do_sample": True, "top_k": 64, "top_p": 0.95}, SuggestedSampling(temperature=1.0, top_k=64, top_p=0.95)),
    ({"do_sample": True}, SuggestedSampling(temperature=1.0)),
    (
        {"do_sample": False, "temperature": 0.9, "top_p": 0.5},
        SuggestedSampling(temperature=0.0, top_p=0.5),
    ),
    ({"temperature": 1, "top_k": -1, "min_p": None}, SuggestedSampling(temperature=1.0)),
    ({"repetition_penalty": 1.2}, SuggestedSampling(temperature=0.0, repetition_penalty=1.2)),
]


@pytest.mark.parametrize(("stated", "suggested"), STATED)
def test_what_a_file_states_is_what_it_suggests(stated: dict[str, Any], suggested: SuggestedSampling) -> None:
    assert sampling_from_json("generation_config.json", stated) == suggested


@pytest.mark.parametrize(
    "stated",
    [{"temperature": "hot"}, {"top_p": 1.5}, {"temperature": -1}, {"top_k": 2.5}, {"repetition_penalty": 0}],
)
def test_what_makes_no_sense_is_refused_with_its_file(stated: dict[str, Any]) -> None:
    with pytest.raises(SourceError, match=rf"generation_config.json suggests .* {next(iter(stated))} is"):
        sampling_from_json("generation_config.json", stated)


def test_a_folder_keeps_what_its_source_suggests(tmp_path: Path) -> None:
    tiny.write_huggingface(tmp_path / "source", tiny.random_weights())
    stated, suggested = STATED[1]
    (tmp_path / "source" / "generation_config.json").write_text(json.dumps(stated))
    export_model(tmp_path / "source", tmp_path / "model", precision="fp32")
    assert read_manifest(tmp_path / "model").sampling == suggested


def test_metadata_of_gguf_is_read_in_its_own_words(tmp_path: Path) -> None:
    stated = {"temp": 0.7, "top_k": 20, "top_p": 0.8, "penalty_repeat": 1.1}
    override = {f"general.sampling.{name}": value for name, value in stated.items()}
    tiny.write_gguf(tmp_path / "tiny.gguf", tiny.random_weights(), override=override)
    assert read_source(tmp_path / "tiny.gguf").sampling == STATED[1][1]


def test_a_file_without_a_word_of_it_suggests_nothing(tiny_gguf: Path) -> None:
    assert read_source(tiny_gguf).sampling is None


def test_a_number_that_stands_for_each_layer_is_one_if_they_are_equal() -> None:
    stated = SourceSettings("file", {"equal": [2, 2, 2], "other": [2, 4], "none": [], "text": "2"})
    assert stated.count("equal") == 2
    for key in ("other", "none", "text"):
        with pytest.raises(SourceError, match="wanted a positive number"):
            stated.count(key)


QUARTER, YARN = {"rope_theta": 1e4, "partial_rotary_factor": 0.25}, {"rope_type": "yarn", "rope_theta": 1.5e5}
YARN |= {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
MISTRAL = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
MISTRAL |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}


def decoder_of(settings: dict[str, Any]) -> DecoderConfig:
    rows = StoredTensor("model.embed_tokens.weight", Path("a"), 0, settings["vocab_size"], 64, "F32")
    return config_from_huggingface("a", *decoder_part(settings, {rows.name: rows}))


@pytest.mark.parametrize(
    ("family", "key", "assumed"),
    [  # what configuration_*.py of transformers has for each
        *((family, "rope_parameters", QUARTER) for family in ("qwen3_5", "qwen3_5_moe", "qwen3_next")),
        ("glm4", "rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        *((family, "rope_parameters", {"rope_theta": 5e5}) for family in ("ernie4_5", "ernie4_5_moe", "olmo3")),
        ("mixtral", "rope_parameters", {"rope_theta": 1e6}),
        ("smollm3", "rope_parameters", {"rope_theta": 2e6}),
        ("minimax_m2", "rope_parameters", {"rope_theta": 5e6}),
        ("gpt_oss", "rope_parameters", YARN),
        ("ministral3", "rope_parameters", MISTRAL),
        *((f, "attention_multiplier", 1.0) for f in ("granite", "granitemoe", "granitemoehybrid-mamba")),
        *((family, "sliding_window", 4096) for family in ("mistral", "olmo3", "exaone4", "gemma2")),
        ("gpt_oss", "sliding_window", 128),
        ("gemma4", "sliding_window", 512),
        ("gemma4-shared", "hidden_size_per_layer_input", 256),
        ("llama", "rope_parameters", {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}),
        ("qwen3", "rms_norm_eps", 1e-6),
        ("exaone4", "rms_norm_eps", 1e-5),
        ("glm4", "rms_norm_eps", 1.5625e-07),
    ],
)
def test_setting_that_is_left_out_is_what_transformers_assumes(family: str, key: str, assumed: object) -> None:
    config = {**FAMILIES[family]["config"], "head_dim": 64}  # of which a quarter can be rotated

    def described(settings: dict[str, Any]) -> list[object]:
        found = decoder_of(settings)
        turned = [layer.rotary and (layer.rotary.inv_freq.tolist(), layer.rotary.scale) for layer in found.layers]
        windows = [layer.sliding_window for layer in found.layers]
        return [
            found.layer_input_size,
            found.rms_eps,
            found.attention_scale,
            found.query_growth,
            found.context_length,
            turned,
            windows,
        ]

    without = {name: value for name, value in config.items() if name != key}
    assert described(without) == described(without | {key: assumed})


@pytest.mark.parametrize("newer", [None, {"rope_type": "default", "rope_theta": 1e6}])
def test_scaling_under_its_older_name_is_read_before_all_else(newer: dict[str, Any] | None) -> None:
    """transformers 5.24 takes rope_scaling first, and the family's base where that states none."""
    scaling = {key: value for key, value in MISTRAL.items() if key != "rope_theta"}
    config = FAMILIES["ministral3"]["config"]
    found = decoder_of(config | {"rope_parameters": newer, "rope_scaling": scaling})
    wanted = decoder_of(config | {"rope_parameters": {**scaling, "rope_theta": 1e4}})
    assert found.query_growth == wanted.query_growth is not None
    assert str(found.layers[0].rotary) == str(wanted.layers[0].rotary)


@pytest.mark.parametrize(
    ("family", "stated", "in_gguf"),
    [
        ("qwen2-yarn", {"attention_factor": 1.25}, "yarn_attn_factor"),
        ("qwen2-yarn", {"attn_factor": 0.8782488562869419}, "yarn_attn_factor"),  # DeepSeek-R1-0528-Qwen3-8B
        ("olmo3", {"attention_factor": 1.25}, "yarn_attn_factor"),
        ("olmo3", {"attention_factor": 1.25}, "attn_factor"),
    ],
)
def test_factor_of_yarn_is_that_of_the_folder_that_a_gguf_file_was_made_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, stated: dict[str, float], in_gguf: str
) -> None:
    """llama.cpp's converter writes both keys as one, of which transformers reads attention_factor alone."""
    (value,) = stated.values()
    monkeypatch.setitem(GGUF_KEYS, family, GGUF_KEYS[family] | {f"rope.scaling.{in_gguf}": value})
    config = FAMILIES[family]["config"]
    rope = config["rope_parameters"]
    rope = {"full_attention": rope["full_attention"] | stated} if family == "olmo3" else rope | stated
    config = config | {"rope_parameters": config["rope_parameters"] | rope}
    found = read_source(write_source(tmp_path, family, "gguf")).config
    scales = [
        [layer.rotary and layer.rotary.scale for layer in each.layers] for each in (found, decoder_of(config))
    ]
    assert scales[0] == pytest.approx(scales[1])


@pytest.mark.parametrize(("family", "period"), [("gemma3", 6), ("exaone4", 4)])
def test_a_period_may_stand_for_the_kinds_of_all_layers(family: str, period: int) -> None:
    whole = FAMILIES[family]["config"]
    stated = {key: value for key, value in whole.items() if key != "layer_types"}
    found = decoder_of({**stated, "sliding_window_pattern": period}).layers
    kinds = [(layer.sliding_window, layer.rotary is None) for layer in found]
    assert kinds == [(layer.sliding_window, layer.rotary is None) for layer in decoder_of(whole).layers]


@pytest.mark.parametrize("digits", [1, 2])
def test_layers_with_sizes_of_their_own_may_be_numbered_in_any_width(digits: int) -> None:
    config = {**FAMILIES["gemma4"]["config"], "num_hidden_layers": 12, "layer_types": ["sliding_attention"] * 12}
    config["layer_types"][5::6] = ["full_attention"] * 2
    config["per_layer_config"] = {f"{i:0{digits}}": {"head_dim": 48, "num_key_value_heads": 1} for i in (5, 11)}
    found = decoder_of(config)
    assert [(found.head_size(i), found.kv_heads(i)) for i in (4, 5, 11)] == [(16, 2), (48, 1), (48, 1)]


def test_positions_of_exaone4_are_in_the_layers_with_a_window_alone_where_it_states_one() -> None:
    config = {**FAMILIES["exaone4-full"]["config"], "sliding_window": 7}
    assert [layer.rotary for layer in decoder_of(config).layers] == [None] * 3
    assert None not in [layer.rotary for layer in decoder_of(config | {"sliding_window": None}).layers]


@pytest.mark.parametrize("family", ["glm4", "seed_oss"])
def test_biases_are_needed_where_the_settings_say_that_there_are_some(tmp_path: Path, family: str) -> None:
    weights = {name: value for name, value in weights_of(family).items() if not name.endswith("bias")}
    for stated, folder in ((False, tmp_path / "without"), (True, tmp_path / "with")):
        tiny.write_huggingface(folder, weights, config=FAMILIES[family]["config"] | {"attention_bias": stated})
    assert "0.q_bias" not in read_source(tmp_path / "without").tensors
    with pytest.raises(SourceError, match="says that it has biases"):
        read_source(tmp_path / "with")


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("falcon_h1", {"attention_bias": True}, "sets attention_bias to True"),
        ("glm4_moe", {"first_k_dense_replace": 3}, "states 3 layers without experts, and has 3"),
        ("lfm2", {"layer_types": ["conv"] * 5}, "has no layer with attention"),
    ],
)
def test_model_that_no_graph_suits_is_refused(
    tmp_path: Path, family: str, change: dict[str, object], words: str
) -> None:
    weights = weights_of(family)
    if family == "lfm2":  # convolutions in the place of attention
        weights = {name: value for name, value in weights.items() if "self_attn" not in name}
        for i, (name, value) in product((1, 4), list(weights.items())):
            if name.startswith("model.layers.0.conv"):
                weights[name.replace("layers.0", f"layers.{i}")] = value
    tiny.write_huggingface(tmp_path / "hf", weights, config=FAMILIES[family]["config"] | change)
    with pytest.raises(SourceError, match=words):
        plan_model(tmp_path / "hf", ExportOptions(precision="fp32"))
