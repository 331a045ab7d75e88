"""Quantised checkpoints of Hugging Face are read as the weights that their tensors stand for."""

import json
import struct
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import quantizers
import tiny
from families import FAMILIES, weights_of
from quantizers import Made

from edgespec.errors import SourceError
from edgespec.export.convert import export_model
from edgespec.export.options import ExportOptions
from edgespec.export.plan import foresee_cost, plan_model
from edgespec.export.sources import read_source
from edgespec.export.written import read_written
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.setup.open_model import open_decoder

ROLES = tuple(f"{layer}.{part}" for layer in (0, 1) for part in ("q", "k", "v", "o", "gate", "up", "down"))
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Method = Callable[[np.ndarray], Made]
INT4 = {"num_bits": 4, "type": "int"}
# By name: what config.json says, how a matrix is written, and in how many bits of blocks it is held; 0 for floats.
METHODS: dict[str, tuple[dict[str, Any], Method, int]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, partial(quantizers.gptq, bits=4, size=128, symmetric=True), 4),
    "gptq asymmetric": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq"},
        partial(quantizers.gptq, bits=4, size=64, symmetric=False),
        4,
    ),
    "gptq 8 bits asymmetric": (
        {"quant_method": "gptq", "bits": 8},
        partial(quantizers.gptq, bits=8, size=32, symmetric=False),
        8,
    ),
    "gptq 2 bits": (
        {"quant_method": "gptq", "bits": 2},
        partial(quantizers.gptq, bits=2, size=32, symmetric=False),
        4,
    ),
    "gptq v2": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
        partial(quantizers.gptq, bits=4, size=16, symmetric=False, v2=True),
        4,
    ),
    "gptq 8 bits, a group a row": (
        {"quant_method": "gptq", "bits": 8, "group_size": -1},
        partial(quantizers.gptq, bits=8, size=-1, symmetric=True),
        8,
    ),
    "gptq act order": (
        {"quant_method": "gptq", "bits": 4, "desc_act": True},
        partial(quantizers.gptq, bits=4, size=32, symmetric=True, shuffled=True),
        0,
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, partial(quantizers.awq, size=128), 4),
    "auto-round": (
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4},
        partial(quantizers.gptq, bits=4, size=64, symmetric=False),
        4,
    ),
    "auto-round v2": (
        {"quant_method": "auto-round", "packing_format": "auto_round", "bits": 4},
        partial(quantizers.gptq, bits=4, size=64, symmetric=False, v2=True),
        4,
    ),
    "auto-round as awq": (
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4},
        partial(quantizers.awq, size=128),
        4,
    ),
    "packed": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"0": {"weights": INT4}},
        },
        partial(quantizers.compressed_packed, bits=4, size=128, symmetric=True),
        4,
    ),
    "packed asymmetric": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        partial(quantizers.compressed_packed, bits=4, size=32, symmetric=False),
        4,
    ),
    "int8": ({"quant_method": "compressed-tensors", "format": "int-quantized"}, quantizers.compressed_int8, 8),
    "float8 of rows": (
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        partial(quantizers.fp8, sides=(1, 1 << 20), name="weight_scale"),
        0,
    ),
    "nvfp4": (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        partial(quantizers.nvfp4, of_modelopt=False),
        0,
    ),
    "nvfp4 of modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        partial(quantizers.nvfp4, of_modelopt=True),
        0,
    ),
    "fp8 of modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        partial(quantizers.fp8, sides=(1 << 20, 1 << 20), name="weight_scale"),
        0,
    ),
    "mxfp4": ({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}, quantizers.mxfp4, 0),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        partial(quantizers.fp8, sides=(128, 128)),
        0,
    ),
    "fp8 in blocks that end beside the matrix": (
        {"quant_method": "fp8", "weight_block_size": [24, 40]},
        partial(quantizers.fp8, sides=(24, 40)),
        0,
    ),
    "fp8 of a whole matrix": (
        {"quant_method": "fp8"},
        partial(quantizers.fp8, sides=(1 << 20, 1 << 20), name="weight_scale"),
        0,
    ),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, partial(quantizers.nf4, nested=False), 0),
    "nf4 nested": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        partial(quantizers.nf4, nested=True),
        0,
    ),
    "llm.int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, quantizers.llm_int8, 8),
}


def save(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file; a name may end with the type of its bytes, as in weight:F8_E4M3."""
    types = {"float32": "F32", "float16": "F16", "int32": "I32", "int64": "I64", "int8": "I8", "uint8": "U8"}
    header, data = {}, b""
    for name, value in tensors.items():
        own, _, dtype = name.partition(":")
        raw = np.ascontiguousarray(value).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[own] = {
            "dtype": dtype or types[value.dtype.name],
            "shape": list(value.shape),
            "data_offsets": offsets,
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def weights_of_a_llama() -> dict[str, np.ndarray]:
    """Two layers with heads of 64 channels."""
    rng, made = np.random.default_rng(3), {}
    sizes = {"q": (128, 128), "k": (64, 128), "v": (64, 128), "o": (128, 128)}
    inner = {"gate": (256, 128), "up": (256, 128), "down": (128, 256)}
    for layer in ("model.layers.0", "model.layers.1"):
        parts = [(f"{layer}.self_attn.{part}_proj", shape) for part, shape in sizes.items()]
        parts += [(f"{layer}.mlp.{part}_proj", shape) for part, shape in inner.items()]
        made |= {f"{name}.weight": rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in parts}
        made |= {
            f"{layer}.{name}_layernorm.weight": np.ones(128, np.float32) for name in ("input", "post_attention")
        }
    made["model.embed_tokens.weight"] = rng.normal(0, 0.2, (tiny.VOCAB, 128)).astype(np.float32)
    return made | {"model.norm.weight": np.ones(128, np.float32)}


CONFIG = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "eos_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip


MIXTURE = CONFIG | {
    "model_type": "qwen3_moe", "head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 256, "norm_topk_prob": True,
}  # fmt: skip


def weights_of_a_mixture() -> dict[str, np.ndarray]:
    """The llama with four experts in each layer, between which its routers decide clearly."""
    rng, made = np.random.default_rng(4), {}
    for name, value in weights_of_a_llama().items():
        layer, is_mlp, part = name.partition(".mlp.")
        names = [f"{layer}.mlp.experts.{number}.{part}" for number in range(4)] if is_mlp else [name]
        made |= {one: rng.permuted(value, axis=1) for one in names} if is_mlp else {name: value}
    for layer in ("model.layers.0", "model.layers.1"):
        made[f"{layer}.mlp.gate.weight"] = 2 * rng.normal(0, 1, (4, 128)).astype(np.float32)
        made |= {f"{layer}.self_attn.{part}_norm.weight": np.ones(64, np.float32) for part in "qk"}
    return made


def write(
    folder: Path,
    method: str,
    change: Callable[[dict[str, np.ndarray]], object] = lambda tensors: None,
    *,
    is_mixture: bool = False,
) -> dict[str, np.ndarray]:
    """A checkpoint in a method but for one layer's up; returns the weights that it stands for."""
    stated, quantize, _ = METHODS[method]
    weights = weights_of_a_mixture() if is_mixture else weights_of_a_llama()
    config = MIXTURE if is_mixture else CONFIG
    tiny.write_huggingface(folder, weights, config=config | {"quantization_config": stated})
    stored, meant = {}, {}
    for name, value in weights.items():
        module = name.removesuffix(".weight")
        if module.endswith(MATRICES) and module != "model.layers.0.mlp.up_proj":
            tensors, back = quantize(value)
            meant[name] = np.ascontiguousarray(back)
            stored |= {f"{module}.{ending}": tensor for ending, tensor in tensors.items()}
        else:
            stored[name] = meant[name] = value
    change(stored)
    save(folder / "model.safetensors", stored)
    return meant


def restate(folder: Path, **changes: Any) -> None:
    """Change config.json; None takes a key away."""
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def named(role: str) -> str:
    parts = {"q": "self_attn.q", "k": "self_attn.k", "v": "self_attn.v", "o": "self_attn.o"}
    layer, part = role.split(".")
    return f"model.layers.{layer}.{parts.get(part, f'mlp.{part}')}_proj.weight"


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_is_read_as_the_weights_that_it_stands_for(tmp_path: Path, method: str) -> None:
    meant, bits = write(tmp_path / "hf", method), METHODS[method][2]
    source = read_source(tmp_path / "hf")
    for role in ROLES:
        tensor, wanted = source.tensors[role], meant[named(role)]
        assert np.array_equal(np.concatenate([*tensor.floats()]), wanted), role
        assert np.array_equal(tensor.part(5, 9).row(3), wanted[8:9]), role
        held = tensor.block_format.bits if tensor.block_format else 0
        if role == "0.up":
            assert held == 0
        else:
            assert held == bits
    assert bool(source.notes) == (bits == 0)


@pytest.mark.parametrize("method", ["fp8", "nvfp4", "nf4", "mxfp4", "int8", "gptq"])
def test_the_size_of_an_export_is_foreseen_from_headers(tmp_path: Path, method: str) -> None:
    write(tmp_path / "hf", method)
    file = tmp_path / "hf" / "model.safetensors"
    for form, most in (
        ("cpu", 1.0),
        ("gpu", 1.4),
    ):  # there an embedding of 32 bits, which few have, is cut in half
        options = ExportOptions(form=form)
        foreseen = foresee_cost(tmp_path / "hf", options, {file: file.stat().st_size}).write_bytes
        assert 0.9 < foreseen / plan_model(tmp_path / "hf", options).cost.write_bytes < most


def test_scales_of_activations_and_of_a_cache_are_left_out(tmp_path: Path) -> None:
    module = "model.layers.0.self_attn.q_proj"
    names = ("input_scale", "input_zero_point", "input_scale_ub", "k_zero_point", "kv_scale", "prob_output_scale")
    kinds = {name: np.int8 if name.endswith("point") else np.float32 for name in names}

    def add(tensors: dict[str, np.ndarray]) -> None:
        tensors |= {f"{module}.{name}": np.ones(1, kind) for name, kind in kinds.items()}

    meant = write(tmp_path / "hf", "int8", add)
    read = read_source(tmp_path / "hf").tensors["0.q"]
    assert np.array_equal(np.concatenate([*read.floats()]), meant[named("0.q")])


def test_settings_of_modelopt_may_stand_beside_the_config(tmp_path: Path) -> None:
    meant = write(tmp_path / "hf", "fp8 of modelopt")
    restate(tmp_path / "hf")
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf" / "hf_quant_config.json").write_text(json.dumps(said))
    read = read_source(tmp_path / "hf").tensors["0.q"]
    assert np.array_equal(np.concatenate([*read.floats()]), meant[named("0.q")])


def keep_activations(graph: Path) -> None:
    """Products with activations as they are, not in 8 bits."""
    model = onnx.load(graph, load_external_data=False)
    for attribute in (
        each for node in model.graph.node for each in node.attribute if each.name == "accuracy_level"
    ):
        attribute.i = 0
    onnx.save(model, graph)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_an_export_has_the_logits_of_the_weights_that_it_stands_for(tmp_path: Path, method: str) -> None:
    meant = write(tmp_path / "hf", method)
    tiny.write_huggingface(tmp_path / "plain", meant, config=CONFIG)
    manifests, lines = {}, list[str]()
    for name, precision in (("plain", "fp32"), ("hf", "source")):
        lines.clear()
        manifests[name] = export_model(
            tmp_path / name, tmp_path / f"{name}-out", precision=precision, report=lines.append
        )
    assert any("exact values" in line for line in lines) == (METHODS[method][2] == 0)
    graph = tmp_path / "hf-out" / manifests["hf"].graph
    written = read_written(graph, read_source(tmp_path / "hf").tensors)
    for role in ROLES:
        assert np.array_equal(np.concatenate([*written[role].floats()]), meant[named(role)]), role
        assert (written[role].bits or 0) == (0 if role == "0.up" else METHODS[method][2])
    keep_activations(graph)
    tokens = np.arange(24, dtype=np.int32) + 5
    found, wanted = (
        OnnxDecoder(tmp_path / f"{name}-out", manifests[name], find_device("cpu")).logits(tokens, 24)
        for name in ("hf", "plain")
    )
    assert np.allclose(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", "awq", "gptq 8 bits asymmetric", "int8", "mxfp4"])
def test_experts_keep_their_integers_in_the_blocks_of_their_kernel(tmp_path: Path, method: str) -> None:
    meant, bits = write(tmp_path / "hf", method, is_mixture=True), METHODS[method][2]
    tiny.write_huggingface(tmp_path / "plain", meant, config=MIXTURE)
    manifests = {
        name: export_model(tmp_path / name, tmp_path / f"{name}-out", precision=precision)
        for name, precision in (("plain", "fp32"), ("hf", "source"))
    }
    graph, tensors = tmp_path / "hf-out" / manifests["hf"].graph, read_source(tmp_path / "hf").tensors
    for file in (graph, graph.with_name("model_tree.onnx")):
        written = read_written(file, tensors)
        for layer, part, number in product((0, 1), ("gate", "up", "down"), range(4)):
            matrix = written[f"{layer}.{part}.{number}"]
            wanted = meant[f"model.layers.{layer}.mlp.experts.{number}.{part}_proj.weight"]
            assert np.array_equal(np.concatenate([*matrix.floats()]), wanted)
            assert (matrix.bits or 0) == bits
    keep_activations(graph)
    tokens = np.arange(24, dtype=np.int32) + 5
    found, exact = (
        OnnxDecoder(tmp_path / f"{name}-out", manifests[name], find_device("cpu")).logits(tokens, 24)
        for name in ("hf", "plain")
    )
    # With levels of 8 bits the kernel for experts rounds activations whatever it is asked for.
    assert float((found - exact).std()) < (0.03 if bits == 8 else 1e-5) * float(exact.std())


@pytest.mark.parametrize(
    ("method", "stated", "words"),
    [
        ("gptq", {"quant_method": "hqq"}, "is quantised by hqq, which is not read; get the model unquantised"),
        ("gptq", {"quant_method": "gptq", "checkpoint_format": "marlin"}, "layout marlin"),
        ("gptq", {"quant_method": "auto-round", "packing_format": "auto_round:fp8"}, "as auto_round:fp8"),
        ("awq", {"quant_method": "awq", "version": "gemv"}, "AWQ in 4 bits for gemv"),
        ("int8", {"quant_method": "fp8"}, "weights of type I8"),
        ("fp8", {"quant_method": "fp8", "weight_block_size": [64, 64]}, "scales"),
        ("fp8", {"quant_method": "gptq"}, r"by gptq, but has no scales for .*proj.weight \(F8_E4M3\)"),
        ("packed", {"quant_method": "compressed-tensors", "format": "marlin-24"}, "compressed as marlin-24"),
        (
            "packed",
            {"quant_method": "compressed-tensors", "config_groups": {"0": {"format": "mxfp6-pack-quantized"}}},
            "compressed as mxfp6-pack-quantized",
        ),
        (
            "packed",
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "compressed as sparse-24-bitmask",
        ),
        (
            "packed",
            {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R3": {}}}},
            "transforms of its activations",
        ),
        ("gptq", {"quant_method": 7}, "quantised by 7"),
    ],
)
def test_a_method_that_is_not_read_is_refused_by_name(
    tmp_path: Path, method: str, stated: dict[str, Any], words: str
) -> None:
    write(tmp_path / "hf", method)
    restate(tmp_path / "hf", quantization_config=stated)
    with pytest.raises(SourceError, match=words):
        read_source(tmp_path / "hf")


@pytest.mark.parametrize(
    ("place", "stated", "words"),
    [
        (
            "quantization_config",
            {"group_size": 64, "bits": 4, "mode": "affine"},
            "is quantised by MLX, which is not",
        ),
        ("quantization", {"group_size": 64, "bits": 4}, "is quantised by MLX, which is not"),
        ("quantization_config", {"quant_method": "exl3"}, "is quantised by exl3"),
        ("quantization_config", {"bits": 4}, "is quantised by a method that config.json does not name"),
    ],
)
def test_a_method_is_named_before_types_of_tensors_that_it_alone_has(
    tmp_path: Path, place: str, stated: dict[str, Any], words: str
) -> None:
    words_of_32_bits = {"model.layers.0.mlp.down_proj.weight:U32": np.zeros((8, 8), np.uint32)}
    write(tmp_path / "hf", "gptq", lambda tensors: tensors.update(words_of_32_bits))
    restate(tmp_path / "hf", **{place: stated})
    with pytest.raises(SourceError, match=words):
        read_source(tmp_path / "hf")


@pytest.mark.parametrize("ending", ["qzeros", "scales", "qweight"])
def test_a_tensor_that_is_missing_or_short_is_named(tmp_path: Path, ending: str) -> None:
    name = f"model.layers.1.self_attn.o_proj.{ending}"
    write(tmp_path / "missing", "gptq", lambda tensors: tensors.pop(name, None))
    with pytest.raises(SourceError, match="o_proj"):
        read_source(tmp_path / "missing")

    def cut(tensors: dict[str, np.ndarray]) -> None:
        tensors[name] = tensors[name][:, :-1]

    write(tmp_path / "short", "gptq", cut)
    with pytest.raises(SourceError, match="o_proj"):
        read_source(tmp_path / "short")


def write_gpt_oss(folder: Path, blocks_of: str = "") -> dict[str, np.ndarray]:
    """A gpt_oss with its experts in MXFP4, as published; returns what they stand for, [experts, rows, columns].

    blocks_of: The stack that has a row of blocks too few.
    """
    stored, meant = {}, {}
    for name, value in weights_of("gpt_oss").items():
        if value.ndim < 3:
            stored[name] = value
            continue
        stack = np.ascontiguousarray(value.swapaxes(1, 2))
        made, back = quantizers.mxfp4(stack.reshape(-1, stack.shape[-1]))
        meant[name] = back.reshape(stack.shape)
        rows = slice(1 if name.endswith(blocks_of) and blocks_of else 0, None)
        stored[f"{name}_blocks"] = made["weight_packed"].reshape(*stack.shape[:2], -1, 16)[:, rows]
        stored[f"{name}_scales"] = made["weight_scale"].reshape(*stack.shape[:2], -1)
    config = FAMILIES["gpt_oss"]["config"] | {"quantization_config": {"quant_method": "mxfp4"}}
    tiny.write_huggingface(folder, {"lm_head.weight": np.zeros((1, 1), np.float32)}, config=config)
    save(folder / "model.safetensors", stored)
    return meant


@pytest.mark.slow
def test_experts_of_gpt_oss_are_the_blocks_that_they_are_stored_in(tmp_path: Path) -> None:
    meant = write_gpt_oss(tmp_path / "hf")
    tensors = read_source(tmp_path / "hf").tensors
    for name, value in meant.items():
        layer, part = name.split(".")[2], name.rpartition(".")[2]
        parts = {"gate": value[:, ::2], "up": value[:, 1::2]} if part == "gate_up_proj" else {"down": value}
        for (role, stack), number in product(parts.items(), range(len(value))):
            tensor = tensors[f"{layer}.{role}.{number}"]
            assert tensor.storage == "MXFP4"
            assert np.array_equal(np.concatenate([*tensor.floats()]), stack[number]), tensor.name
    manifest = export_model(tmp_path / "hf", tmp_path / "out", precision="source", open_decoder=open_decoder)
    assert manifest.check is not None
    assert manifest.check.divergence < 0.02
    graph = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False).graph
    assert sum(node.op_type == "QMoE" for node in graph.node) == 4


def test_blocks_of_gpt_oss_that_do_not_fit_their_scales_are_refused(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path / "hf", "1.mlp.experts.down_proj")
    with pytest.raises(SourceError, match=r"layers.1.mlp.experts.down_proj_blocks has blocks of \(6, 63, 3, 16\)"):
        read_source(tmp_path / "hf")


def test_integers_in_the_order_of_one_kind_of_gpu_are_refused(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight_format"
    write(tmp_path / "hf", "llm.int8", lambda tensors: tensors.update({name: np.full((), 2, np.uint8)}))
    with pytest.raises(SourceError, match=r"weight_format 2 of model\.layers\.1\.mlp\.up_proj"):
        read_source(tmp_path / "hf")


def test_groups_that_nobody_chose_are_in_the_order_of_columns(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight_g_idx"
    meant = write(tmp_path / "hf", "packed", lambda tensors: tensors.update({name: np.full(256, -1, np.int32)}))
    tensor = read_source(tmp_path / "hf").tensors["1.down"]
    assert np.array_equal(np.concatenate([*tensor.floats()]), meant[named("1.down")])


@pytest.mark.parametrize(
    ("ending", "change", "words"),
    [
        ("qweight", lambda value: value.astype(np.int64), "qweight of type I64"),
        ("qzeros", lambda value: value[:, :6], "GPTQ in 3 bits"),
        ("qzeros", lambda value: value.astype(np.float32), "qzeros"),
        ("scales", lambda value: value[:, :0], "scales"),
        ("g_idx", lambda value: value + 99, "groups of columns"),
        ("g_idx", lambda value: value[:-1], "groups of columns"),
    ],
)
def test_tensors_that_do_not_fit_each_other_are_refused(
    tmp_path: Path, ending: str, change: Callable[[np.ndarray], np.ndarray], words: str
) -> None:
    name = f"model.layers.1.self_attn.k_proj.{ending}"
    write(tmp_path / "hf", "gptq", lambda tensors: tensors.update({name: change(tensors[name])}))
    with pytest.raises(SourceError, match=words) as raised:
        read_source(tmp_path / "hf")
    assert "model.layers.1.self_attn.k_proj" in str(raised.value)


@pytest.mark.parametrize(
    ("method", "ending", "change", "words"),
    [
        ("packed asymmetric", "weight_scale", lambda value: value[:, :-1], "scales of"),
        ("packed", "weight_shape", lambda value: 0 * value, "weight_shape or one beside it is damaged"),
        (
            "nf4",
            "weight.quant_state.bitsandbytes__nf4",
            lambda value: value[:-1],
            "bitsandbytes__nf4 or one beside",
        ),
    ],
)
def test_tensors_that_make_no_sense_are_named(
    tmp_path: Path, method: str, ending: str, change: Callable[[np.ndarray], np.ndarray], words: str
) -> None:
    name = f"model.layers.1.mlp.down_proj.{ending}"
    write(tmp_path / "hf", method, lambda tensors: tensors.update({name: change(tensors[name])}))
    with pytest.raises(SourceError, match=words) as raised:
        read_source(tmp_path / "hf")
    assert "model.layers.1.mlp.down_proj" in str(raised.value)


def test_experts_in_a_stack_of_fp8_are_refused_as_what_they_are(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj"
    stack = {f"{name}:F8_E4M3": np.zeros((4, 8, 8), np.uint8), f"{name}_scale_inv": np.ones((4, 1, 1), np.float32)}
    write(tmp_path / "hf", "fp8", lambda tensors: tensors.update(stack))
    with pytest.raises(
        SourceError, match=rf"by fp8, with experts in one tensor, {name} \(F8_E4M3\), which is not"
    ):
        read_source(tmp_path / "hf")


@pytest.mark.parametrize("place", ["compression_config", "quantize_config.json"])
def test_the_method_is_read_from_where_older_programs_state_it(tmp_path: Path, place: str) -> None:
    method = "packed" if place == "compression_config" else "gptq asymmetric"
    meant, stated = write(tmp_path / "hf", method), METHODS[method][0]
    if place == "compression_config":
        restate(tmp_path / "hf", compression_config=stated)
    else:
        restate(tmp_path / "hf")
        (tmp_path / "hf" / place).write_text(json.dumps({"bits": 4, "group_size": 64, "desc_act": False}))
    tensor = read_source(tmp_path / "hf").tensors["1.down"]
    assert np.array_equal(np.concatenate([*tensor.floats()]), meant[named("1.down")])


def test_the_decoder_of_a_model_that_sees_states_its_method_within_its_own_settings(tmp_path: Path) -> None:
    folder = tmp_path / "hf"

    def prefix(tensors: dict[str, np.ndarray]) -> None:
        for name in [*tensors]:
            tensors[f"language_model.{name}"] = tensors.pop(name)
        tensors["vision_tower.ln_pre.weight"] = np.ones(8, np.float32)

    meant = write(folder, "awq", prefix)
    inner = CONFIG | {"model_type": "mistral", "quantization_config": METHODS["awq"][0]}
    restate(folder, model_type="mistral3", text_config=inner)
    source = read_source(folder)
    assert np.array_equal(np.concatenate([*source.tensors["0.q"].floats()]), meant[named("0.q")])
    assert source.num_left_out == 1


def test_biases_of_zeros_that_no_layer_has_change_nothing(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.bias"
    write(tmp_path / "zeros", "gptq", lambda tensors: tensors.update({name: np.zeros(128, np.float16)}))
    assert "0.down" in read_source(tmp_path / "zeros").tensors
    write(tmp_path / "ones", "gptq", lambda tensors: tensors.update({name: np.ones(128, np.float16)}))
    with pytest.raises(SourceError, match=r"down_proj\.bias, which no llama model uses"):
        read_source(tmp_path / "ones")


def test_a_family_that_is_not_known_is_named_before_its_weights(tmp_path: Path) -> None:
    blocks = {"model.layers.0.mlp.experts.gate_up_proj_blocks": np.zeros((1,) * 6, np.uint8)}
    write(tmp_path / "hf", "gptq", lambda tensors: tensors.update(blocks))
    restate(tmp_path / "hf", model_type="gpt_new", quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(SourceError, match="of the family 'gpt_new'"):
        read_source(tmp_path / "hf")
