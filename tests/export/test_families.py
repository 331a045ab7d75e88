"""Each family against transformers' own logits, drawn from tests/support/make_references.py."""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx_ir as ir
import pytest
import tiny
from families import (
    CONTEXT_LENGTHS,
    FAMILIES,
    GGUF_KEYS,
    LOGITS,
    MIXTURES,
    SOURCES,
    TOKENS,
    weights_of,
    write_source,
)
from mixtures import gguf_architecture, stored_experts

from edgespec.errors import DeviceUnavailable, SourceError, UsageError
from edgespec.export.convert import export_model
from edgespec.export.decoder_config import DecoderConfig
from edgespec.export.folder_size import OTHER_BYTES
from edgespec.export.gguf import read_gguf
from edgespec.export.options import ExportOptions
from edgespec.export.plan import plan_model
from edgespec.export.read_config import config_from_gguf
from edgespec.export.reference import reference_logits
from edgespec.export.sources import read_source
from edgespec.export.tensors import StoredTensor
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.onnx import OnnxDecoder

pytestmark = pytest.mark.slow  # a module of many models or processes


def largest_difference(source: Path, output: Path, family: str, form: str = "cpu") -> float:
    context_length = CONTEXT_LENGTHS.get(family)
    manifest = export_model(source, output, precision="fp32", context_length=context_length, form=form)
    decoder = OnnxDecoder(output, manifest, find_device("cpu"))
    wanted = LOGITS[family]
    decoder.logits(TOKENS[:23], 1)  # the rest goes on from a cache
    return float(np.abs(decoder.logits(TOKENS, len(wanted)) - wanted).max())


@pytest.mark.parametrize(("family", "form"), SOURCES)
def test_export_gives_the_logits_of_transformers(tmp_path: Path, family: str, form: str) -> None:
    source = write_source(tmp_path, family, form)
    assert largest_difference(source, tmp_path / "out", family) < 1e-4
    options = ExportOptions(precision="fp32", context_length=CONTEXT_LENGTHS.get(family))
    plan = plan_model(source, options).cost
    written = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    texts = written.pop("edgespec.json") + written.pop("README.md")
    assert texts < OTHER_BYTES
    assert plan.write_bytes == sum(written.values()) + OTHER_BYTES


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_5", "gemma4"])
def test_queries_keys_and_values_that_a_gguf_file_joins_give_the_same_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """llama.cpp's converter joins them with --fuse-qkv, in each layer that has all three."""
    add_tensor, held = gguf.GGUFWriter.add_tensor, dict[str, dict[str, np.ndarray]]()
    with_values = {name.split(".")[2] for name in weights_of(family) if "v_proj" in name}

    def join(writer: gguf.GGUFWriter, name: str, tensor: np.ndarray, **options: Any) -> None:
        found = re.fullmatch(r"(blk\.(\d+)\.attn_)([qkv])(\..*)", name)
        if found and found[2] in with_values:
            name = f"{found[1]}qkv{found[4]}"
            held.setdefault(name, {})[found[3]] = tensor
            if len(held[name]) < 3:
                return
            tensor = np.concatenate([held[name][part] for part in "qkv"])
        add_tensor(writer, name, tensor, **options)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", join)
    source = write_source(tmp_path, family, "gguf")
    assert "blk.1.attn_qkv.weight" in read_gguf(source).tensors
    assert largest_difference(source, tmp_path / "out", family) < 1e-4


# Those whose gpu form differs from the cpu form by more than types and fused products.
ON_GPUS = ("mixtral", "olmoe", "qwen2_moe", "gpt_oss-limit", "ernie4_5_moe", "lfm2_moe", "glm4_moe", "minimax_m2")
ON_GPUS += ("lfm2", "qwen3_5", "qwen3_5_moe", "qwen3_next", "granitemoehybrid-mamba", "falcon_h1-normed")
ON_GPUS += ("gemma4", "gemma4-shared")


@pytest.mark.parametrize("family", ON_GPUS)
def test_graph_for_a_gpu_gives_the_logits_of_transformers(tmp_path: Path, family: str) -> None:
    source = write_source(tmp_path, family, "huggingface")
    assert largest_difference(source, tmp_path / "out", family, "gpu") < 1e-4


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
        "attn_logit_softcapping": 4,  # as programs write it that rewrite JSON
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


def error_beside_reference(source: Path, output: Path, precision: str) -> float:
    """The error of a row in the middle, relative to the logits; rows whose experts are a near tie are far off."""
    manifest, loaded = export_model(source, output, precision=precision), read_source(source)
    wanted = reference_logits(loaded.config, loaded.tensors, TOKENS)
    found = OnnxDecoder(output, manifest, find_device("cpu")).logits(TOKENS, len(TOKENS))
    return float(np.median((found - wanted).std(axis=1)) / wanted.std())


def write_mixture(path: Path, family: str, storage: str = "F32") -> None:
    """A GGUF file of a mixture whose routers decide clearly."""
    weights = stored_experts(family, "gguf", weights_of(family))
    weights |= {name: 20 * value for name, value in weights.items() if "ffn_gate_inp" in name}
    architecture = gguf_architecture(FAMILIES[family]["config"]["model_type"].removesuffix("_text"))
    keys = {"block_count": FAMILIES[family]["config"]["num_hidden_layers"], **GGUF_KEYS[family]}
    override = {f"{architecture}.{key}": value for key, value in keys.items()}
    tiny.write_gguf(path, weights, architecture=architecture, storage=storage, override=override)


@pytest.mark.parametrize(("precision", "bound"), [("int8", 0.2), ("int4", 0.75)])
@pytest.mark.parametrize("family", [family for family in MIXTURES if family in GGUF_KEYS])
def test_rounded_experts_are_near_the_exact_ones(
    tmp_path: Path, family: str, precision: str, bound: float
) -> None:
    write_mixture(tmp_path / "a.gguf", family)
    assert 0 < error_beside_reference(tmp_path / "a.gguf", tmp_path / "out", precision) < bound


@pytest.mark.parametrize(
    ("storage", "bits"), [("Q8_0", 8), ("Q4_0", 4), ("Q4_1", 8), ("Q5_0", 8), ("F16", None), ("BF16", None)]
)
def test_experts_keep_the_blocks_that_the_kernel_takes(tmp_path: Path, storage: str, bits: int | None) -> None:
    write_mixture(tmp_path / "a.gguf", "qwen3_moe", storage)
    assert error_beside_reference(tmp_path / "a.gguf", tmp_path / "out", "source") < 0.06
    nodes = {node.op_type: node for node in ir.load(tmp_path / "out" / "model.onnx").graph}
    if bits is None:
        assert "MoE" in nodes
    else:
        assert nodes["QMoE"].attributes["expert_weight_bits"].as_int() == bits


@pytest.mark.parametrize(
    ("family", "form", "words"),
    [
        ("olmoe", "npu", "experts, which are not exported for NPUs"),
        ("lfm2", "npu", "layers of another kind than attention, which are not exported for NPUs"),
        ("gemma4", "npu", "layers of different heads, which are not exported for NPUs"),
    ],
)
def test_devices_are_refused_what_they_do_not_run(tmp_path: Path, family: str, form: str, words: str) -> None:
    with pytest.raises(DeviceUnavailable, match=f"has {words}; use device='cpu'"):
        export_model(write_source(tmp_path, family, "huggingface"), tmp_path / "out", form=form)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts_per_tok": 5}, "uses 5 of 4 experts"),
        ({"num_experts": 3}, "mlp.gate.weight is 4×64, its settings require 3×64"),
        ({"num_experts": None}, "num_local_experts is missing"),
        ({"decoder_sparse_step": 2}, "experts in some layers only"),
        ({"mlp_only_layers": [0]}, "sets mlp_only_layers"),
    ],
)
def test_odd_experts_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    config = FAMILIES["olmoe"]["config"] | change
    tiny.write_huggingface(
        tmp_path / "hf", stored_experts("olmoe", "huggingface", weights_of("olmoe")), config=config
    )
    with pytest.raises(SourceError, match=words):
        read_source(tmp_path / "hf")


def test_shared_experts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    config, weights = (
        FAMILIES["ernie4_5_moe"]["config"],
        stored_experts("ernie4_5_moe", "huggingface", weights_of("ernie4_5_moe")),
    )
    tiny.write_huggingface(tmp_path / "every", weights, config=config | {"moe_layer_interval": 2})
    with pytest.raises(SourceError, match="experts in one of 2 layers"):
        read_source(tmp_path / "every")
    mtp = {"model.mtp_block.0.mlp.up_proj.weight": np.ones((2, 2), np.float32)}
    tiny.write_huggingface(tmp_path / "mtp", weights | mtp, config=config)
    read = read_source(tmp_path / "mtp")
    assert (read.num_left_out, "multi-token prediction" in read.use_of_left_out) == (1, True)
    del weights["model.layers.2.mlp.shared_experts.down_proj.weight"]
    tiny.write_huggingface(tmp_path / "lost", weights, config=config)
    with pytest.raises(SourceError, match=r"no tensor model\.layers\.2\.mlp\.shared_expert"):
        read_source(tmp_path / "lost")


@pytest.mark.parametrize(
    ("family", "text", "vision"),
    [
        ("gemma3", "language_model.model.", "vision_tower."),
        ("gemma3", "model.language_model.", "model.vision_tower."),
        ("qwen3_5", "model.language_model.", "model.visual."),
        ("qwen3", "model.language_model.", "model.visual."),
        ("qwen2", "model.", "visual."),
        ("lfm2", "model.language_model.", "model.vision_tower."),
        ("exaone4", "model.language_model.", "model.visual."),
        ("exaone4", "model.language_model.", "mtp."),
        ("gemma4", "model.language_model.", "model.audio_tower."),
        ("gemma4", "model.language_model.", "model.embed_vision."),
        ("gemma4", "model.language_model.", "model.vision_embedder."),  # of 12B
        ("qwen3_5", "model.language_model.", "model.mtp."),
    ],
)
def test_text_part_of_a_model_that_sees_is_read_alone(tmp_path: Path, family: str, text: str, vision: str) -> None:
    weights = {name.replace("model.", text, 1): value for name, value in weights_of(family).items()}
    weights |= {vision + "encoder.layers.0.mlp.fc1.weight": np.ones((2, 2), np.float32)}
    inner = old_config(family) if family in OLD_CONFIGS else FAMILIES[family]["config"]
    config = {"model_type": family, "text_config": inner, "vision_config": {"hidden_size": 2}}
    if family == "lfm2":
        config |= {"model_type": "lfm2_vl", "tie_word_embeddings": True}
    if family == "qwen3":
        config |= {"model_type": "qwen3_vl", "text_config": inner | {"model_type": "qwen3_vl_text"}}
    if family == "exaone4":
        config |= {"model_type": "exaone4_5", "text_config": inner | {"model_type": "exaone4_5_text"}}
    if family == "qwen2":  # without a text_config, as the first ones
        rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
        config = inner | {"model_type": "qwen2_5_vl", "vision_config": {}, "rope_parameters": rope}
    tiny.write_huggingface(tmp_path / "hf", weights, config=config)
    assert largest_difference(tmp_path / "hf", tmp_path / "out", family) < 1e-4
    said: list[str] = []
    export_model(tmp_path / "hf", tmp_path / "again", report=said.append)
    assert any("leaving out 1 tensor that see" in line for line in said)


@pytest.mark.parametrize("times", [1, 3])
def test_text_alone_may_keep_the_names_that_it_had_within_a_model_that_sees(tmp_path: Path, times: int) -> None:
    """Fine-tunes of Qwen3.5 name tensors so; some versions of transformers 5 wrote language_model three times."""
    prefix, config = "model." + "language_model." * times, FAMILIES["qwen3_5"]["config"]
    weights = {name.replace("model.", prefix, 1): value for name, value in weights_of("qwen3_5").items()}
    tiny.write_huggingface(tmp_path / "hf", weights, config=config | {"model_type": "qwen3_5_text"})
    plain = tmp_path / "plain"
    tiny.write_huggingface(plain, weights_of("qwen3_5"), config=config)
    assert read_source(tmp_path / "hf").tensors.keys() == read_source(plain).tensors.keys()


@pytest.mark.parametrize(("family", "name"), [("qwen3", "qwen3vl"), ("qwen2", "qwen2vl")])
def test_gguf_of_the_text_part_of_a_model_that_sees_is_read(tmp_path: Path, family: str, name: str) -> None:
    config = FAMILIES[family]["config"]
    keys = GGUF_KEYS[family] | {
        "block_count": config["num_hidden_layers"],
        "rope.dimension_sections": [2, 3, 3, 0],
    }
    override = {f"{name}.{key}": value for key, value in keys.items()}
    tiny.write_gguf(tmp_path / "a.gguf", weights_of(family), architecture=name, override=override)
    assert largest_difference(tmp_path / "a.gguf", tmp_path / "out", family) < 1e-4


def test_experts_of_a_model_that_sees_are_stored_turned(tmp_path: Path) -> None:
    weights = weights_of("qwen3_moe")
    weights |= {name: each.swapaxes(1, 2).copy() for name, each in weights.items() if "experts" in name}
    config = {"model_type": "qwen3_vl_moe", "text_config": FAMILIES["qwen3_moe"]["config"]}
    tiny.write_huggingface(tmp_path / "hf", weights, config=config)
    assert largest_difference(tmp_path / "hf", tmp_path / "out", "qwen3_moe") < 1e-4


def test_a_gemma4_without_towers_is_read_as_one_with_them(tmp_path: Path) -> None:
    weights = {name.replace("model.", "model.language_model.", 1): w for name, w in weights_of("gemma4").items()}
    inner = FAMILIES["gemma4"]["config"] | {"model_type": "gemma4_unified_text"}
    inner |= {"use_bidirectional_attention": "vision"}
    config = {"model_type": "gemma4_unified", "text_config": inner}
    tiny.write_huggingface(tmp_path / "hf", weights, config=config)
    assert largest_difference(tmp_path / "hf", tmp_path / "out", "gemma4") < 1e-4


def test_config_of_gemma4_as_published_has_one_number_for_layers_that_see_all(tmp_path: Path) -> None:
    """Keys that layers would share lie in published checkpoints, and no layer reads them."""
    config = {
        key: value
        for key, value in FAMILIES["gemma4-shared"]["config"].items()
        if key not in ("per_layer_config", "rope_parameters", "final_logit_softcapping")
    }
    unread = {
        f"model.layers.5.self_attn.{part}.weight": np.ones(size, np.float32)
        for part, size in {"k_proj": (32, 64), "v_proj": (32, 64), "k_norm": (32,)}.items()
    }
    tiny.write_huggingface(
        tmp_path / "hf", weights_of("gemma4-shared") | unread, config=config | {"global_head_dim": 32}
    )
    assert largest_difference(tmp_path / "hf", tmp_path / "out", "gemma4-shared") < 1e-4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"enable_moe_block": True}, "experts whose gates are GELUs"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers is 7, wanted 0 to 6"),
        ({"num_kv_shared_layers": 6}, "its last 6 layers read keys and values of earlier ones"),
        ({"num_kv_shared_layers": 3}, "no tensor model.layers.3.self_attn"),
        ({"hidden_size_per_layer_input": 16}, "embed_tokens_per_layer.weight is 269×224, its settings require"),
        ({"use_double_wide_mlp": False}, "is 192×64, its settings require 96×64"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention to all"),
    ],
)
def test_odd_sizes_of_layers_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    config = FAMILIES["gemma4-shared"]["config"] | change
    tiny.write_huggingface(tmp_path / "hf", weights_of("gemma4-shared"), config=config)
    with pytest.raises(SourceError, match=words):
        read_source(tmp_path / "hf")


def test_layers_for_multi_token_prediction_of_a_gguf_are_left_out(tmp_path: Path) -> None:
    keys = {**GGUF_KEYS["qwen3_5"], "block_count": 6, "nextn_predict_layers": 1}
    override = {f"qwen35.{key}": value for key, value in keys.items()}
    weights = weights_of("qwen3_5") | {"blk.5.nextn.eh_proj.weight": np.ones((64, 128), np.float32)}
    tiny.write_gguf(tmp_path / "a.gguf", weights, architecture="qwen35", override=override)
    assert largest_difference(tmp_path / "a.gguf", tmp_path / "out", "qwen3_5") < 1e-4
    assert read_source(tmp_path / "a.gguf").num_left_out == 1
    override["qwen35.nextn_predict_layers"] = 6
    tiny.write_gguf(tmp_path / "b.gguf", weights, architecture="qwen35", override=override)
    with pytest.raises(
        SourceError, match="nextn_predict_layers is 6, wanted less than the number of its blocks, 6"
    ):
        read_source(tmp_path / "b.gguf")


def test_a_gguf_may_list_its_recurrent_layers(tmp_path: Path) -> None:
    """Converters do so since September 2026, also for layers that predict further tokens."""
    keys = {**GGUF_KEYS["qwen3_5"], "block_count": 6, "nextn_predict_layers": 1, "full_attention_interval": 4}
    override = {f"qwen35.{key}": value for key, value in keys.items()}
    listed = "qwen35.attention.recurrent_layers"
    override[listed] = [True, False, True, False, True, False]
    weights = weights_of("qwen3_5")
    tiny.write_gguf(tmp_path / "a.gguf", weights, architecture="qwen35", override=override)
    assert largest_difference(tmp_path / "a.gguf", tmp_path / "out", "qwen3_5") < 1e-4
    for wrong in ([True, False, True, False], [2, 0, 0, 0, 0, 0]):
        tiny.write_gguf(tmp_path / "b.gguf", weights, architecture="qwen35", override=override | {listed: wrong})
        with pytest.raises(SourceError, match=r"recurrent_layers is .*, wanted true or false for each layer"):
            read_source(tmp_path / "b.gguf")


def test_experts_are_read_one_by_one_and_as_a_stack(tmp_path: Path) -> None:
    config, weights = FAMILIES["qwen3_5_moe"]["config"], weights_of("qwen3_5_moe")
    stacked = stored_experts("qwen3_5_moe", "huggingface", weights)
    apart = stored_experts("qwen3_moe", "huggingface", weights)
    assert any("experts.5.up_proj" in name for name in apart)
    for name, stored in (("stacked", stacked), ("apart", apart)):
        tiny.write_huggingface(tmp_path / name, stored, config=config)
    in_gguf = stored_experts("qwen3_5_moe", "gguf", weights)
    joined = dict(in_gguf)
    for i in range(3):
        both = [joined.pop(f"blk.{i}.ffn_{part}_exps.weight") for part in ("gate", "up")]
        joined[f"blk.{i}.ffn_gate_up_exps.weight"] = np.concatenate(both, axis=1)
    keys = {"block_count": 3, **GGUF_KEYS["qwen3_5_moe"]}
    override = {f"qwen35moe.{key}": value for key, value in keys.items()}
    for name, stored in (("a.gguf", in_gguf), ("b.gguf", joined)):
        tiny.write_gguf(tmp_path / name, stored, architecture="qwen35moe", override=override)
    sources = [read_source(tmp_path / name).tensors for name in ("stacked", "apart", "a.gguf", "b.gguf")]
    for role in ("1.gate.0", "1.up.5", "2.down.3"):
        wanted, *others = (np.concatenate(list(tensors[role].floats())) for tensors in sources)
        assert all(np.array_equal(wanted, other) for other in others)


def test_joined_matrix_of_an_older_gguf_of_qwen3_next_is_read(tmp_path: Path) -> None:
    stored = stored_experts("qwen3_next", "gguf", weights_of("qwen3_next"))
    override = {f"qwen3next.{key}": value for key, value in {"block_count": 3, **GGUF_KEYS["qwen3_next"]}.items()}
    tiny.write_gguf(tmp_path / "a.gguf", stored, architecture="qwen3next", override=override)
    assert largest_difference(tmp_path / "a.gguf", tmp_path / "out", "qwen3_next") < 1e-4


def test_layer_behind_the_last_one_of_a_glm_is_left_out(tmp_path: Path) -> None:
    config, weights = FAMILIES["glm4_moe"]["config"], weights_of("glm4_moe")
    further = {"model.layers.3.eh_proj.weight": np.ones((64, 128), np.float32)}
    stored = stored_experts("glm4_moe", "huggingface", weights) | further
    tiny.write_huggingface(tmp_path / "hf", stored, config=config | {"num_nextn_predict_layers": 1})
    read = read_source(tmp_path / "hf")
    assert (read.num_left_out, "multi-token prediction" in read.use_of_left_out) == (1, True)
    lost = {name: value for name, value in stored.items() if not name.endswith("e_score_correction_bias")}
    tiny.write_huggingface(tmp_path / "lost", lost, config=config)
    with pytest.raises(SourceError, match=r"no tensor model\.layers\.1\.mlp\.gate\.e_score_correction_bias"):
        read_source(tmp_path / "lost")


@pytest.mark.parametrize("form", ["huggingface", "gguf"])
def test_longrope_has_the_length_first_trained_for_as_its_context(tmp_path: Path, form: str) -> None:
    source = write_source(tmp_path, "phi3-longrope", form)
    assert read_source(source).config.context_length == 64
    assert read_source(source, 20).config.context_length == 20
    short, long = (read_source(source, length).config.layers[0].rotary for length in (64, 512))
    assert short is not None
    assert long is not None
    assert (short.inv_freq[1:] > long.inv_freq[1:]).all()
    with pytest.raises(UsageError, match=r"513, and .* up to 512 tokens"):
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


@pytest.mark.parametrize("storage", ["Q4_0", "Q8_0"])
def test_gates_values_and_steps_of_a_mamba_layer_come_apart_where_they_are_stored_in_blocks(
    tmp_path: Path, storage: str
) -> None:
    write_mixture(tmp_path / "a.gguf", "granitemoehybrid-experts", storage)
    read = read_source(tmp_path / "a.gguf").tensors
    whole = np.concatenate(list(read_gguf(tmp_path / "a.gguf").tensors["blk.2.ssm_in.weight"].floats()))
    parts = [np.concatenate(list(read[f"2.mamba_{part}"].floats())) for part in ("z", "mixed", "dt")]
    assert [len(part) for part in parts] == [128, 160, 8]
    assert np.array_equal(np.concatenate(parts), whole)
    error = error_beside_reference(tmp_path / "a.gguf", tmp_path / "out", "source")
    assert error < 0.06


DELTA = {"ssm.group_count": 2, "ssm.state_size": 16, "ssm.conv_kernel": 4}
_NO_ATTENTION = {"attention.head_count_kv": [0, 2], "ssm.time_step_rank": 3, "ssm.inner_size": 48}
WINDOW = {"attention.sliding_window": 5}
_GLM = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 64}
WIDE = {**WINDOW, "attention.key_length_swa": 64, "attention.head_count_kv": 1}


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


@pytest.mark.parametrize("key", ["rope.scale_linear", "rope.scaling.factor"])
def test_gguf_may_state_the_factor_of_positions_alone(key: str) -> None:
    """Files from before November 2023 have no type of scaling beside the factor; a factor of 0 scales nothing."""
    plain, scaled = gguf_config("llama").layers[0].rotary, gguf_config("llama", **{key: 4.0}).layers[0].rotary
    stated = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    wanted = gguf_config("llama", **stated).layers[0].rotary
    assert plain is not None
    assert scaled is not None
    assert wanted is not None
    assert np.array_equal(scaled.inv_freq, wanted.inv_freq)
    assert np.array_equal(scaled.inv_freq, plain.inv_freq / 4)
    none = (
        gguf_config("llama", **{key: 0.0, "attention.clamp_kqv": 0.0, "attention.causal": True}).layers[0].rotary
    )
    assert none is not None
    assert np.array_equal(none.inv_freq, plain.inv_freq)


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
        ("olmo2", WINDOW, (5, 5, 5, None)),
        ("exaone4", WINDOW, (5, 5, 5, None)),
        ("exaone4", {}, (None,) * 4),
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
        ("qwen2", WINDOW, "no qwen2 model has"),
        ("gemma3", {}, "attention.sliding_window is missing"),
        (
            "gemma3",
            {**WINDOW, "attention.sliding_window_pattern": [True]},
            "layers of attention",
        ),
        ("phi3", {"rope.dimension_count": 40}, "rotates 40 of"),
        ("phi3", {"rope.scaling.type": "longrope"}, "longrope"),
        ("phi3", {"rope.scaling.type": "yarn"}, "factor is missing"),
        ("phi3", {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}, "original_context_length is missing"),
        ("llama", {"attention.causal": False}, "causal"),
        ("llama", {"attention.clamp_kqv": 8.0}, "llama.attention.clamp_kqv = 8.0"),
        ("qwen2", {"rope.dimension_sections": [1, 2]}, "rope.dimension_sections"),
        (
            "phi3",
            {"rope.scaling.type": "dynamic"},
            "known are none, linear, yarn and longrope, and that of Llama 3",
        ),
        ("gemma", {}, "family 'gemma'; near it by name are gemma4"),
        ("minimax-m1", {}, "recurrent layers"),
        ("glm4moe", {**_GLM, "expert_gating_func": 4}, "expert_gating_func is 4; 1, 2 and 3 are read"),
        ("glm4moe", {**_GLM, "expert_group_count": 3}, "uses 1 of 3 groups of its 8 experts"),
        ("glm4moe", {**_GLM, "expert_used_count": 5, "expert_group_count": 2}, "uses 5 of 8 experts"),
        ("gemma4", {**WIDE, "expert_count": 128}, r"gates are GELUs: .* 1\.32 on for CUDA.*12B or E4B"),
        ("gemma4", {**WIDE, "attention.head_count_kv": [1, 2, 1]}, "head_count_kv has 3 numbers for 2 layers"),
        (
            "gemma4",
            {**WIDE, "attention.value_length": 64},
            "value_length is 64, wanted the size of its heads, 128",
        ),
        ("gemma4", {**WIDE, "rope.dimension_count_swa": 32}, "dimension_count_swa is 32, wanted"),
        ("gemma3", {**WINDOW, "attention.key_length_swa": 64}, "key_length_swa = 64, which is not supported"),
        ("lfm2", {"attention.head_count_kv": [0, 2, 0, 2, 0]}, "a number for each layer"),
        ("lfm2", {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 1}, "wanted 2 or more tokens"),
        ("lfm2", {"attention.head_count_kv": [0, 0, 0]}, "head_count_kv"),
        ("granitehybrid", {**_NO_ATTENTION, **DELTA}, "a multiple of the groups"),
        ("granitehybrid", {**_NO_ATTENTION, **DELTA, "ssm.inner_size": 50}, "wanted whole heads"),
        ("qwen35", {"ssm.time_step_rank": 3, "ssm.inner_size": 48, **DELTA}, "a multiple of the key heads"),
        ("qwen35", {}, "ssm.group_count is missing"),
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
        ("granitemoehybrid-mamba", {"time_step_limit": [0.1, 1.0]}, "read without limits"),
        ("falcon_h1-normed", {"mamba_norm_before_gate": True}, "norms what Mamba layers give before its gate"),
        ("falcon_h1", {"mamba_d_ssm": 90}, "wanted whole heads"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers is .1.0., wanted five numbers"),
        ("falcon_h1", {"mlp_multipliers": "1"}, "mlp_multipliers is '1', wanted two numbers"),
        ("falcon_h1", {"key_multiplier": -1.0}, "key_multiplier is -1.0, wanted a positive number"),
        (
            "granitemoehybrid-mamba",
            {"mamba_d_state": 32},
            r"in_proj.weight is 324×64, its settings require 388×64",
        ),
        ("phi3", {"rope_parameters": {"rope_type": "yarn"}}, "factor is missing"),
        ("phi3", {"rope_parameters": {"rope_type": "ntk"}}, "known are default"),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.75}}, "rotates 12 of the 16"),
        ("phi3", {"num_key_value_heads": 4}, "is 128×64, its settings require 192×64"),
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


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("gemma3n", "gemma3n_text"), "AltUp.*edgespec does not write it.*Gemma 4 E2B"),
        (("nemotron_h", "nemotron_h_moe"), r"a norm of its own: .* LinearAttention.*Granite 4\.0 H"),
        (
            ("deepseek_v2", "deepseek_v3", "deepseek2", "kimi_k2", "mistral4"),
            r"latent attention.*no ONNX Runtime.*GLM-4\.5-Air",
        ),
        (("kimi_linear", "kimi-linear"), r"\(KDA\) beside latent attention: no ONNX Runtime.*Qwen3\.6-35B-A3B"),
        (("minimax", "minimax01", "minimax_text_01", "minimax-m1"), "lightning attention.*MiniMax-M2"),
        (("minimax_m4",), "near it by name are minimax_m2"),
        (
            ("granitemoe_hybrid",),
            "near it by name are granitemoehybrid, granitemoe, and .* granitemoehybrid, falcon_h1",
        ),
        (("deepseek", "nemotron"), "family '[a-z]*'; known are"),  # dense or with ordinary attention
        (("t5", "umt5"), "a model with an encoder beside its decoder"),
        (
            ("bert", "nomic-bert", "modernbert"),
            "reads text and writes none; for vectors of texts, Qwen3-Embedding",
        ),
        (
            ("whisper", "voxtral", "qwen2_audio"),
            "is a model that takes sound; edgespec reads models of text, and the text part",
        ),
        (("llava_next", "siglip"), "is a model that takes pictures; edgespec"),
        (("qwen3_omni_moe",), "is a model that takes pictures and sound; edgespec"),
        (("clip",), "is the part of a model that sees or hears; give the file of its text part"),
        (
            ("eagle3", "dflash-draft", "gemma4_unified_assistant"),
            "is a drafting head, which is read from safetensors alone; give",
        ),
        (("qwen36", "qwen3_6"), r"near it by name are .*qwen3_5.*, and a newer edgespec may read it; known are"),
    ],
)
def test_family_that_is_not_read_is_told_what_is_missing_and_what_is_near(
    tmp_path: Path, names: tuple[str, ...], words: str
) -> None:
    for number, name in enumerate(names):
        folder = tmp_path / str(number)
        tiny.write_huggingface(
            folder, tiny.random_weights(), config=FAMILIES["llama"]["config"] | {"model_type": name}
        )
        for read in (lambda folder=folder: read_source(folder), lambda name=name: gguf_config(name)):
            with pytest.raises(SourceError, match=words):
                read()


def test_query_norms_in_a_family_without_them_are_refused(tmp_path: Path) -> None:
    config = FAMILIES["qwen3"]["config"] | {"model_type": "llama"}
    tiny.write_huggingface(tmp_path / "hf", weights_of("qwen3"), config=config)
    with pytest.raises(SourceError, match=r"norm\.weight, which no llama model uses"):
        export_model(tmp_path / "hf", tmp_path / "out")
