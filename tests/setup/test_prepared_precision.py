"""The precision in which the gpu form is prepared for an NVIDIA GPU, by the memory of that GPU."""

import gc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_cuda import FakeGpu, install
from random_model import SHAPES, write_model

from edgespec import load
from edgespec.manifest import read_manifest
from edgespec.setup.foresee import ModelSize, foresee_model, in_form
from edgespec.setup.home import ModelHome


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "tiny.gguf"
    write_model(path, SHAPES["tiny"]._replace(vocab_size=512, num_layers=1))
    return path


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def home(tmp_path: Path, said: list[str]) -> ModelHome:
    return ModelHome(tmp_path / "home", report=said.append)


def test_a_gpu_with_room_gets_fp16_which_serves_it_again(blocks: Path, home: ModelHome, said: list[str]) -> None:
    def find(num_bytes: int) -> Path | None:
        return home.find(str(blocks), "gpu", nvidia_bytes=lambda: num_bytes)

    assert find(24 << 30) is None
    folder = home.resolve(str(blocks), "gpu", nvidia_bytes=lambda: 24 << 30)
    assert folder.name.endswith("-fp16-gpu")
    assert read_manifest(folder).precision == "fp16"
    assert "preparing in fp16" in said[0]
    assert "of the GPU's 25.8 GB; to use source instead, add :source" in said[0]
    said.clear()
    assert home.resolve(str(blocks), "gpu", nvidia_bytes=lambda: 24 << 30) == find(24 << 30) == folder
    assert said == []
    assert find(1 << 20) is None, "it does not fit into a smaller GPU"
    assert home.find(str(blocks), "gpu") is None, "nor is it that of other devices"


def test_a_gpu_without_room_a_named_precision_and_other_devices_keep_the_blocks(
    blocks: Path, home: ModelHome, said: list[str]
) -> None:
    folder = home.resolve(str(blocks), "gpu", nvidia_bytes=lambda: 1 << 20)
    assert read_manifest(folder).precision == "source"
    assert "preparing in the precision of the source: its weights in fp16" in said[0]
    assert home.resolve(str(blocks), "gpu", nvidia_bytes=lambda: 24 << 30) == folder, "what is prepared is used"
    named = f"{blocks}:source"
    assert home.resolve(named, "gpu", nvidia_bytes=lambda: pytest.fail("asked")) == folder
    home.resolve(str(blocks), "cpu", nvidia_bytes=lambda: pytest.fail("asked"))


def test_a_plan_foresees_what_a_gpu_gets(blocks: Path, home: ModelHome, tiny_gguf: Path, said: list[str]) -> None:
    def precision(source: Path, named: str = "", form: str = "gpu", num_bytes: int = 24 << 30) -> str:
        return foresee_model(home, f"{source}{named}", form, num_bytes).manifest.precision

    assert precision(blocks) == "fp16"
    assert precision(blocks, num_bytes=1 << 20) == precision(blocks, ":source") == "source"
    assert precision(blocks, form="cpu") == precision(tiny_gguf) == "source"
    manifest, file_bytes = foresee_model(home, str(blocks), "cpu")
    size = ModelSize(replace(manifest, source=replace(manifest.source, format="gguf")), file_bytes)
    assert in_form(size, "gpu", 24 << 30).manifest.precision == "fp16"
    assert in_form(size, "gpu", 24 << 30).file_bytes > 2 * size.file_bytes
    assert in_form(size, "gpu", 1 << 20).file_bytes == in_form(size, "gpu").file_bytes == size.file_bytes


def test_a_full_disk_keeps_the_blocks(
    blocks: Path, home: ModelHome, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = SimpleNamespace(disk_usage=lambda folder: SimpleNamespace(free=1 << 30))
    with monkeypatch.context() as patch:
        patch.setattr("edgespec.setup.foreseen_export.shutil", full)
        folder = home.resolve(str(blocks), "gpu", nvidia_bytes=lambda: 24 << 30)
    assert read_manifest(folder).precision == "source"
    assert "fp16 takes more than the 1.1 GB free on disk" in said[0]


def test_a_source_in_floating_point_is_in_fp16_anyway(home: ModelHome, tiny_gguf: Path, said: list[str]) -> None:
    folder = home.resolve(str(tiny_gguf), "gpu", nvidia_bytes=lambda: 24 << 30)
    assert folder.name.endswith("-gpu")
    assert "-fp16-" not in folder.name
    assert not any("preparing in" in line for line in said)


@pytest.mark.slow
def test_loading_a_source_on_cuda_prepares_what_its_memory_holds(
    blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    install(monkeypatch, FakeGpu())
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    with load(str(blocks), device="cuda", drafter="none", context=256) as engine:
        assert engine.generate("the", max_tokens=3).token_ids
    (folder,) = (tmp_path / "home" / "models").glob("[!.]*")
    assert read_manifest(folder).precision == "fp16"
