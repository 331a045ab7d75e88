"""Advice where a model folder is in the form for another device."""

from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.errors import DeviceUnavailable
from edgespec.manifest import read_manifest
from edgespec.runtimes.devices import Device
from edgespec.setup.device_choice import explain_form, require_form, source_of
from edgespec.setup.open_model import ModelFolder

GPU = Device("cuda", "CUDAExecutionProvider", "cuda", kind="gpu")
NPU = Device("qnn", "QNNExecutionProvider", kind="npu")


@pytest.fixture
def model(tiny_model: Path) -> ModelFolder:
    return ModelFolder(tiny_model, read_manifest(tiny_model))


def in_form(model: ModelFolder, form: str) -> ModelFolder:
    return model._replace(manifest=replace(model.manifest, form=form))


def test_a_device_that_refuses_another_form_is_explained_and_the_right_form_is_not_blamed(
    model: ModelFolder,
) -> None:
    error = DeviceUnavailable("no kernel", device="cuda")
    explained = explain_form(error, model, GPU)
    assert str(explained) == (
        f"no kernel; {model.manifest.name} is in the cpu form, which runs on the CPU; for the gpu form run: "
        "models.export('tiny.gguf', device='cuda', output=DIR)"
    )
    assert (explained.device, explained.exit_code) == ("cuda", 4)
    assert "an NPU or the CPU" in str(explain_form(error, in_form(model, "npu"), GPU))
    assert explain_form(error, in_form(model, "gpu"), GPU) is error
    assert explain_form(error, model, NPU) is error, "which another model ran on"


def test_an_npu_runs_fixed_shapes_alone_and_other_devices_are_tried(model: ModelFolder) -> None:
    with pytest.raises(DeviceUnavailable, match=r"'qnn' runs only graphs of fixed shapes.*device='qnn'"):
        require_form(model, NPU)
    static = replace(model.manifest, kv_cache=replace(model.manifest.kv_cache, form="static"))
    require_form(model._replace(manifest=static), NPU)
    require_form(model, GPU)


def test_a_source_is_named_by_its_repository_where_it_has_one(model: ModelFolder) -> None:
    assert source_of(model.manifest) == "tiny.gguf"
    source = replace(model.manifest.source, repository="org/tiny")
    assert source_of(replace(model.manifest, source=source)) == "org/tiny:tiny.gguf", "which may hold several"
    source = replace(source, format="safetensors")
    assert source_of(replace(model.manifest, source=source)) == "org/tiny"
