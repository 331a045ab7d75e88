"""A GPU of NVIDIA that is imitated, for the tests of what runs on one; those that need a real GPU are skipped."""

import gc
import os
from pathlib import Path

import pytest
from fake_cuda import FakeGpu, install

from edgespec.manifest import Manifest, read_manifest


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("webgpu") and not os.environ.get("EDGESPEC_TEST_WEBGPU"):
        pytest.skip("needs a GPU, or one in software: make test-webgpu")


@pytest.fixture
def manifest(model: Path) -> Manifest:
    return read_manifest(model)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gc.collect()
    return install(monkeypatch, FakeGpu())
