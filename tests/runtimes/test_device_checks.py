"""Checks of a device that are saved beside the model: what they count for, and what a later opening still runs."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.manifest import Manifest, read_manifest
from edgespec.runtimes import device_checks
from edgespec.runtimes.device_checks import FILE_NAME, DeviceChecks
from edgespec.runtimes.devices import Device
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.passes import Passes
from edgespec.runtimes.tree import OnnxTreeDecoder

GPU = Device("gpu", "WebGpuExecutionProvider", "gpu")


pytestmark = pytest.mark.usefixtures("computed_by_the_cpu")


def num_passes(
    monkeypatch: pytest.MonkeyPatch, folder: Path, kind: Any = OnnxDecoder, device: Device = GPU
) -> int:
    """How many passes opening a folder takes."""
    num_run, really = 0, Passes.run

    def count(self: Passes, *arguments: Any, **named: Any) -> Any:
        nonlocal num_run
        num_run += 1
        return really(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Passes, "run", count)
        kind(folder, read_manifest(folder), device)
    return num_run


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A model that no test has opened."""
    shutil.copytree(tiny_model, tmp_path / "model", ignore=shutil.ignore_patterns(FILE_NAME))
    return tmp_path / "model"


@pytest.mark.parametrize("kind", [OnnxDecoder, OnnxTreeDecoder])
def test_a_check_is_done_once_and_a_pass_of_one_token_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    first = kind(folder, read_manifest(folder), GPU)
    assert num_passes(monkeypatch, folder, kind) == 1
    again = kind(folder, read_manifest(folder), GPU)
    assert again.num_fed == first.num_fed == 0
    if kind is OnnxTreeDecoder:
        assert again._runs_trees == first._runs_trees
    assert (again.chunk_tokens, again.can) == (first.chunk_tokens, first.can)


def test_a_check_is_repeated_for_another_device_driver_or_runtime(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = num_passes(monkeypatch, folder)
    assert whole > 2
    assert num_passes(monkeypatch, folder, device=replace(GPU, hardware="another")) == whole
    monkeypatch.setattr(device_checks, "device_key", lambda device: "gpu, driver 2")
    assert num_passes(monkeypatch, folder) == whole
    assert num_passes(monkeypatch, folder) == 1
    manifest = read_manifest(folder)
    monkeypatch.setattr(Manifest, "is_ours", False)
    assert DeviceChecks(folder, manifest, GPU).read() is None


def test_a_check_is_repeated_where_the_device_gives_another_row_than_it_did(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = num_passes(monkeypatch, folder)
    checks = DeviceChecks(folder, read_manifest(folder), GPU)
    known = checks.read()
    assert known is not None
    checks.write(replace(known, sample=tuple(number + 0.001 for number in known.sample)))
    assert num_passes(monkeypatch, folder) == 1
    checks.write(replace(known, sample=known.sample[::-1]))
    assert num_passes(monkeypatch, folder) == whole
    assert checks.read() == known


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"version": 3, "checks": {}}', '{"version": 2, "checks": {"a": {"max_pass_tokens": 0}}}'],
)
def test_a_damaged_file_of_checks_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    (folder / FILE_NAME).write_text(content)
    assert num_passes(monkeypatch, folder) > 2
    assert num_passes(monkeypatch, folder) == 1


def test_a_folder_that_is_read_only_is_checked_each_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("edgespec.system.typed_json.replace_file", refuse)
    assert num_passes(monkeypatch, folder) == num_passes(monkeypatch, folder) > 2
