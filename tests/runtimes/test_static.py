"""The static form: the same model in fixed shapes and primitive operators, and the decoder that runs it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import tiny
from calls import random_calls
from families import CONTEXT_LENGTHS, CONVOLVED, FAMILIES, LOGITS, MIXTURES, TOKENS, UNEVEN, write_source

from edgespec import load
from edgespec.cli.main import main
from edgespec.errors import Cancelled, ContextOverflow, DeviceUnavailable, EdgeSpecError, ManifestError, UsageError
from edgespec.export.convert import export_model
from edgespec.export.options import Trimming
from edgespec.manifest import read_manifest
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.static import StaticDecoder
from edgespec.setup.open_model import open_decoder
from edgespec.system.cancel import Cancel
from edgespec.types import Logits, TokenIds


@pytest.fixture(scope="module")
def static_model(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("static") / "tiny"
    export_model(tiny_gguf, folder, precision="fp32", form="npu")
    return folder


def decoder(folder: Path, *, deterministic: bool = True) -> StaticDecoder:
    return StaticDecoder(folder, read_manifest(folder), find_device("cpu"), deterministic=deterministic)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in ("llama3", "gemma3", "phi3") else pytest.mark.slow)
        for name in FAMILIES
        if name not in (*MIXTURES, *CONVOLVED, *UNEVEN)
    ],
)
def test_static_form_gives_the_logits_of_transformers(tmp_path: Path, family: str) -> None:
    source = write_source(tmp_path, family, "huggingface")
    length = CONTEXT_LENGTHS.get(family)
    export_model(source, tmp_path / "out", precision="fp32", form="npu", context_length=length)
    wanted = LOGITS[family]
    found = decoder(tmp_path / "out").logits(TOKENS, len(wanted))
    assert np.abs(found - wanted).max() < 1e-4


def test_graphs_have_fixed_shapes_and_no_operator_of_onnx_runtime(static_model: Path) -> None:
    for name in ("model.onnx", "model_prefill.onnx"):
        graph = ir.load(static_model / name).graph
        assert {node.domain for node in graph} == {""}
        shapes = [value.shape for value in [*graph.inputs, *graph.outputs]]
        assert all(shape is not None and shape.is_static() for shape in shapes)


@pytest.mark.slow
def test_cached_equals_uncached_to_the_bit(static_model: Path) -> None:
    cached, fresh = decoder(static_model), decoder(static_model)
    for tokens, num_last in random_calls(seed=4, count=60, longest=40):
        fresh._held = np.zeros(0, np.int32)
        assert np.array_equal(cached.logits(tokens, num_last), fresh.logits(tokens, num_last))
    assert cached.num_fed < 0.5 * fresh.num_fed


def test_prompt_in_blocks_gives_the_same_within_rounding(static_model: Path) -> None:
    blocks, single = decoder(static_model, deterministic=False), decoder(static_model)
    tokens = np.random.default_rng(0).integers(0, tiny.VOCAB, 150).astype(np.int32)
    for num_tokens, num_last in ((150, 9), (100, 70), (130, 1)):
        found = blocks.logits(tokens[:num_tokens], num_last)
        assert np.abs(found - single.logits(tokens[:num_tokens], num_last)).max() < 1e-4


@pytest.mark.slow
def test_static_form_loads_answers_and_drafts(static_model: Path, tiny_model: Path, tmp_path: Path) -> None:
    with load(static_model, deterministic=True) as engine:
        answer = engine.generate("the in", max_tokens=30)
    with load(tiny_model, drafter=str(static_model), draft_length=3, deterministic=True) as engine:
        drafted = engine.generate("the in", max_tokens=30)
    assert drafted.token_ids == answer.token_ids
    assert drafted.stats.num_accepted > 0


def test_context_ends_where_the_cache_does(static_model: Path) -> None:
    tokens = np.zeros(tiny.CONTEXT + 1, np.int32)
    short = decoder(static_model, deterministic=False)
    assert short.logits(tokens[: tiny.CONTEXT], 1).shape == (1, tiny.VOCAB)
    with pytest.raises(ContextOverflow):
        short.logits(tokens, 1)


@pytest.mark.slow
def test_half_floats_halve_the_weights(tiny_gguf: Path, static_model: Path, tmp_path: Path) -> None:
    half = export_model(tiny_gguf, tmp_path / "half", form="npu", open_decoder=open_decoder)
    assert (half.precision, half.kv_cache.dtype) == ("fp16", "float16")
    assert half.weights_bytes < 0.6 * read_manifest(static_model).weights_bytes
    assert half.check is not None
    assert half.check.divergence < 1e-3


def test_what_the_static_form_does_not_have_is_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    for wanted in ({"precision": "int4"}, {"trimming": Trimming(keep=frozenset([0]))}, {"hidden_layers": (0,)}):
        with pytest.raises(UsageError, match="npu form"):
            export_model(tiny_gguf, tmp_path / "out", form="npu", **wanted)  # type: ignore[arg-type]
    assert main(["export", str(tiny_gguf), "--output", str(tmp_path / "out"), "--form", "npu", "--no-check"]) == 0


def test_graph_of_another_form_is_refused(static_model: Path, tiny_model: Path) -> None:
    with pytest.raises(ManifestError, match="not a static form"):
        StaticDecoder(tiny_model, read_manifest(tiny_model), find_device("cpu"))


def test_device_that_fails_in_its_first_pass_is_one_that_does_not_run_the_model(
    static_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: object) -> None:
        raise EdgeSpecError("ONNX Runtime failed running a pass: requires f16")

    monkeypatch.setattr(StaticDecoder, "_pass", failing)
    manifest = read_manifest(static_model)
    on_cpu = StaticDecoder(static_model, manifest, find_device("cpu"))  # tries nothing
    assert on_cpu.num_fed == 0
    with pytest.raises(DeviceUnavailable, match=r"'gpu' does not run this model: .* precision='fp32'") as refused:
        StaticDecoder(static_model, manifest, replace(find_device("cpu"), name="gpu"))
    assert refused.value.device == "gpu"


def test_a_cancelled_loading_ends_the_first_pass(static_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cancel, really = Cancel(), StaticDecoder._pass

    def cancelled(self: StaticDecoder, tokens: TokenIds, num_past: int) -> Logits:
        cancel.set()
        return really(self, tokens, num_past)

    monkeypatch.setattr(StaticDecoder, "_pass", cancelled)
    with pytest.raises(Cancelled):
        StaticDecoder(
            static_model, read_manifest(static_model), replace(find_device("cpu"), name="gpu"), cancel=cancel
        )


def test_manifest_of_another_static_graph_is_refused(static_model: Path) -> None:
    manifest = read_manifest(static_model)
    for changed in (
        replace(manifest, context_length=manifest.context_length - 1),
        replace(manifest, kv_cache=replace(manifest.kv_cache, num_layers=1)),
    ):
        with pytest.raises(ManifestError, match="not what its manifest says"):
            StaticDecoder(static_model, changed, find_device("cpu"))
