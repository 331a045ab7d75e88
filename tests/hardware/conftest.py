"""A GPU of NVIDIA that is imitated, for the tests of what runs on one."""

import gc
from pathlib import Path

import pytest
from fake_cuda import FakeGpu, install

from edgespec.manifest import Manifest, read_manifest


@pytest.fixture
def manifest(model: Path) -> Manifest:
    return read_manifest(model)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gc.collect()
    return install(monkeypatch, FakeGpu())
