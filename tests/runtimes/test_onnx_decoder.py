"""The real decoder on a tiny random model: its cache never changes what it says."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import tiny
from calls import decoder, random_calls

from edgespec.errors import ContextOverflow, DeviceUnavailable, EdgeSpecError, ManifestError, MemoryExhausted
from edgespec.export.convert import export_model
from edgespec.manifest import read_manifest
from edgespec.runtimes.device_checks import DeviceChecks
from edgespec.runtimes.devices import Device, find_device
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.session import translate_error
from edgespec.setup.open_model import ModelFolder, open_model


@pytest.fixture(scope="module")
def tiny_large_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks of 64, whose kernel treats the last of an odd number of rows alone."""
    folder = tmp_path_factory.mktemp("blocks")
    tiny.write_gguf(
        folder / "tiny.gguf", tiny.random_weights(inner=640), override={"llama.feed_forward_length": 640}
    )
    export_model(folder / "tiny.gguf", folder / "tiny", precision="int4", block_size=64)
    return folder / "tiny"


@pytest.mark.parametrize("count", [200, pytest.param(1500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision_fixture", ["tiny_model", "tiny_drafter", "tiny_large_blocks"])
def test_cached_equals_uncached_to_the_bit_over_random_calls(
    precision_fixture: str, count: int, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(precision_fixture)
    cached, fresh = decoder(folder), decoder(folder)
    for tokens, num_last in random_calls(seed=7, count=count, longest=60):
        fresh._held = np.zeros(0, np.int32)  # forget everything
        assert np.array_equal(cached.logits(tokens, num_last), fresh.logits(tokens, num_last))
    assert cached.num_fed < 0.5 * fresh.num_fed


def test_cached_equals_uncached_across_growth_and_chunks(tiny_model: Path) -> None:
    cached, fresh = decoder(tiny_model), decoder(tiny_model)
    for tokens, num_last in random_calls(seed=3, count=60, longest=tiny.CONTEXT):
        fresh._held = np.zeros(0, np.int32)
        assert np.array_equal(cached.logits(tokens, num_last), fresh.logits(tokens, num_last))


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file name that is no text, which only Linux allows")
def test_a_folder_is_opened_whose_name_python_cannot_decode(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "h\udcff")
    tokens = np.arange(9, dtype=np.int32)
    assert np.array_equal(decoder(folder).logits(tokens, 1), decoder(tiny_model).logits(tokens, 1))


def test_single_token_passes_agree_within_rounding(tiny_model: Path) -> None:
    plain, fresh = decoder(tiny_model, deterministic=False), decoder(tiny_model)
    for tokens, num_last in random_calls(seed=9, count=200, longest=60):
        assert np.allclose(plain.logits(tokens, num_last), fresh.logits(tokens, num_last), rtol=0, atol=2e-4)


@pytest.mark.parametrize("deterministic", [True, False])
def test_context_is_usable_to_its_last_token(tiny_model: Path, deterministic: bool) -> None:
    tokens = np.random.default_rng(0).integers(0, tiny.VOCAB, tiny.CONTEXT).astype(np.int32)
    whole = decoder(tiny_model, deterministic=deterministic)
    stepped = decoder(tiny_model, deterministic=deterministic)
    stepped.logits(tokens[:-1], 1)
    last = stepped.logits(tokens, 1)
    assert np.allclose(last, whole.logits(tokens, 1), rtol=0, atol=2e-4)
    with pytest.raises(ContextOverflow) as raised:
        whole.logits(np.append(tokens, np.int32(1)), 1)
    assert (raised.value.num_tokens, raised.value.context_length) == (tiny.CONTEXT + 1, tiny.CONTEXT)


def test_two_threads_can_share_a_decoder(tiny_model: Path) -> None:
    shared = decoder(tiny_model)
    prompts = [np.arange(start, start + 30, dtype=np.int32) for start in (0, 50)]
    wanted = [decoder(tiny_model).logits(prompt, 2).copy() for prompt in prompts]
    wrong: list[int] = []

    def ask(i: int) -> None:
        wrong.extend(i for _ in range(40) if not np.array_equal(shared.logits(prompts[i], 2), wanted[i]))

    threads = [Thread(target=ask, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_graph_that_is_no_graph_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    manifest = read_manifest(tiny_model)
    (tmp_path / manifest.graph).write_bytes(b"not a graph")
    with pytest.raises(ManifestError, match=r"model\.onnx"):
        OnnxDecoder(tmp_path, manifest, find_device("cpu"))


def test_manifest_of_another_graph_is_refused(tiny_model: Path) -> None:
    manifest = read_manifest(tiny_model)
    wrong = replace(manifest, kv_cache=replace(manifest.kv_cache, num_layers=5))
    with pytest.raises(ManifestError, match="past_key_values"):
        OnnxDecoder(tiny_model, wrong, find_device("cpu"))
    for changed in (
        replace(manifest, vocab_size=manifest.vocab_size + 1),
        replace(manifest, kv_cache=replace(manifest.kv_cache, head_dim=32)),
        replace(manifest, kv_cache=replace(manifest.kv_cache, num_kv_heads=1)),
    ):
        with pytest.raises(ManifestError, match="its manifest says"):
            OnnxDecoder(tiny_model, changed, find_device("cpu"))


def test_cache_form_and_hidden_states_are_those_of_the_graph(tiny_model: Path) -> None:
    manifest = read_manifest(tiny_model)
    for changed, words in (
        (replace(manifest, kv_cache=replace(manifest.kv_cache, form="growing")), "cache is shared_buffer"),
        (replace(manifest, hidden_layers=(0,)), r"hidden_states\.0 is missing"),
        (replace(manifest, context_length=manifest.context_length + 1), f"{tiny.CONTEXT} positions"),
    ):
        with pytest.raises(ManifestError, match=words):
            OnnxDecoder(tiny_model, changed, find_device("cpu"))


def test_device_that_fails_in_its_first_pass_is_one_that_does_not_run_the_model(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: object, **named: object) -> None:
        raise EdgeSpecError("ONNX Runtime failed running a pass: requires f16")

    loaded, device = decoder(tiny_model), Device("gpu", "GpuExecutionProvider", "gpu")
    monkeypatch.setattr(loaded._passes, "run", failing)
    with pytest.raises(
        DeviceUnavailable,
        match=r"'gpu' does not run this model: .*requires f16; .*precision='fp32' .*SOURCE:fp32.*, or use",
    ) as refused:
        loaded._check(device, DeviceChecks(tiny_model, read_manifest(tiny_model), device))
    assert refused.value.device == "gpu"


def test_a_signature_that_no_export_has_is_tried_and_one_at_the_wrong_places_refused(tiny_model: Path) -> None:
    manifest = read_manifest(tiny_model)
    names = manifest.signature
    assert names.is_plain
    assert replace(names, best="best", num_logits_to_keep=None).is_plain
    crossed = replace(names, past_key=names.past_value, past_value=names.past_key)
    assert not crossed.is_plain
    with pytest.raises(ManifestError, match=r"what the signature in edgespec\.json says; export"):
        open_model(ModelFolder(tiny_model, replace(manifest, signature=crossed)), find_device("cpu"))


def test_a_limit_on_threads_is_told_in_words() -> None:
    told = translate_error(
        RuntimeError("env.cc:327 PosixThread pthread_create failed, error code: 11"), "loading x"
    )
    assert isinstance(told, MemoryExhausted)
    assert str(told).startswith("no further thread can be started; close other programs")
