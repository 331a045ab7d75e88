"""Passes over memory that is bound once: the rows of arrays that are fed anew, and few bytes moved a token."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tiny
from families import write_source
from hypothesis import given
from hypothesis import strategies as st

from edgespec.export.convert import export_model
from edgespec.manifest import Manifest, read_manifest
from edgespec.runtimes.attention_bias import HIDDEN
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.session import load_graph
from edgespec.runtimes.static import Mask, StaticDecoder


def decoder(folder: Path) -> StaticDecoder:
    return StaticDecoder(folder, read_manifest(folder), find_device("cpu"))


def plain_mask(num_past: int, num_tokens: int, capacity: int, window: int | None) -> npt.NDArray[np.float32]:
    """By its definition, slot by slot."""
    mask = np.full((num_tokens, capacity + num_tokens), HIDDEN, np.float32)
    for row in range(num_tokens):
        position = num_past + row
        for slot in range(capacity + num_tokens):
            at = slot if slot < capacity else num_past + slot - capacity
            is_held = slot < num_past or slot >= capacity
            if is_held and at <= position and (window is None or position - at < window):
                mask[row, slot] = 0
    return mask


@given(
    num_tokens=st.integers(1, 6),
    window=st.none() | st.integers(1, 9),
    moves=st.lists(st.integers(0, 14), min_size=1, max_size=8),
)
def test_a_mask_that_is_moved_is_the_mask_of_its_place(
    num_tokens: int, window: int | None, moves: list[int]
) -> None:
    mask = np.empty((num_tokens, 14 + num_tokens), np.float32)
    moved = Mask(mask, window)
    for num_past in moves:
        moved.move(num_past)
        assert np.array_equal(mask, plain_mask(num_past, num_tokens, 14, window))


@pytest.mark.parametrize("num_writes", [0, 1])
def test_a_move_that_was_interrupted_leaves_nothing_behind(
    num_writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = np.empty((2, 32), np.float32)
    moved = Mask(mask, 5)
    moved.move(10)
    write, calls = moved._write, []

    def interrupted(low: int, high: int, num_past: int) -> None:
        calls.append(low)
        write(low, high, num_past)
        if len(calls) > num_writes:
            raise KeyboardInterrupt

    monkeypatch.setattr(moved, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        moved.move(20)
    monkeypatch.undo()
    moved.move(12)
    assert np.array_equal(mask, plain_mask(12, 2, 30, 5))


class FedDecoder:
    """Feeds the whole cache to every pass as arrays of its own."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        widths = {manifest.prefill_tokens: manifest.prefill_graph or "", 1: manifest.graph}
        self.sessions = {width: load_graph(folder / graph, find_device("cpu")) for width, graph in widths.items()}

    def logits(self, tokens: npt.NDArray[np.int32], num_last: int) -> npt.NDArray[np.float32]:
        manifest, kv = self.manifest, self.manifest.kv_cache
        shape = (kv.num_kv_heads, manifest.context_length, kv.head_dim)
        pairs = manifest.signature.caches(kv.attention_layers)
        caches = {past: np.zeros(shape, kv.dtype) for past, _ in pairs}
        rows, start = [], 0
        while start < len(tokens):
            width = max(width for width in self.sessions if width <= len(tokens) - start)
            outputs = self.run(width, tokens[start : start + width], start, caches)
            for past, present in pairs:
                caches[past][:, start : start + width] = outputs[present]
            rows.append(outputs["logits"])
            start += width
        found: npt.NDArray[np.float32] = np.concatenate(rows)[-num_last:]
        return found

    def run(
        self, width: int, tokens: npt.NDArray[np.int32], start: int, caches: dict[str, Any]
    ) -> dict[str, npt.NDArray[Any]]:
        session = self.sessions[width]
        feeds = {"input_ids": tokens, "position_ids": np.arange(start, start + width, dtype=np.int32)}
        for value in session.get_inputs():
            if value.name.endswith("mask"):
                window = self.manifest.sliding_window if value.name.startswith("local") else None
                mask = plain_mask(start, width, self.manifest.context_length, window)
                feeds[value.name] = mask.astype({"tensor(float)": "f4", "tensor(float16)": "f2"}[value.type])
        names = [value.name for value in session.get_outputs()]
        return dict(zip(names, session.run(names, {**feeds, **caches}), strict=True))


@pytest.fixture(scope="module", params=["fp32", "fp16", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A context of 96 tokens; gemma3 has layers that see a window."""
    folder = tmp_path_factory.mktemp("static")
    if request.param == "gemma3":
        source, precision = write_source(folder, "gemma3", "huggingface"), "fp32"
    else:
        source, precision = write_short(folder, 96), request.param
    export_model(source, folder / "model", precision=precision, form="npu")
    return folder / "model"


def write_short(folder: Path, context_length: int) -> Path:
    source = folder / f"{context_length}.gguf"
    tiny.write_gguf(source, tiny.random_weights(), override={"llama.context_length": context_length})
    return source


def test_bound_passes_give_the_bits_of_fed_ones(model: Path) -> None:
    manifest = read_manifest(model)
    bound, fed = decoder(model), FedDecoder(model, manifest)
    rng = np.random.default_rng(0)
    for length, num_last in ((3, 3), (manifest.prefill_tokens + 5, 9), (8, 4), (manifest.prefill_tokens, 20)):
        tokens = rng.integers(0, manifest.vocab_size, length).astype(np.int32)
        bound.forget()  # what earlier texts left in the cache is masked
        assert np.array_equal(bound.logits(tokens, num_last), fed.logits(tokens, num_last))


class NoFeeding:
    """A session that counts what is bound to it, and takes no arrays."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.num_bound = 0

    def __getattr__(self, name: str) -> Any:
        assert name != "run", "a pass feeds arrays"
        return getattr(self._session, name)

    def io_binding(self) -> Any:
        binding, session = self._session.io_binding(), self

        class Counted:
            _iobinding = binding._iobinding

            def __getattr__(self, name: str) -> Any:
                session.num_bound += name.startswith("bind")
                return getattr(binding, name)

        return Counted()


class Written(np.ndarray[Any, np.dtype[Any]]):
    """Counts the bytes that are written into arrays of the kind."""

    num_bytes = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        Written.num_bytes += self[key].nbytes
        super().__setitem__(key, value)


def test_nothing_is_bound_again_and_few_bytes_move_whatever_the_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: list[NoFeeding] = []

    def load_counted(*arguments: Any, **options: Any) -> NoFeeding:
        sessions.append(NoFeeding(load_graph(*arguments, **options)))
        return sessions[-1]

    monkeypatch.setattr("edgespec.runtimes.compiled_graphs.load_graph", load_counted)
    moved = {}
    for context_length in (96, 600):
        folder = tmp_path / str(context_length)
        export_model(write_short(tmp_path, context_length), folder, precision="fp32", form="npu")
        sessions.clear()
        opened = decoder(folder)
        at_load = [session.num_bound for session in sessions]
        assert all(at_load)
        tokens = np.random.default_rng(1).integers(0, tiny.VOCAB, 90).astype(np.int32)
        opened.logits(tokens[:5], 1)
        opened._cache._arrays = {name: each.view(Written) for name, each in opened._cache._arrays.items()}
        for mask in (mask for each in opened._passes.values() for mask in each._masks):
            mask._array = mask._array.view(Written)
        moved[context_length] = []
        for length in range(6, 60):
            Written.num_bytes = 0
            opened.logits(tokens[:length], 1)
            moved[context_length].append(Written.num_bytes)
        assert [session.num_bound for session in sessions] == at_load
    assert moved[96] == moved[600]
    per_token = read_manifest(folder).kv_cache.bytes_per_token
    assert set(moved[600]) == {per_token + 4}  # and one more position of the mask is shown
