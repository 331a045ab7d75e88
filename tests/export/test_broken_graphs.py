"""Graphs and weights that are broken on purpose are refused in every precision, and honest ones pass."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import write_source
from real_shapes import Shape, write_model

from edgespec.errors import ExportMismatch, PrecisionLoss
from edgespec.export import convert, graph, linear
from edgespec.export.blocks import Blocks
from edgespec.export.decoder_config import DecoderConfig
from edgespec.export.graph import build_graph
from edgespec.export.nodes import Nodes
from edgespec.export.tensors import StoredTensor
from edgespec.manifest import read_manifest
from edgespec.setup.home import ModelHome
from edgespec.setup.open_model import open_decoder

PRECISIONS = ("fp32", "int8", "int4")
Tensors = dict[str, StoredTensor]
Break = Callable[[DecoderConfig, Tensors], tuple[DecoderConfig, Tensors]]


def rotate_by_other_angles(config: DecoderConfig, tensors: Tensors) -> tuple[DecoderConfig, Tensors]:
    def changed(rotary: Any) -> Any:
        return replace(rotary, inv_freq=rotary.inv_freq * np.float32(1.01))

    layers = tuple(replace(layer, rotary=changed(layer.rotary)) for layer in config.layers)
    return replace(config, layers=layers), tensors


def swap_heads(config: DecoderConfig, tensors: Tensors) -> tuple[DecoderConfig, Tensors]:
    """Two heads of queries in each other's place; the weights file is written in this order too."""
    query = tensors["0.q"]
    order = np.arange(query.rows)
    size = config.head_dim
    order[:size], order[size : 2 * size] = order[size : 2 * size].copy(), order[:size].copy()
    return config, {**tensors, "0.q": replace(query, row_order=order)}


def scale_attention(config: DecoderConfig, tensors: Tensors) -> tuple[DecoderConfig, Tensors]:
    return replace(config, attention_scale=config.attention_scale * 1.02), tensors


def leave_out_norm(config: DecoderConfig, tensors: Tensors) -> tuple[DecoderConfig, Tensors]:
    return config, {role: tensor for role, tensor in tensors.items() if role != "0.attended_norm"}


def cap_attention_elsewhere(config: DecoderConfig, tensors: Tensors) -> tuple[DecoderConfig, Tensors]:
    return replace(config, attention_cap=(config.attention_cap or 0) * 1.1), tensors


def cap_logits_elsewhere(config: DecoderConfig, tensors: Tensors) -> tuple[DecoderConfig, Tensors]:
    return replace(config, logit_cap=(config.logit_cap or 0) * 1.02), tensors


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "wrong",
    [
        rotate_by_other_angles,
        swap_heads,
        scale_attention,
        leave_out_norm,
        cap_attention_elsewhere,
        cap_logits_elsewhere,
    ],
)
def test_broken_graph_is_refused_in_every_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Break, precision: str
) -> None:
    def build_wrong(config: DecoderConfig, tensors: Mapping[str, StoredTensor], *rest: Any) -> Any:
        return build_graph(*wrong(config, dict(tensors)), *rest)

    monkeypatch.setattr(graph, "build_graph", build_wrong)
    with pytest.raises(ExportMismatch, match="report this model") as caught:
        _export(write_source(tmp_path, "gemma2", "huggingface"), tmp_path / "out", precision)
    assert not isinstance(caught.value, PrecisionLoss)
    assert not (tmp_path / "out").exists()


def choose_fewer_experts(config: DecoderConfig, tensors: Tensors) -> tuple[DecoderConfig, Tensors]:
    assert config.routing is not None
    return replace(config, routing=replace(config.routing, num_used=config.routing.num_used - 1)), tensors


def weigh_experts_otherwise(config: DecoderConfig, tensors: Tensors) -> tuple[DecoderConfig, Tensors]:
    assert config.routing is not None
    return replace(
        config, routing=replace(config.routing, is_normalized=not config.routing.is_normalized)
    ), tensors


def exchange_experts(config: DecoderConfig, tensors: Tensors) -> tuple[DecoderConfig, Tensors]:
    """The router's rows of two experts in each other's place."""
    router = tensors["0.router"]
    order = np.arange(router.rows)
    order[:2] = order[1::-1]
    return config, {**tensors, "0.router": replace(router, row_order=order)}


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("wrong", [choose_fewer_experts, weigh_experts_otherwise, exchange_experts])
@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe"])
def test_broken_mixture_is_refused_in_every_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, wrong: Break, precision: str
) -> None:
    def build_wrong(config: DecoderConfig, tensors: Mapping[str, StoredTensor], *rest: Any) -> Any:
        return build_graph(*wrong(config, dict(tensors)), *rest)

    monkeypatch.setattr(graph, "build_graph", build_wrong)
    with pytest.raises(ExportMismatch, match="report this model") as caught:
        _export(write_source(tmp_path, family, "huggingface"), tmp_path / "out", precision)
    assert not isinstance(caught.value, PrecisionLoss)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("setting", [("activation_alpha", 1.02), ("activation_beta", 0.02)], ids=str)
def test_experts_of_another_activation_are_refused_in_every_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: tuple[str, float], precision: str
) -> None:
    right = Nodes.op

    def op(self: Nodes, kind: str, *inputs: Any, **attributes: Any) -> Any:
        changed = dict([setting]) if kind in ("MoE", "QMoE") else {}
        return right(self, kind, *inputs, **attributes | changed)

    monkeypatch.setattr(Nodes, "op", op)
    with pytest.raises(ExportMismatch, match="than its weights say"):
        _export(write_source(tmp_path, "mixtral", "huggingface"), tmp_path / "out", precision)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("shift", ["all by a twentieth", "to the next block", "of one row"])
def test_shifted_scales_are_refused_in_every_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shift: str, precision: str
) -> None:
    blocks_of = linear.read_blocks

    def shifted(blocks: Blocks) -> Blocks:
        scales = blocks.scales.copy()
        if shift == "of one row":
            scales[0] *= 2
        elif shift == "to the next block":
            scales = np.roll(scales, 1, axis=1)
        else:
            scales *= np.float32(1.05)
        return replace(blocks, scales=scales)

    monkeypatch.setattr(linear, "read_blocks", lambda *given: (shifted(blocks) for blocks in blocks_of(*given)))
    with pytest.raises(ExportMismatch, match="was written with an error of") as caught:
        _export(write_source(tmp_path, "llama", "huggingface"), tmp_path / "out", precision)
    assert not isinstance(caught.value, PrecisionLoss)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("family", "head_dim", "kv_heads"),
    [
        ("llama", 64, 1),
        ("olmo2", 80, 4),
        ("phi3", 96, 2),
        ("qwen3", 128, 2),
        ("gemma2", 256, 2),
        ("gemma3", 256, 1),
        ("qwen3_moe", 128, 1),
        ("olmoe", 64, 4),
    ],
)
def test_honest_export_of_a_real_shape_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, head_dim: int, kv_heads: int, precision: str
) -> None:
    import real_shapes

    found = {}

    def export(source: Path, output: Path, **settings: Any) -> None:
        found["check"] = convert.export_model(source, output, open_decoder=open_decoder, **settings).check

    monkeypatch.setattr(real_shapes, "export_model", export)
    write_model(tmp_path, family, Shape(head_dim, 4, kv_heads), precision)
    structure = found["check"].structure
    assert structure.difference < structure.allowed / 10


@pytest.mark.slow
def test_loss_of_a_right_export_names_a_precision_that_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.export.check._DIVERGENCE", {"int4": 1e-4, "int8": 0.1})
    said: list[str] = []
    source = write_source(tmp_path, "qwen3", "huggingface")
    with pytest.raises(PrecisionLoss, match=r"diverges.*int4 may by 0\.0001.*int8 passes.*precision=.int8"):
        convert.export_model(
            source, tmp_path / "out", precision="int4", open_decoder=open_decoder, report=said.append
        )
    assert "int4 loses too much; trying int8" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == [source.name]


def _export(source: Path, output: Path, precision: str) -> None:
    convert.export_model(source, output, precision=precision, open_decoder=open_decoder)


def test_first_use_refuses_a_broken_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build_wrong(config: DecoderConfig, tensors: Mapping[str, StoredTensor], *rest: Any) -> Any:
        return build_graph(*scale_attention(config, dict(tensors)), *rest)

    source = write_source(tmp_path, "llama", "huggingface")
    home = ModelHome(tmp_path / "home", open_decoder=open_decoder, is_quick=True)
    monkeypatch.setattr(graph, "build_graph", build_wrong)
    with pytest.raises(ExportMismatch, match="than its weights say"):
        home.resolve(f"{source}:int8")
    monkeypatch.undo()
    check = read_manifest(home.resolve(f"{source}:int8")).check
    assert check is not None
    assert check.num_tokens == 48
