import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty import lanes_alive

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
