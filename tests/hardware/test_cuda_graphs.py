"""Passes that are recorded and replayed, on NVIDIA's provider in imitation: it keeps to what a recording has."""

import gc
import logging
import re
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, count, repeat
from pathlib import Path
from threading import Event, Thread, Timer, current_thread
from threading import enumerate as enumerate_threads

import numpy as np
import pytest
from fake_cuda import ARENA, FakeGpu, _Session, _Value
from until import until

from edgespec import SamplingParams, load
from edgespec.decoding.decoder import BEST, Pass, Rows
from edgespec.decoding.pass_queue import Caller
from edgespec.errors import Cancelled
from edgespec.export.convert import export_model
from edgespec.manifest import Manifest
from edgespec.runtimes.cuda import GATE, GRAPHS, RecordingGate
from edgespec.runtimes.cuda_graph import CudaGraphs
from edgespec.runtimes.device_checks import DeviceChecks
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.kv_caches import SharedCache
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.passes import Passes
from edgespec.system.cancel import Cancel
from edgespec.types import TokenIds

CLOSE = 0.05  # logits in half floats, in passes of other widths
PROMPT = "in the an " * 20
LONG = "in the an " * 98  # an answer to it passes the end of the first buffers


@pytest.fixture
def model(tiny_gguf: Path, tmp_path: Path) -> Path:
    export_model(tiny_gguf, tmp_path / "tiny-gpu", precision="int4", form="gpu")
    return tmp_path / "tiny-gpu"


def answer(model: Path, prompt: str = PROMPT, **how: object) -> TokenIds:
    options = {"drafter": "ngram", "draft_length": 3, "deterministic": False, **how}
    with load(model, device="cuda", **options) as engine:
        return engine.generate(prompt, max_tokens=100).token_ids


def test_decoding_replays_one_pass(gpu: FakeGpu, model: Path, manifest: Manifest) -> None:
    decoder = OnnxDecoder(model, manifest, find_device("cuda"))
    fresh = OnnxDecoder(model, manifest, find_device("cpu"))
    tokens = np.random.default_rng(0).integers(0, manifest.vocab_size, 60).astype(np.int32)
    decoder.logits(tokens[:20], 1)
    recorded, replayed = gpu.num_recorded, gpu.num_replayed
    for length in range(21, 61):
        assert np.abs(decoder.logits(tokens[:length], 3) - fresh.logits(tokens[:length], 3)).max() < CLOSE
    assert (gpu.num_recorded - recorded, gpu.num_replayed - replayed) == (0, 40)


@pytest.mark.parametrize("records", [True, False])
def test_a_text_is_told_when_its_pass_begins_and_not_while_that_is_prepared(
    gpu: FakeGpu, model: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, records: bool
) -> None:
    decoder = OnnxDecoder(model, manifest, replace(find_device("cuda"), records_passes=records))
    events = list[str]()

    def note(owner: type, name: str, event: str) -> None:
        act = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **more: (events.append(event), act(*given, **more))[1])

    note(_Value, "update_inplace", "-")
    note(Passes, "_bind_input", "-")
    note(_Session, "run_with_iobinding", "r")
    caller = Caller(on_begin=lambda: events.append("t"))
    tokens, replayed = np.arange(12, dtype=np.int32), gpu.num_replayed
    for length in range(8, 13):
        decoder.forks.serve(caller)
        decoder.logits(tokens[:length], 1)
    assert re.fullmatch("(-+tr){5}", "".join(events))
    assert (gpu.num_replayed > replayed) == records


@pytest.mark.slow
def test_an_answer_of_replays_is_that_of_plain_passes_and_leaves_nothing(gpu: FakeGpu, model: Path) -> None:
    wanted = answer(model, cuda_graph=False)
    assert (gpu.num_recorded, gpu.num_replayed) == (0, 0)
    assert answer(model) == wanted
    assert gpu.num_replayed > 20
    assert gpu.num_recorded < 12
    with load(model, device="cuda", drafter="ngram", deterministic=False) as engine:
        held = engine.stream(PROMPT, max_tokens=9)
        assert sum(len(chunk.token_ids) for chunk in held) == 9
    gc.collect()
    assert gpu.used == gpu.kept == 0, "a stream that is over holds nothing"


@pytest.mark.slow
def test_sampling_without_a_draft_copies_one_row_of_a_replay(
    gpu: FakeGpu, model: Path, manifest: Manifest
) -> None:
    decoder = OnnxDecoder(model, manifest, find_device("cuda"))
    fresh = OnnxDecoder(model, manifest, find_device("cpu"))
    tokens = np.random.default_rng(0).integers(0, manifest.vocab_size, 60).astype(np.int32)
    for length in range(20, 40):  # now and then with a draft
        decoder.logits(tokens[:length], 1 + (length % 5 == 0))
    recorded, replayed, copied = gpu.num_recorded, gpu.num_replayed, gpu.copied_bytes
    for length in range(40, 61):
        assert np.abs(decoder.logits(tokens[:length], 1) - fresh.logits(tokens[:length], 1)).max() < CLOSE
    assert (gpu.num_recorded - recorded, gpu.num_replayed - replayed) == (0, 21)
    assert gpu.copied_bytes - copied == 21 * 4 * manifest.vocab_size


@pytest.mark.slow
def test_trees_record_nothing(gpu: FakeGpu, model: Path) -> None:
    answer(model, drafter="lookahead", draft_length="auto")
    assert not any(GRAPHS in options for options in gpu.options)


def test_deterministic_mode_replays_what_has_the_bits_of_plain_passes(
    gpu: FakeGpu, model: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = np.random.default_rng(0).integers(0, manifest.vocab_size, 400).astype(np.int32)
    plain = OnnxDecoder(model, manifest, replace(find_device("cuda"), records_passes=False), deterministic=True)
    decoder = OnnxDecoder(model, manifest, find_device("cuda"), deterministic=True)
    assert not caplog.text
    replayed = gpu.num_replayed
    for length in range(381, 400):
        given = Pass(tokens[:length], num_last=2, num_prompt=380)
        assert np.array_equal(decoder.run(given).logits, plain.run(given).logits)
    assert gpu.num_replayed - replayed == 19
    # Differences that do not count elsewhere do here.
    gpu.replay_error = 1e-4
    (model / "device_checks.json").unlink()
    assert OnnxDecoder(model, manifest, find_device("cuda")).logits(tokens[:9], 1).shape == (1, decoder.vocab_size)
    assert not caplog.text
    OnnxDecoder(model, manifest, find_device("cuda"), deterministic=True)
    assert "in their last bits" in caplog.text
    known = DeviceChecks(model, manifest, find_device("cuda")).read()
    assert known
    assert known.replays == (True, False)


def test_deterministic_mode_compares_replays_in_a_cache_that_is_mostly_empty_too(
    gpu: FakeGpu,
    model: Path,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reserve = Passes.reserve

    def have_other_bits_from_now_on(passes: Passes, num_past: int, num_tokens: int) -> None:
        reserve(passes, num_past, num_tokens)
        gpu.replay_error = 1e-4 * passes.is_recording

    monkeypatch.setattr(Passes, "reserve", have_other_bits_from_now_on)
    OnnxDecoder(model, manifest, find_device("cuda"), deterministic=True)
    assert "in their last bits" in caplog.text


@pytest.mark.slow
def test_forks_have_recordings_of_their_own_in_one_thread(gpu: FakeGpu, model: Path, manifest: Manifest) -> None:
    first = OnnxDecoder(model, manifest, find_device("cuda"))
    decoders = [first, first.fork(), first.fork()]
    fresh = OnnxDecoder(model, manifest, find_device("cpu"))
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, manifest.vocab_size, 600).astype(np.int32) for _ in decoders]
    lengths = [40, 100, 30]
    before = gpu.num_replayed
    for _ in range(100):
        each = int(rng.integers(0, 3))
        lengths[each] += int(rng.integers(1, 8))
        text = texts[each][: lengths[each]]
        num_last = int(rng.integers(1, 4))
        made: list[np.ndarray] = []
        thread = Thread(target=lambda: made.append(decoders[each].logits(text, num_last)))  # noqa: B023
        thread.start()
        thread.join()
        expected = fresh.logits(text, num_last)
        assert np.abs(made[0] - expected).max() < CLOSE
        best = decoders[each].run(Pass(text, num_last=num_last, wants=BEST)).best
        assert best is not None
        assert best.ids.shape == (num_last,)
        if rng.random() < 0.1:
            other = (each + 1) % 3
            decoders[each].exchange(decoders[other])
            texts[each], texts[other] = texts[other], texts[each]
            lengths[each], lengths[other] = lengths[other], lengths[each]
        if rng.random() < 0.05:
            decoders[each].forget()
    assert gpu.num_replayed - before > 60


def test_what_a_cache_takes_and_gives_back_makes_recordings_of_others_anew(
    gpu: FakeGpu, model: Path, manifest: Manifest
) -> None:
    first, fresh = (OnnxDecoder(model, manifest, find_device(name)) for name in ("cuda", "cpu"))
    other = first.fork()
    tokens = np.random.default_rng(0).integers(0, manifest.vocab_size, 700).astype(np.int32)
    for decoder in (first, other):
        for length in (20, 21, 22):
            decoder.logits(tokens[:length], 2)

    def counts(decoder: OnnxDecoder, length: int) -> tuple[int, int]:
        recorded, replayed = gpu.num_recorded, gpu.num_replayed
        assert np.abs(decoder.logits(tokens[:length], 2) - fresh.logits(tokens[:length], 2)).max() < CLOSE
        return gpu.num_recorded - recorded, gpu.num_replayed - replayed

    assert counts(first, 23) == (1, 0), "the other has taken a cache"
    assert (counts(other, 23), counts(first, 24), counts(other, 24)) == ((0, 1),) * 3
    assert counts(first, 600) == (0, 0), "in memory that is the workspace of the other's recording"
    assert counts(other, 25) == (1, 0)
    assert counts(first, 601) == (0, 0), "gives back what it has let go"
    assert counts(other, 26) == (1, 0)
    assert counts(first, 602) == (1, 0)
    first.exchange(other)
    assert counts(first, 27) == (0, 1), "arrays that a recording has of its own make no other too old"
    assert counts(other, 603) == (0, 1)


def test_layers_that_grew_before_memory_was_refused_are_recorded_with_the_others(
    gpu: FakeGpu, model: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = OnnxDecoder(model, manifest, find_device("cuda"))
    fresh = OnnxDecoder(model, manifest, find_device("cpu"))
    tokens = np.random.default_rng(0).integers(0, manifest.vocab_size, 520).astype(np.int32)
    decoder.logits(tokens[:100], 2)
    gpu.arrays = chain(
        repeat(None, 2), [ARENA.format(0, 8)], repeat(None)
    )  # keys and values of one layer are taken
    replayed = gpu.num_replayed
    for length in range(500, 521):
        assert np.abs(decoder.logits(tokens[:length], 2) - fresh.logits(tokens[:length], 2)).max() < CLOSE
    cache = decoder._passes.cache
    assert isinstance(cache, SharedCache)
    assert len({buffer.shape()[2] for buffer in cache.buffers}) == 2
    assert gpu.num_replayed - replayed > 15
    assert "does not replay" not in caplog.text


@pytest.mark.slow
def test_replays_that_differ_are_off_and_stay_off(
    gpu: FakeGpu, model: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.replay_error = 1.0
    wanted = answer(model, cuda_graph=False)
    assert answer(model) == wanted
    assert "a replay gave other rows than a plain pass" in caplog.text
    assert gpu.options[-1].get(GRAPHS) is None, "opened anew without the option"
    num_opened = len(gpu.options)
    assert answer(model) == wanted
    assert not any(GRAPHS in options for options in gpu.options[num_opened:]), "as the saved check says"
    known = DeviceChecks(model, manifest, find_device("cuda")).read()
    assert known
    assert known.replays == (False, None)


def test_a_later_recording_that_differs_is_the_last_one(
    gpu: FakeGpu, model: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    decoder, fresh = (OnnxDecoder(model, manifest, find_device(name)) for name in ("cuda", "cpu"))
    tokens = np.random.default_rng(0).integers(0, manifest.vocab_size, 30).astype(np.int32)
    gpu.replay_error = 1.0
    decoder.forget()
    for length in range(20, 31):
        assert np.abs(decoder.logits(tokens[:length], 2) - fresh.logits(tokens[:length], 2)).max() < CLOSE
    assert caplog.text.count("a replay gave other rows than a plain pass") == 1


def test_a_session_records_no_more_than_it_may_hold(
    gpu: FakeGpu,
    model: Path,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    decoder, fresh = (OnnxDecoder(model, manifest, find_device(name)) for name in ("cuda", "cpu"))
    tokens = np.random.default_rng(0).integers(0, manifest.vocab_size, 30).astype(np.int32)
    monkeypatch.setattr("edgespec.runtimes.cuda_graph._MOST", gpu.num_recorded + 1)
    for _ in range(3):
        decoder.forget()
        for length in range(20, 24):
            assert np.abs(decoder.logits(tokens[:length], 2) - fresh.logits(tokens[:length], 2)).max() < CLOSE
    assert caplog.text.count("were recorded, as many as a session may hold") == 1


class Interrupted(Future[None]):
    """Whoever waits for it is interrupted."""

    def result(self, timeout: float | None = None) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_waits_for_the_pass_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, doing, is_over = CudaGraphs(None, find_device("cpu")), Interrupted(), list[bool]()

    def end() -> None:
        is_over.append(True)
        doing.set_result(None)

    monkeypatch.setattr(graphs._pool, "submit", lambda act: (Timer(0.02, end).start(), doing)[1])
    with pytest.raises(KeyboardInterrupt):
        graphs.run(lambda: None)
    assert is_over


def test_a_recording_that_chooses_other_tokens_than_a_plain_pass_is_not_replayed(
    gpu: FakeGpu, model: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = OnnxDecoder(model, manifest, find_device("cuda"))
    tokens = np.random.default_rng(0).integers(0, manifest.vocab_size, 610).astype(np.int32)
    assert manifest.signature.best
    gpu.replay_output, gpu.replay_error = manifest.signature.best, 9.0
    decoder.logits(tokens[:600], 1)  # in a longer cache, for which a recording is made anew
    for length in range(601, 606):
        best = decoder.run(Pass(tokens[:length], num_last=2, wants=BEST)).best
        assert best
        assert np.array_equal(best.ids, decoder.logits(tokens[:length], 2).argmax(1))
    assert "a replay gave other rows than a plain pass" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize(
    "said",
    [
        "CUDA failure 901: operation failed due to a previous error during capture",
        "CUDA failure 2: out of memory ; GPU=0 ; expr=cudaGraphInstantiate(&graph_exec, graph_)",
    ],
)
def test_a_recording_that_fails_ends_recording_and_not_the_answer(
    num_before: int, said: str, gpu: FakeGpu, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = answer(model, LONG, cuda_graph=False)
    if num_before:  # the check is saved then, and one fails while an answer is made
        answer(model)
    gpu.recordings = iter([None] * num_before + [said] * 99)
    with caplog.at_level(logging.WARNING):
        assert answer(model, LONG) == wanted
    assert "recording one failed" in caplog.text
    assert said in caplog.text


@pytest.mark.slow
def test_a_card_without_memory_for_what_a_recording_holds_goes_on_with_plain_passes(
    gpu: FakeGpu, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted, num_arrays = answer(model, LONG, cuda_graph=False), count()
    answer(model)
    gpu.arrays = (None for _ in num_arrays)
    assert answer(model, LONG) == wanted
    num_last = next(num_arrays) - 1  # the last one is an output of the recording in the longer cache
    gpu.arrays = chain(repeat(None, num_last - 1), repeat(ARENA.format(0, 8)))
    assert answer(model, LONG) == wanted
    assert "recording one failed" in caplog.text
    gc.collect()
    assert gpu.used == gpu.kept == 0


@pytest.mark.slow
def test_a_library_that_refuses_the_option_opens_without_it(gpu: FakeGpu, model: Path) -> None:
    wanted = answer(model, cuda_graph=False)
    gpu.loads = iter(["This session cannot use the graph capture feature as requested by the user"])
    assert answer(model) == wanted
    assert gpu.num_recorded == 0


def test_answers_go_on_and_end_while_another_model_is_opened(
    gpu: FakeGpu, model: Path, manifest: Manifest
) -> None:
    begins, goes_on = Event(), Event()

    def wait_in_opening() -> None:
        begins.set()
        assert goes_on.wait(60)

    with load(model, device="cuda", drafter="none", deterministic=False) as engine, ThreadPoolExecutor() as pool:
        gpu.loads = (wait_in_opening() for _ in range(1))
        opening = pool.submit(OnnxDecoder, model, manifest, find_device("cuda"))
        assert begins.wait(60)
        try:
            num_recorded = gpu.num_recorded
            wanted = engine.generate(LONG, max_tokens=20).token_ids
            with engine.stream(LONG, max_tokens=500) as stream:
                assert next(stream).token_ids == wanted[:1]
            assert gpu.num_recorded == num_recorded
        finally:
            goes_on.set()
        assert opening.result().can.widths == engine.target.can.widths
        num_recorded = gpu.num_recorded
        assert engine.generate(LONG, max_tokens=20).token_ids == wanted
        assert gpu.num_recorded == num_recorded + 1, "the cache has grown since the last one"


def test_a_check_of_replays_waits_for_another_opening_unless_it_is_cancelled(
    gpu: FakeGpu, model: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancel, wait = Cancel(), Passes.wait_for_openings

    def wait_and_be_cancelled(passes: Passes) -> None:
        Timer(0.05, cancel.set).start()
        wait(passes)

    monkeypatch.setattr(Passes, "wait_for_openings", wait_and_be_cancelled)
    with GATE.opening(), pytest.raises(Cancelled):
        OnnxDecoder(model, manifest, find_device("cuda"), cancel=cancel)
    assert gpu.num_recorded == 0
    known = DeviceChecks(model, manifest, find_device("cuda")).read()
    assert known
    assert known.replays == (None, None)


def test_a_check_of_replays_beside_an_opening_is_made_again(
    gpu: FakeGpu, model: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    openings, found, wait = [GATE.opening()], list[int](), Passes.wait_for_openings

    def wait_and_open(passes: Passes) -> None:
        found.append(gpu.num_recorded)
        if len(found) == 2:
            openings[0].__exit__(None, None, None)
        wait(passes)
        if len(found) == 1:
            openings[0].__enter__()

    monkeypatch.setattr(Passes, "wait_for_openings", wait_and_open)
    OnnxDecoder(model, manifest, find_device("cuda"))
    assert found == [0, 0]
    assert gpu.num_recorded


def test_a_recording_has_its_turn_among_passes_that_overlap_and_makes_none_wait_for_an_opening() -> None:
    gate, entered = RecordingGate(), list[str]()

    def enter(name: str, hold: Event) -> None:
        with gate.recording() if name == "recording" else gate as is_alone:
            entered.append(name if is_alone is not False else "put off")
            assert hold.wait(60)

    def begin(name: str) -> tuple[Thread, Event]:
        hold = Event()
        thread = Thread(target=enter, args=(name, hold))
        thread.start()
        return thread, hold

    first = begin("pass")
    until(lambda: entered == ["pass"])
    recording = begin("recording")
    until(lambda: gate._num_recorders == 1)
    second = begin("pass")
    first[1].set()
    until(lambda: len(entered) == 2)
    recording[1].set()
    until(lambda: len(entered) == 3)
    assert entered == ["pass", "recording", "pass"]
    waiting = begin("recording")  # for the second pass
    until(lambda: gate._num_recorders == 1)
    with gate.opening():
        until(lambda: len(entered) == 4)
        assert entered[3] == "put off"
    for thread, hold in (second, waiting, first, recording):
        hold.set()
        thread.join()
    alone = begin("recording")  # everybody has left
    until(lambda: len(entered) == 5)

    def open_session() -> None:
        with gate.opening():
            entered.append("opening beside a recording" if gate._is_recording else "opening")

    opening = Thread(target=open_session)
    opening.start()
    until(lambda: gate._num_openings == 1)
    alone[1].set()
    for thread in (alone[0], opening):
        thread.join()
    assert entered[4:] == ["recording", "opening"]


def test_a_session_that_was_asked_not_to_is_opened_as_before(
    gpu: FakeGpu, model: Path, manifest: Manifest
) -> None:
    decoder = OnnxDecoder(model, manifest, replace(find_device("cuda"), records_passes=False))
    assert decoder.logits(np.arange(5, dtype=np.int32), 1).shape == (1, manifest.vocab_size)
    assert not any(GRAPHS in options for options in gpu.options)


@pytest.mark.slow
def test_plain_passes_of_an_answer_run_ahead_in_one_thread_and_end_with_it(
    gpu: FakeGpu, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, threads, run = answer(model), list[str](), OnnxDecoder.run

    def noted(self: OnnxDecoder, given: Pass) -> Rows:
        if given.wants is BEST:
            threads.append(current_thread().name)
        return run(self, given)

    monkeypatch.setattr(OnnxDecoder, "run", noted)
    with load(model, device="cuda", drafter="none", deterministic=False) as engine:
        found = engine.generate(PROMPT, max_tokens=100)
        assert found.token_ids == wanted
        assert len(threads) == found.stats.passes == 100, "none runs behind the last token"
        assert len(set(threads[1:]) - {threads[0]}) == 1
        assert set(threads[1:]) != {threads[0]}
        del threads[:]
        sampled = engine.generate(PROMPT, max_tokens=8, sampling=SamplingParams(temperature=0.8))
        assert len(sampled.token_ids) == 8
        assert threads == []
        again = engine.generate(PROMPT, max_tokens=100, stop=[found.text[20:24]])
        assert found.text.startswith(again.text)
        assert engine.generate(PROMPT, max_tokens=100).token_ids == wanted
    assert not [each for each in enumerate_threads() if each.name.startswith("edgespec pass")]
