import gc
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_cuda import FakeGpu, install
from faulty import lanes_alive

from edgespec.export.convert import export_model
from edgespec.manifest import Manifest, read_manifest
from edgespec.text.tokenizer import Tokenizer


@pytest.fixture
def no_thread_stays() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 120
    while lanes_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lanes_alive() == []


@pytest.fixture(scope="module")
def manifest(tiny_model: Path) -> Manifest:
    return read_manifest(tiny_model)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model / "tokenizer.json")


@pytest.fixture(scope="module")
def gpu_model(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in the form for GPUs, in 4 bits."""
    folder = tmp_path_factory.mktemp("gpu") / "tiny-gpu"
    export_model(tiny_gguf, folder, precision="int4", form="gpu")
    return folder


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """An NVIDIA GPU in an imitation."""
    gc.collect()
    return install(monkeypatch, FakeGpu())
