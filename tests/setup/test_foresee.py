"""What is foreseen of a model from its size and the probe of a device, both made up."""

from dataclasses import replace

import pytest
from made_up import DRAFTER, TARGET

from edgespec.runtimes.probe import DeviceProbe
from edgespec.setup.foresee import ModelSize, foresee_drafter, foresee_target, in_form
from edgespec.setup.profile import Place

SIZE = ModelSize(manifest=TARGET, file_bytes=4 * 10**9)
GPU = DeviceProbe(bytes_per_s=4e11, node_s=0.0, start_s=0.0, rows={1: 1.0, 2: 1.0, 4: 1.1, 8: 1.3})


def test_pass_takes_what_its_weights_take_to_read() -> None:
    profile = foresee_target(SIZE, GPU, "gpu")
    assert profile.pass_s(1, 128) == pytest.approx(0.01)
    assert [profile.pass_s(width, 128) for width in (2, 4, 8)] == pytest.approx([0.01, 0.011, 0.013])
    assert profile.pass_s(16, 128) > profile.pass_s(8, 128)


def test_small_model_takes_what_starting_its_nodes_takes() -> None:
    probe = replace(GPU, node_s=1e-4, start_s=1e-3)
    num_nodes = SIZE._replace(file_bytes=1).num_nodes
    assert foresee_target(SIZE._replace(file_bytes=1), probe, "gpu").pass_s(1, 128) == pytest.approx(
        1e-3 + num_nodes * 1e-4, rel=1e-3
    )


def test_npu_runs_the_tokens_of_a_pass_one_by_one() -> None:
    profile = foresee_target(SIZE, GPU, "npu")
    assert profile.pass_s(8, 128) == pytest.approx(8 * profile.pass_s(1, 128))


@pytest.mark.parametrize("shares_device", [True, False])
def test_drafter_takes_turns_with_its_target_on_one_device_alone(shares_device: bool) -> None:
    target = foresee_target(SIZE, GPU, "gpu")
    size = ModelSize(manifest=DRAFTER, file_bytes=4 * 10**8)
    profile = foresee_drafter(target, size, GPU, "gpu", Place("gpu", 1), shares_device=shares_device)
    (drafter,) = profile.drafters.values()
    assert drafter.step_s == pytest.approx(0.001)
    assert drafter.slowed == ((2.0, 2.0) if shares_device else (1.0, 1.0))
    assert profile.passes_s == target.passes_s


def test_forms_have_other_caches_and_the_npu_form_half_floats() -> None:
    assert in_form(SIZE, "cpu") == SIZE
    assert in_form(SIZE, "gpu").manifest.kv_cache.dtype == "float16"
    assert in_form(SIZE, "gpu").file_bytes == SIZE.file_bytes
    npu = in_form(SIZE, "npu")
    assert npu.manifest.kv_cache.form == "static"
    assert npu.manifest.context_length == 1024
    assert 2 * SIZE.file_bytes < npu.file_bytes < 4 * SIZE.file_bytes


@pytest.mark.parametrize(
    ("format", "halves", "foreseen"), [("safetensors", 4, 4), ("safetensors", 0, 2), ("gguf", 4, 4)]
)
def test_floats_of_a_source_are_half_floats_in_the_npu_form(format: str, halves: int, foreseen: int) -> None:
    source = replace(TARGET, precision="source", source=replace(TARGET.source, format=format))
    size = SIZE._replace(manifest=replace(source, half_bytes=halves * 10**9))
    assert in_form(size, "npu").file_bytes == foreseen * 10**9
