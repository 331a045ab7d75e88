"""Memory that runs out in a pass: an error in words, and caches that hold nothing false."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import growing
import numpy as np
import pytest

from edgespec import ContextOverflow, MemoryExhausted, load
from edgespec.cli.main import main
from edgespec.manifest import read_manifest
from edgespec.memory.estimate import estimate_memory
from edgespec.memory.free_memory import RESERVE_BYTES, FreeMemory
from edgespec.runtimes import kv_caches
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.session import translate_error
from edgespec.setup.open_model import ModelFolder, weights_bytes
from edgespec.types import TokenIds

pytestmark = pytest.mark.slow  # a module of many models or processes

# What ONNX Runtime 1.31 says.
SAYINGS = [
    "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : bfc_arena.cc:376 Failed to allocate memory for requested buffer "
    "of size 8388608",
    "[ONNXRuntimeError] : 1 : FAIL : std::bad_alloc",
    "mmap of 102400 bytes failed: Cannot allocate memory",
]


@pytest.mark.parametrize("said", SAYINGS)
def test_what_the_runtime_says_of_memory_is_understood(said: str) -> None:
    assert isinstance(translate_error(RuntimeError(said), "running a pass"), MemoryExhausted)
    assert isinstance(translate_error(MemoryError(), "running a pass"), MemoryExhausted)
    assert not isinstance(translate_error(RuntimeError("Invalid rank"), "running a pass"), MemoryExhausted)


class Refusing:
    """A session's run that fails at times, after it has done its work or instead."""

    def __init__(self, session: Any, fails: Iterator[bool], *, is_late: bool) -> None:
        self._session = session
        self._fails = fails
        self._is_late = is_late

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, *binding: Any) -> None:
        does_fail = next(self._fails, False)
        if not does_fail or self._is_late:
            self._session.run_with_iobinding(*binding)
        if does_fail:
            raise RuntimeError(SAYINGS[0])


@pytest.mark.parametrize("is_late", [False, True])
def test_a_decoder_serves_again_after_passes_that_failed(tiny_model: Path, is_late: bool) -> None:
    decoder, fresh = decoder_of(tiny_model), decoder_of(tiny_model)
    rng = np.random.default_rng(0)
    passes = decoder._passes
    passes._session = Refusing(passes._session, (bool(draw) for draw in rng.random(60) < 0.4), is_late=is_late)
    tokens = rng.integers(0, 200, 300).astype(np.int32)
    num_refused = 0
    for _ in range(60):
        more = rng.integers(0, 200, rng.integers(1, 40)).astype(np.int32)
        tokens = np.concatenate([tokens[: rng.integers(1, 600)], more])[-690:]
        num_last = int(rng.integers(1, len(more) + 1))
        try:
            found = decoder.logits(tokens, num_last).copy()
        except MemoryExhausted:
            num_refused += 1
            continue
        assert np.array_equal(found, fresh.logits(tokens, num_last))
    assert num_refused > 10


@pytest.mark.parametrize("num_tokens", [33, 64, 300, 690])
def test_a_prompt_whose_pass_has_no_room_is_read_in_narrower_ones(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    decoder, fresh = decoder_of(tiny_model), decoder_of(tiny_model)
    run, widths = decoder._passes.run, list[int]()

    def scarce(tokens: TokenIds, *arguments: Any, **named: Any) -> Any:
        if len(tokens) > 32:
            raise MemoryExhausted("no room for a pass so wide")
        widths.append(len(tokens))
        return run(tokens, *arguments, **named)

    monkeypatch.setattr(decoder._passes, "run", scarce)
    tokens = np.random.default_rng(2).integers(0, 200, num_tokens).astype(np.int32)
    for num_last in (1, 3):
        assert np.array_equal(decoder.logits(tokens, num_last), fresh.logits(tokens, num_last))
    assert max(widths) <= 32
    assert decoder.num_fed == fresh.num_fed


def test_a_pass_without_room_is_not_halved_for_ever(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, tried = decoder_of(tiny_model), list[int]()

    def refused(tokens: TokenIds, *arguments: Any, **named: Any) -> Any:
        tried.append(len(tokens))
        raise MemoryExhausted("no room at all")

    monkeypatch.setattr(decoder._passes, "run", refused)
    with pytest.raises(MemoryExhausted, match="no room at all"):
        decoder.logits(np.zeros(600, np.int32), 1)
    assert tried == [256, 128, 64, 32, 16]


def decoder_of(folder: Path) -> OnnxDecoder:
    return OnnxDecoder(folder, read_manifest(folder), find_device("cpu"), deterministic=True)


def is_cache(shape: object) -> bool:
    """Whether an array of a shape holds keys or values, [batch, heads, positions, head_dim]."""
    return isinstance(shape, tuple) and len(shape) == 4


@pytest.mark.parametrize("num_given", [0, 1, 2, 3])
def test_a_cache_that_grew_in_part_serves_again(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, num_given: int
) -> None:
    """Keys and values of two layers: four buffers, of which the first are given."""
    decoder, fresh = decoder_of(tiny_model), decoder_of(tiny_model)
    tokens = np.random.default_rng(1).integers(0, 200, 690).astype(np.int32)
    decoder.logits(tokens[:400], 1)
    real, calls = np.empty, iter(range(100))

    def scarce(shape: Any, *arguments: Any, **named: Any) -> Any:
        if is_cache(shape) and next(calls) >= num_given:
            raise MemoryError
        return real(shape, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(kv_caches.np, "empty", scarce)
        with pytest.raises(MemoryExhausted, match="no memory for a context of"):
            decoder.logits(tokens[:600], 1)
    for length in (410, 500, 520, 690, 300):
        assert np.array_equal(decoder.logits(tokens[:length], 3), fresh.logits(tokens[:length], 3)), length


def test_where_a_cache_cannot_double_it_grows_by_what_is_needed(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, fresh = decoder_of(tiny_model), decoder_of(tiny_model)
    tokens = np.random.default_rng(1).integers(0, 200, 690).astype(np.int32)
    decoder.logits(tokens[:400], 1)
    real = np.empty

    def scarce(shape: Any, *arguments: Any, **named: Any) -> Any:
        if is_cache(shape) and shape[2] > 660:
            raise MemoryError
        return real(shape, *arguments, **named)

    monkeypatch.setattr(kv_caches.np, "empty", scarce)
    for length in (513, 530, 590):
        assert np.array_equal(decoder.logits(tokens[:length], 3), fresh.logits(tokens[:length], 3)), length


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets what is free, in MiB."""
    free = [1 << 20]

    def room(limit_bytes: int | None = None) -> FreeMemory:
        return FreeMemory(free[0] << 20, "a test")

    monkeypatch.setattr("edgespec.setup.wish.free_memory", room)
    return lambda mib: free.__setitem__(0, mib)


def test_an_engine_whose_plain_pass_fails_says_so_and_answers_again(tiny_model: Path, tiny_drafter: Path) -> None:
    with load(tiny_model, drafter=str(tiny_drafter), draft_length=3, deterministic=True) as engine:
        wanted = engine.plain().generate("in the an", max_tokens=60).token_ids
        passes = engine.target._passes  # type: ignore[attr-defined]
        session = passes._session
        passes._session = Refusing(session, iter([False] * 9 + [True] * 100), is_late=False)
        with pytest.raises(MemoryExhausted, match="out of memory while running a pass"):
            engine.generate("in the an", max_tokens=60)
        passes._session = session
        answer = engine.generate("in the an", max_tokens=60)
    assert answer.token_ids == wanted
    assert any(line.startswith("drafting steps down") for line in answer.stats.downgrades)


def test_a_wide_pass_that_fails_costs_no_token(tiny_model: Path, tiny_drafter: Path) -> None:
    said: list[str] = []
    with load(
        tiny_model, drafter=str(tiny_drafter), draft_length=3, deterministic=True, report=said.append
    ) as engine:
        wanted = engine.plain().generate("in the an", max_tokens=60).token_ids
        passes = engine.target._passes  # type: ignore[attr-defined]
        passes._session = Refusing(passes._session, iter([False] * 5 + [True] + [False] * 200), is_late=False)
        answer = engine.generate("in the an", max_tokens=60)
    assert answer.token_ids == wanted
    assert "was refused memory and run without the draft" in answer.stats.downgrades[0]
    assert [line for line in said if "memory" in line] == list(answer.stats.downgrades)


def test_a_target_that_does_not_fit_is_refused_before_it_is_opened(
    tiny_model: Path, machine: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(100)
    name = "edgespec.engine.load.open_model"
    monkeypatch.setattr(name, lambda *arguments, **named: pytest.fail("opened"))
    with pytest.raises(MemoryExhausted, match=r"needs about \d+ MB .* 105 MB are free within a test"):
        load(tiny_model)


@pytest.fixture(params=["shared_buffer", "growing"])
def cramped(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A model on a machine that has room for 384 tokens of its 700."""
    folder = tiny_model
    if request.param == "growing":
        folder = tmp_path / "growing"
        growing.write_growing(folder)
    manifest, num_tokens = read_manifest(folder), 384
    estimate = estimate_memory(
        replace(manifest, context_length=num_tokens), weights_bytes(ModelFolder(folder, manifest))
    )
    held = manifest.kv_cache.bytes_per_token * num_tokens * (2 if request.param == "growing" else 1)
    assert estimate.kv_cache_bytes == held
    free_bytes = estimate.host_bytes(FreeMemory(0, "a test")) + RESERVE_BYTES
    monkeypatch.setattr("edgespec.memory.estimate._LEAST_CONTEXT", 128)
    monkeypatch.setattr("edgespec.setup.wish.free_memory", lambda limit: FreeMemory(free_bytes, "a test"))
    return folder


def test_a_context_without_room_for_all_of_it_is_shorter_and_ends_answers_where_it_is_full(cramped: Path) -> None:
    said: list[str] = []
    with load(cramped, drafter="none", deterministic=True, report=said.append) as engine:
        assert (engine.context_length, engine.plain().context_length) == (384, 384)
        assert engine.manifest.context_length == 700
        answer = engine.generate("in the an")
        again = engine.generate("in the an", max_tokens=5)
        with pytest.raises(ContextOverflow, match=r"context of 384; memory was too short for the model's 700"):
            engine.generate("in the an " * 300)
    assert answer.finish_reason == "context"
    assert answer.prompt_tokens + len(answer.token_ids) == 385, "the last token is behind a full context"
    (line,) = answer.stats.downgrades
    assert re.fullmatch(r"the context is 384 of 700 tokens: \d+ MB are free within a test", line)
    assert [each for each in said if "context" in each] == [line]
    assert again.stats.downgrades == ()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgespec.setup.wish.free_memory", lambda limit: FreeMemory(1 << 40, "a test"))
        with load(cramped, drafter="none", deterministic=True) as roomy:
            assert roomy.context_length == 700
            wanted = roomy.generate("in the an").token_ids
    assert answer.token_ids == wanted[: len(answer.token_ids)]


def test_a_drafter_that_does_not_fit_is_left_out_with_figures_and_the_text_is_the_same(
    tiny_model: Path, tiny_drafter: Path, machine: Callable[[int], None]
) -> None:
    said: list[str] = []
    with load(tiny_model, drafter="none", deterministic=True) as plain:
        wanted = plain.generate("in the an", max_tokens=60).token_ids
    machine(180)
    with load(
        tiny_model, drafter=str(tiny_drafter), draft_length=3, deterministic=True, report=said.append
    ) as engine:
        assert not engine._drafting.pool.decoders
        answer = engine.generate("in the an", max_tokens=60)
        again = engine.generate("in the an", max_tokens=10)
    assert answer.token_ids == wanted
    assert answer.stats.drafter_device is None
    (line,) = answer.stats.downgrades
    figures = r"the first needs \d+ [kM]B beside the \d+ MB of the target and 101 MB in reserve, and 189 MB"
    assert re.search(r"down from .*int4 to suffix: " + figures, line)
    assert line in said
    assert again.stats.downgrades == ()


def test_the_command_ends_with_its_code_where_nothing_fits(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["chat", str(tiny_model), "--prompt", "the", "--memory", "20M"])
    assert code == MemoryExhausted.exit_code == 5
    assert re.search(
        r"too low for tiny: give at least --memory \d+M, or use a smaller .* Plain decoding takes about \d+ MB "
        r"\(weights and session \d+ MB, KV cache \d+ [kM]B, workspace \d+ [kM]B, reserve 101 MB\) "
        r"beside the [\d.]+ [MG]B that this process holds already",
        capsys.readouterr().err,
    )
    assert main(["chat", str(tiny_model), "--prompt", "the", "--memory", "much"]) == 2
    assert "such as 2G or 512M" in capsys.readouterr().err


def test_a_model_that_is_let_go_comes_back_with_the_same_text(
    tiny_model: Path, tiny_drafter: Path, machine: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.draft.memory_watch._LOOK_S", 0.0)
    monkeypatch.setattr("edgespec.draft.memory_watch._LONGEST_LOOK_S", 0.0)
    monkeypatch.setattr("edgespec.draft.memory_watch.COOLDOWN_S", 0.0)
    monkeypatch.setattr("edgespec.engine.run_ahead.MAX_AHEAD", 0)  # memory changes between two chunks
    with load(tiny_model, drafter=str(tiny_drafter), draft_length=3, deterministic=True) as engine:
        engine._drafting.pool.watch._ladder._cooldown_s = 0.0
        wanted = engine.plain().generate("in the an", max_tokens=150).token_ids
        found: list[int] = []
        models = []
        for chunk in engine.stream("in the an", max_tokens=150):
            found += chunk.token_ids
            machine(1 << 20 if len(found) < 40 or len(found) > 80 else 10)
            if loading := engine._drafting.pool.loader._load:
                wait([loading.future])
            models.append(engine._drafting.pool.has_models)
    assert tuple(found) == wanted
    assert [model for i, model in enumerate(models) if not i or model != models[i - 1]] == [True, False, True]
    assert chunk.stats is not None
    ways = [line.split()[2] for line in chunk.stats.downgrades]
    assert ways == sorted(ways)
    assert set(ways) == {"down", "up"}


@pytest.mark.parametrize(("free_mib", "wanted"), [(1 << 20, "tiny-int4"), (210, "tiny"), (180, "suffix")])
def test_of_a_cascade_the_smaller_model_drafts_alone_where_both_do_not_fit(
    tiny_model: Path, tiny_drafter: Path, machine: Callable[[int], None], free_mib: int, wanted: str
) -> None:
    machine(free_mib)
    with load(tiny_model, drafter=f"{tiny_drafter},{tiny_model}", draft_length=3, deterministic=True) as engine:
        assert engine._drafting.pool.drafter_set.name == wanted
        answer = engine.generate("in the an", max_tokens=30)
        assert answer.token_ids == engine.plain().generate("in the an", max_tokens=30).token_ids
