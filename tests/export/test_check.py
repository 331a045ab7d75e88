"""The check of an export: it passes good ones, refuses bad ones, and its reference is right by itself."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import tiny
from double import Double
from families import (
    CONTEXT_LENGTHS,
    CONVOLVED,
    FAMILIES,
    LOGITS,
    MIXTURES,
    SOURCES,
    TOKENS,
    weights_of,
    write_source,
)

from edgespec.errors import DeviceUnavailable, ExportMismatch
from edgespec.export import convert, graph
from edgespec.export.check import compare, compare_structure, judge
from edgespec.export.decoder_config import DecoderConfig, Layer
from edgespec.export.graph import build_graph
from edgespec.export.output import quality
from edgespec.export.precision import Rule
from edgespec.export.reference import reference_logits
from edgespec.export.rotary import Rotary
from edgespec.export.sources import read_source
from edgespec.manifest import Check, read_manifest
from edgespec.setup.open_model import open_decoder

pytestmark = pytest.mark.slow  # a module of many models or processes


@pytest.mark.parametrize(("family", "form"), SOURCES)
def test_reference_gives_the_logits_of_transformers(tmp_path: Path, family: str, form: str) -> None:
    source = read_source(write_source(tmp_path, family, form), CONTEXT_LENGTHS.get(family))
    logits = reference_logits(source.config, source.tensors, TOKENS)
    assert np.abs(logits[-len(LOGITS[family]) :] - LOGITS[family]).max() < 1e-4


@pytest.mark.parametrize("precision", ["fp32", "source", "fp16", "int8", "int4"])
def test_good_export_passes_and_says_so(tiny_gguf: Path, tmp_path: Path, precision: str) -> None:
    convert.export_model(tiny_gguf, tmp_path / "out", precision=precision, open_decoder=open_decoder)
    check = read_manifest(tmp_path / "out").check
    assert check is not None
    assert check.num_tokens > 200
    assert check.agreement == pytest.approx(1, abs=0.5 if precision == "int4" else 0.05)
    if precision == "fp32":
        assert check.nll == pytest.approx(check.reference_nll, abs=1e-5)
        assert check.largest_difference < 1e-4


@pytest.mark.parametrize(
    "wrong",
    [
        {"attention_scale": 0.05},
        {"rms_eps": 0.5},
        {"layers": (Layer(rotary=Rotary(np.full(8, 0.3, np.float32))),) * tiny.LAYERS},
    ],
)
def test_graph_of_another_model_is_refused_and_not_installed(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Mapping[str, Any]
) -> None:
    def build_wrong(config: DecoderConfig, *rest: Any, **options: Any) -> ir.Model:
        return build_graph(replace(config, **wrong), *rest, **options)

    monkeypatch.setattr(graph, "build_graph", build_wrong)
    with pytest.raises(ExportMismatch, match="other logits than its weights say"):
        convert.export_model(tiny_gguf, tmp_path / "out", precision="fp32", open_decoder=open_decoder)
    assert not list(tmp_path.iterdir())


class Forgetful(Double):
    """A decoder whose logits depend on how often it was called."""

    def __init__(self, logits: np.ndarray) -> None:
        self.rows = logits
        self.calls = 0

    def logits(self, tokens: np.ndarray, num_rows: int) -> np.ndarray:
        self.calls += 1
        rows = self.rows[len(tokens) - num_rows : len(tokens)].copy()
        rows[:, 0] += 0.5 * (self.calls > 3)
        return rows


def test_cache_that_forgets_is_refused() -> None:
    logits = np.random.default_rng(0).normal(size=(40, 30)).astype(np.float32)
    tokens = np.arange(40, dtype=np.int32) % 30
    check = compare(Forgetful(logits), tokens, logits)  # type: ignore[arg-type]
    assert check.pieces_difference == pytest.approx(0.5)
    with pytest.raises(ExportMismatch, match="in pieces"):
        judge(check, "fp32")


class Stale(Double):
    """A decoder whose rows behind what it holds are wrong, by an amount, from its second call on."""

    def __init__(self, logits: np.ndarray, amount: float) -> None:
        self.rows, self.amount = logits, amount
        self.widths: list[int] = []

    def logits(self, tokens: np.ndarray, num_rows: int) -> np.ndarray:
        rows = np.zeros((num_rows, self.rows.shape[1]), np.float32)
        right = self.rows[len(tokens) - num_rows : len(tokens)]  # the first call leads astray, past the text
        rows[: len(right)] = right
        rows[:, 0] += self.amount * bool(self.widths)
        self.widths.append(num_rows)
        return rows


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 48, 96])
def test_structure_sees_every_row_and_some_of_them_behind_a_rewind(num_tokens: int) -> None:
    text = np.random.default_rng(0).normal(size=(num_tokens + 9, 30)).astype(np.float32)
    tokens, written = np.arange(num_tokens + 9, dtype=np.int32), text[:num_tokens]
    noisy = written * np.float32(1 + 1e-5)
    good = compare_structure(Stale(text, 0), tokens, written, noisy)  # type: ignore[arg-type]
    assert (good.difference, good.pieces_difference) == (0, 0)
    stale = Stale(text, 0.5)
    bad = compare_structure(stale, tokens, written, noisy)  # type: ignore[arg-type]
    assert min(bad.difference, bad.pieces_difference) > 100 * bad.allowed
    assert len(stale.widths) == 2


@pytest.mark.parametrize("divergence", [0.2, float("nan"), float("inf")])
def test_divergence_that_the_precision_does_not_explain_is_refused(divergence: float) -> None:
    good = Check(
        num_tokens=9,
        reference_nll=3.0,
        nll=3.0,
        divergence=0.0,
        largest_difference=0.0,
        agreement=1.0,
        pieces_difference=0.0,
    )
    judge(good, "source")
    with pytest.raises(ExportMismatch):
        judge(replace(good, divergence=divergence), "source")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in ("llama3", "phi3") else pytest.mark.slow)
        for name in FAMILIES
        if not name.startswith("gemma") and name not in (*MIXTURES, *CONVOLVED)
    ],
)
def test_gpu_form_says_the_same_in_half_floats(tmp_path: Path, family: str) -> None:
    source = write_source(tmp_path, family, "huggingface")
    manifest = convert.export_model(
        source, tmp_path / "out", precision="fp16", form="gpu", open_decoder=open_decoder
    )
    assert (manifest.form, manifest.kv_cache.dtype) == ("gpu", "float16")
    assert manifest.check is not None
    assert 0 < manifest.check.divergence < 1e-4


@pytest.mark.parametrize("precision", ["source", "int8", "int4"])
def test_gpu_form_of_blocks_passes_its_check(tmp_path: Path, precision: str) -> None:
    tiny.write_gguf(tmp_path / "a.gguf", tiny.random_weights(), storage="Q4_1")
    check = convert.export_model(
        tmp_path / "a.gguf", tmp_path / "out", precision=precision, form="gpu", open_decoder=open_decoder
    ).check
    assert check is not None
    assert check.divergence < {"source": 0.02, "int8": 0.01, "int4": 0.4}[precision]


def test_gpu_form_of_what_half_floats_cannot_hold_is_refused(tmp_path: Path) -> None:
    source = write_source(tmp_path, "gemma2", "huggingface")
    with pytest.raises(DeviceUnavailable, match=r"gemma2 exceed.* other than cuda"):
        convert.export_model(source, tmp_path / "out", form="gpu")
    assert convert.export_model(source, tmp_path / "out", precision="fp32", form="gpu").form == "gpu"


def test_gpu_form_of_gpt_oss_is_refused_at_the_depth_of_120b(tmp_path: Path) -> None:
    config = FAMILIES["gpt_oss"]["config"] | {"num_hidden_layers": 36, "layer_types": None}
    weights = {
        name.replace("layers.1.", f"layers.{i}."): value
        for name, value in weights_of("gpt_oss").items()
        for i in (range(36) if "layers.1." in name else [0])
        if "layers." not in name or "layers.1." in name
    }
    tiny.write_huggingface(tmp_path / "hf", weights, config=config)
    with pytest.raises(DeviceUnavailable, match=r"gpt_oss exceed"):
        convert.export_model(tmp_path / "hf", tmp_path / "out", form="gpu")


def test_gpu_form_in_single_precision_is_the_cpu_form_to_its_rounding(tiny_gguf: Path, tmp_path: Path) -> None:
    manifest = convert.export_model(
        tiny_gguf, tmp_path / "out", precision="fp32", form="gpu", open_decoder=open_decoder
    )
    assert (manifest.form, manifest.kv_cache.dtype) == ("gpu", "float32")
    assert manifest.check is not None
    assert manifest.check.divergence < 1e-9


def test_gpu_form_in_four_bits_keeps_what_is_sensitive_in_eight(tiny_gguf: Path, tmp_path: Path) -> None:
    """In a model of few weights; the head in every model."""
    tensor = read_source(tiny_gguf).tensors["0.down"]
    small, large = Rule("int4", 32, True, 10**8), Rule("int4", 32, True, 10**10)
    names = ("0.qkv", "0.qkv.1", "0.o", "0.gate_up", "0.down", "head")
    assert [small.form(tensor, name).bits for name in names] == [8, 8, 8, 4, 8, 8]
    assert [large.form(tensor, name).bits for name in names] == [4, 4, 4, 4, 4, 8]
    assert {Rule("int4", 32).form(tensor, name).bits for name in names} == {4}


def test_export_in_four_bits_that_lost_its_way_is_not_installed() -> None:
    """Plainly rounded symmetric blocks of SmolLM2 diverge by 0.34 and agree at 59 %."""
    lossy = Check(
        num_tokens=232,
        reference_nll=2.9123,
        nll=3.1020,
        divergence=0.3365,
        largest_difference=9.0,
        agreement=0.59,
        pieces_difference=0.0,
    )
    with pytest.raises(ExportMismatch, match=r"diverges from its source by 0\.337"):
        judge(lossy, "int4")
    assert "clearly worse" in (quality(lossy, "cpu") or "")
    assert "somewhat worse" in (quality(replace(lossy, agreement=0.8), "cpu") or "")
    assert "--precision fp16)" in (quality(lossy, "npu") or "")
    assert quality(replace(lossy, agreement=0.97), "cpu") is None


def test_passes_of_one_token_are_compared_too(tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "a.gguf", tiny.random_weights(), storage="Q4_1")
    found = {}
    for precision in ("source", "fp32"):
        check = convert.export_model(
            tmp_path / "a.gguf", tmp_path / precision, precision=precision, open_decoder=open_decoder
        ).check
        assert check is not None
        found[precision] = check.one_row_difference or 0.0
    assert found["fp32"] < 1e-3
    assert 0 < found["source"] < 5
