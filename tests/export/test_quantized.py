"""Quantised checkpoints of Hugging Face are read as the weights that their tensors stand for."""

import json
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantizers
import tiny
from quantizers import Made

from edgespec.errors import SourceError
from edgespec.export.convert import export_model
from edgespec.export.sources import read_source
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.onnx import OnnxDecoder

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Method = Callable[[np.ndarray], Made]
INT4 = {"num_bits": 4, "type": "int"}
# By name: what config.json says, how a matrix is written, and in how many bits of blocks it is held; 0 for floats.
METHODS: dict[str, tuple[dict[str, Any], Method, int | None]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, partial(quantizers.gptq, bits=4, size=32, symmetric=True), 4),
    "gptq asymmetric": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq"},
        partial(quantizers.gptq, bits=4, size=32, symmetric=False),
        None,  # 4 bits or 8, since a zero point may be 16
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
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, partial(quantizers.awq, size=32), 4),
    "packed": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"0": {"weights": INT4}},
        },
        partial(quantizers.compressed_packed, bits=4, size=32, symmetric=True),
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
    "mxfp4": ({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}, quantizers.mxfp4, 0),
    "fp8": (
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


def write(
    folder: Path, method: str, change: Callable[[dict[str, np.ndarray]], object] = lambda tensors: None
) -> dict:
    """A checkpoint in a method but for one layer's up; returns the weights that it stands for."""
    stated, quantize, _ = METHODS[method]
    weights = tiny.random_weights()
    tiny.write_huggingface(folder, weights)
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
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    return meant


def named(role: str) -> str:
    parts = {"q": "self_attn.q", "k": "self_attn.k", "v": "self_attn.v", "o": "self_attn.o"}
    layer, part = role.split(".")
    return f"model.layers.{layer}.{parts.get(part, f'mlp.{part}')}_proj.weight"


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_is_read_as_the_weights_that_it_stands_for(tmp_path: Path, method: str) -> None:
    meant, bits = write(tmp_path / "hf", method), METHODS[method][2]
    source = read_source(tmp_path / "hf")
    for role in (f"{layer}.{part}" for layer in (0, 1) for part in ("q", "k", "v", "o", "gate", "up", "down")):
        tensor, wanted = source.tensors[role], meant[named(role)]
        assert np.array_equal(np.concatenate([*tensor.floats()]), wanted), role
        assert np.array_equal(tensor.part(5, 9).row(3), wanted[8:9]), role
        held = tensor.block_format.bits if tensor.block_format else 0
        if role == "0.up":
            assert held == 0
        elif bits is not None:
            assert held == bits
    assert bool(source.notes) == (bits == 0)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_an_export_has_the_logits_of_the_weights_that_it_stands_for(tmp_path: Path, method: str) -> None:
    meant = write(tmp_path / "hf", method)
    tiny.write_huggingface(tmp_path / "plain", meant)
    tokens = np.arange(24, dtype=np.int32) + 5
    rows = []
    for name in ("hf", "plain"):
        lines: list[str] = []
        manifest = export_model(tmp_path / name, tmp_path / f"{name}-out", precision="fp32", report=lines.append)
        decoder = OnnxDecoder(tmp_path / f"{name}-out", manifest, find_device("cpu"))
        rows.append(decoder.logits(tokens, len(tokens)).copy())
        assert any("exact values" in line for line in lines) == (name == "hf" and METHODS[method][2] == 0)
    assert np.array_equal(*rows)
    blocks = export_model(tmp_path / "hf", tmp_path / "blocks", precision="source")
    found = OnnxDecoder(tmp_path / "blocks", blocks, find_device("cpu")).logits(tokens, len(tokens))
    assert float((found - rows[0]).std()) < 0.03 * float(rows[0].std())  # activations are rounded to 8 bits


@pytest.mark.parametrize(
    ("method", "stated", "words"),
    [
        ("gptq", {"quant_method": "hqq"}, "is quantised by hqq, which is not read; get the model unquantised"),
        ("gptq", {"quant_method": "gptq", "checkpoint_format": "marlin"}, "layout marlin"),
        ("awq", {"quant_method": "awq", "version": "gemv"}, "AWQ in 4 bits for gemv"),
        ("int8", {"quant_method": "fp8"}, "weights of type I8"),
        ("fp8", {"quant_method": "fp8", "weight_block_size": [128, 128]}, "scales"),
    ],
)
def test_a_method_that_is_not_read_is_refused_by_name(
    tmp_path: Path, method: str, stated: dict[str, Any], words: str
) -> None:
    write(tmp_path / "hf", method)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
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
