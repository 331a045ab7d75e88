"""Decoders that take a text as read: passes behind it run the new tokens alone, and nothing of it stays."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from growing import write_growing
from table_decoder import TableDecoder

from edgespec.errors import ContextOverflow
from edgespec.export.convert import export_model
from edgespec.manifest import read_manifest
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.static import StaticDecoder
from edgespec.runtimes.tree import OnnxTreeDecoder
from edgespec.types import append

RNG = np.random.default_rng(0)
LONG = RNG.integers(0, tiny.VOCAB, 600).astype(np.int32)  # more than a first buffer holds
TEXT = RNG.integers(0, tiny.VOCAB, 20).astype(np.int32)


@pytest.fixture(params=["shared", "growing", "tree", "static"])
def make(request: pytest.FixtureRequest, tiny_gguf: Path, tiny_model: Path, tmp_path: Path) -> Callable[[], Any]:
    kind = {"tree": OnnxTreeDecoder, "static": StaticDecoder}.get(request.param, OnnxDecoder)
    folder = tiny_model
    if request.param == "growing":
        folder = write_growing(tmp_path / "model")
    if request.param == "static":
        folder = tmp_path / "static"
        export_model(tiny_gguf, folder, precision="fp32", form="npu")
    manifest = read_manifest(folder)
    return lambda: kind(folder, manifest, find_device("cpu"), num_threads=1, deterministic=True)


def test_text_that_is_pretended_is_not_run_and_leaves_no_trace(make: Callable[[], Any]) -> None:
    decoder, fresh = make(), make()
    assert decoder.cache is decoder
    long = LONG[: decoder.context_length - 40]
    for read_before in (False, True):
        if read_before:
            decoder.logits(TEXT, 1)
        decoder.pretend(long)
        for width in (1, 8, 32):
            before = decoder.num_fed
            rows = decoder.logits(append(long, range(width, 2 * width)), width)
            assert (len(rows), decoder.num_fed - before) == (width, width)
        decoder.forget()
        before = decoder.num_fed
        assert np.array_equal(decoder.logits(TEXT, 3), fresh.logits(TEXT, 3))
        assert decoder.num_fed - before == len(TEXT)


def test_no_more_can_be_pretended_than_the_context_holds(make: Callable[[], Any]) -> None:
    decoder = make()
    with pytest.raises(ContextOverflow):
        decoder.pretend(np.zeros(decoder.context_length + 1, np.int32))


def test_decoder_without_a_cache_does_not_pretend() -> None:
    assert TableDecoder(5, seed=0).cache is None
