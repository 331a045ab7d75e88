"""The static form in 8-bit weights and 16-bit activations, on the CPU provider."""

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import tiny
from calls import random_calls
from families import CONTEXT_LENGTHS, CONVOLVED, FAMILIES, LOGITS, MIXTURES, TOKENS, write_source
from hypothesis import given
from hypothesis import strategies as st

from edgespec.cli.main import main
from edgespec.errors import ManifestError, UsageError
from edgespec.export.activations import Encoding, row_levels
from edgespec.export.convert import export_model
from edgespec.manifest import FILE_NAME, Manifest, read_manifest
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.static import StaticDecoder, observe_ranges
from edgespec.setup.open_model import open_decoder
from edgespec.types import Range


def ranges_of_noise(graph: Path, folder: Path, manifest: Manifest) -> dict[str, Range]:
    tokens = np.random.default_rng(9).integers(0, manifest.vocab_size, 256).astype(np.int32)
    return observe_ranges(graph, manifest, [tokens])


@pytest.fixture(scope="module")
def model(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("w8a16") / "tiny"
    export_model(tiny_gguf, folder, precision="w8a16", form="npu", measure_ranges=ranges_of_noise)
    return folder


def decoder(folder: Path, *, deterministic: bool = True) -> StaticDecoder:
    return StaticDecoder(folder, read_manifest(folder), find_device("cpu"), deterministic=deterministic)


@given(st.floats(-1e4, 1e4), st.floats(-1e4, 1e4), st.floats(0, 1))
def test_levels_hold_zero_exactly_and_a_range_to_half_a_step(one: float, other: float, share: float) -> None:
    low, high = sorted((one, other))
    encoding = Encoding.of(Range(low, high))
    found = encoding.levels(np.array([0.0, low + share * (high - low)])).astype(np.int64)
    assert found[0] == encoding.zero_point
    back = (found[1] - encoding.zero_point) * encoding.scale
    assert abs(back - (low + share * (high - low))) <= 0.51 * encoding.scale + 1e-6 * max(-low, high)


def test_values_outside_of_a_range_become_its_ends() -> None:
    encoding = Encoding.of(Range(-1.0, 3.0))
    assert encoding.levels(np.array([-np.inf, -30000.0, 30000.0])).tolist() == [0, 0, 65535]


def test_each_row_of_weights_has_a_scale_of_its_own() -> None:
    weights = np.random.default_rng(0).normal(0, 1, (5, 96)).astype(np.float32)
    weights *= np.array([1e-3, 1, 0, 50, 1], np.float32)[:, None]
    levels, scales = row_levels(weights)
    assert np.abs(levels).max(axis=1).tolist() == [127, 127, 0, 127, 127]
    assert (np.abs(levels * scales[:, None] - weights) <= 0.501 * scales[:, None]).all()


def test_rows_are_those_of_floats_but_for_rounding(model: Path, tmp_path: Path, tiny_gguf: Path) -> None:
    export_model(tiny_gguf, tmp_path / "floats", precision="fp32", form="npu")
    tokens = np.random.default_rng(0).integers(0, tiny.VOCAB, 70).astype(np.int32)
    wanted = decoder(tmp_path / "floats", deterministic=False).logits(tokens, 70)
    for deterministic in (True, False):
        found = decoder(model, deterministic=deterministic).logits(tokens, 70)
    assert (found - wanted).std() < 0.07 * wanted.std()


def test_products_read_nothing_but_levels_and_the_cache_is_of_levels(model: Path) -> None:
    for name in ("model.onnx", "model_prefill.onnx"):
        graph = ir.load(model / name).graph
        assert {node.domain for node in graph} == {""}
        read = [value.producer() for node in graph if node.op_type in ("Gemm", "MatMul") for value in node.inputs]
        assert {node.op_type if node else "nothing" for node in read} == {"DequantizeLinear"}
        caches = [value for value in [*graph.inputs, *graph.outputs] if value.name and "." in value.name]
        assert {value.dtype for value in caches} == {ir.DataType.UINT16}
        assert len(caches) == 2 * 2 * tiny.LAYERS


def test_cached_equals_uncached_to_the_bit(model: Path) -> None:
    cached, fresh = decoder(model), decoder(model)
    for tokens, num_last in random_calls(seed=4, count=4, longest=12):
        fresh._held = np.zeros(0, np.int32)
        assert np.array_equal(cached.logits(tokens, num_last), fresh.logits(tokens, num_last))
    assert cached.num_fed < 0.8 * fresh.num_fed


@pytest.mark.slow
def test_ranges_come_of_text_and_the_export_is_checked(tiny_gguf: Path, tmp_path: Path) -> None:
    options = ["--form", "npu", "--precision", "w8a16", "--check"]
    assert main(["export", str(tiny_gguf), "--output", str(tmp_path / "out"), *options]) == 0
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.precision, manifest.kv_cache.dtype) == ("w8a16", "uint16")
    assert manifest.check is not None
    assert manifest.check.divergence < 0.01
    assert sorted(manifest.files) == sorted(
        [
            "README.md",
            "chat_template.jinja",
            "model.onnx",
            "model.onnx.data",
            "model_prefill.onnx",
            "tokenizer.json",
        ]
    )
    assert "divergence" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_the_same_prompts_give_the_same_graphs(tiny_gguf: Path, tmp_path: Path) -> None:
    for name in "ab":
        export_model(tiny_gguf, tmp_path / name, precision="w8a16", form="npu", measure_ranges=ranges_of_noise)
    one, other = (read_manifest(tmp_path / name).files for name in "ab")
    for file in ("model.onnx", "model_prefill.onnx", "model.onnx.data"):
        assert one[file] == other[file]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if not name.startswith("gemma") and name not in (*MIXTURES, *CONVOLVED)]
)
def test_every_family_has_it(tmp_path: Path, family: str) -> None:
    source = write_source(tmp_path, family, "huggingface")

    def ranges(graph: Path, folder: Path, manifest: Manifest) -> dict[str, Range]:
        return observe_ranges(graph, manifest, [np.resize(TOKENS, manifest.prefill_tokens)])

    manifest = export_model(
        source,
        tmp_path / "out",
        precision="w8a16",
        form="npu",
        context_length=CONTEXT_LENGTHS.get(family),
        measure_ranges=ranges,
    )
    wanted = LOGITS[family]
    found = open_decoder(tmp_path / "out", manifest).logits(TOKENS, len(wanted))
    bound = 0.1 if family == "phi3-partial" else 0.07  # its attention scores are 2.25 times as large
    assert (found - wanted).std() < bound * wanted.std()


def test_wrong_combinations_are_refused(
    tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["export", str(tiny_gguf), "--output", str(tmp_path / "out")]
    short = tmp_path / "short.jsonl"
    short.write_text(json.dumps({"prompt": "the"}))
    for options, message in (
        (["--precision", "w8a16"], "name an NPU (--device npu"),
        (["--precision", "w8a16", "--form", "gpu"], "name an NPU (--device npu"),
        (["--precision", "w8a16", "--drafter", str(tiny_gguf)], "name an NPU (--device npu"),
        (["--drafter", str(tiny_gguf), "--drafter-precision", "w8a16"], "--drafter-device npu for a drafter"),
        (["--form", "npu", "--precision", "w8a16", "--block-size", "64"], "int4 and int8, not w8a16"),
        (["--form", "npu", "--precision", "auto", "--block-size", "64"], "int4 and int8, not --form npu"),
        (["--block-size", "128"], "int4 and int8, not source"),
        (["--form", "npu", "--precision", "int4"], "fp16, fp32 or w8a16"),
        (["--form", "npu", "--calibration", str(short)], "--calibration is for --precision w8a16"),
        (["--form", "npu", "--precision", "w8a16", "--calibration", str(short)], "give longer ones"),
    ):
        assert main([*output, *options, "--no-check"]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="give measure_ranges"):
        export_model(tiny_gguf, tmp_path / "out", precision="w8a16", form="npu")


def test_levels_in_a_cache_of_another_form_are_refused(model: Path, tmp_path: Path) -> None:
    stated = json.loads((model / FILE_NAME).read_text())
    stated["kv_cache"]["form"] = "growing"
    (tmp_path / FILE_NAME).write_text(json.dumps(stated))
    with pytest.raises(ManifestError, match="growing cache is of uint16"):
        read_manifest(tmp_path)
