import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_cuda import FakeGpu, install
from faulty import lanes_alive
from until import until

from edgespec.export.convert import export_model


@pytest.fixture
def no_thread_stays() -> Iterator[None]:
    yield
    until(lambda: lanes_alive() == [])


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
