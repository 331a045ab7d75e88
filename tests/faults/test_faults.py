"""Faults while an answer is made: what the user sees, that no token changes, and that the next answer is right.

docs/faults.md says of each fault which tests provoke it; here are those that belong to no module's own tests.
"""

import gc
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import onnxruntime
import psutil
import pytest
import tiny
from faulty import SCHEDULES, drafted_engine, edit_graph, lanes_alive, plain_engine, poisoned
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from edgespec import Chunk, DeviceUnavailable, EdgeSpecError, Engine, Message, SamplingParams, load
from edgespec.decoding.acceptance import equality
from edgespec.decoding.rejection import rejection
from edgespec.decoding.sampling import GumbelSampler
from edgespec.drafters.suffix import SuffixDrafter
from edgespec.export.convert import export_model
from edgespec.manifest import Manifest, read_manifest
from edgespec.runtimes.devices import Device, find_device
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.table import TableDecoder
from edgespec.tokenization.tokenizer import Tokenizer
from edgespec.types import Acceptance, DraftRequest, Logits, TokenIds, append

pytestmark = pytest.mark.slow  # a module of many models or processes

HOT = SamplingParams(temperature=0.8, seed=11)
PROMPT = "the in the an"


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 5
    while lanes_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lanes_alive() == []


@pytest.fixture(scope="module")
def manifest(tiny_model: Path) -> Manifest:
    return read_manifest(tiny_model)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model / "tokenizer.json")


def joined(chunks: list[Chunk]) -> tuple[int, ...]:
    return tuple(token for chunk in chunks for token in chunk.token_ids)


# F9: logits that are no numbers, from real graphs


def first_new(token_ids: tuple[int, ...], prompt: TokenIds) -> int:
    """Where an answer first has a token that neither its prompt nor its first three have."""
    seen = {*map(int, prompt), *token_ids[:3]}
    return next(i for i, token in enumerate(token_ids) if token not in seen)


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_target_without_numbers_is_an_error_and_the_next_answer_is_right(
    tiny_model: Path, tmp_path: Path, kind: str
) -> None:
    with load(tiny_model, drafter="none", deterministic=False) as sound:
        whole = sound.generate(PROMPT, sampling=HOT, max_tokens=30).token_ids
        at = first_new(whole, sound.encode(PROMPT))
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    edit_graph(folder, poisoned(kind, whole[at]))
    with load(folder, drafter="none", deterministic=False) as engine:
        stream, shown = engine.stream(PROMPT, sampling=HOT, max_tokens=30), list[Chunk]()
        with pytest.raises(EdgeSpecError, match="its weights or the run are damaged"):
            shown.extend(stream)
        assert joined(shown) == whole[: at + 1], "all that was sound is shown"
        assert list(stream) == []
        assert engine.generate(PROMPT, sampling=HOT, max_tokens=at).token_ids == whole[:at]


@pytest.mark.parametrize(("kind", "schedule"), [("nan", "serial"), ("inf", "pipelined")])
def test_drafter_without_numbers_is_parked_and_no_token_changes(
    tiny_model: Path, tiny_drafter: Path, tmp_path: Path, kind: str, schedule: str
) -> None:
    with load(tiny_model, drafter="none", deterministic=False) as sound:
        whole = sound.generate(PROMPT, sampling=HOT, max_tokens=30).token_ids
        at = first_new(whole, sound.encode(PROMPT))
    folder = Path(shutil.copytree(tiny_drafter, tmp_path / "poisoned"))
    edit_graph(folder, poisoned(kind, whole[at]))
    said: list[str] = []
    with load(
        tiny_model,
        drafter=str(folder),
        draft_length=3,
        schedule=schedule,
        deterministic=True,
        report=said.append,
    ) as engine:
        answer = engine.generate(PROMPT, sampling=HOT, max_tokens=30)
        again = engine.generate(PROMPT, sampling=HOT, max_tokens=30)
        assert not engine.speculation.name.count("poisoned")
    assert answer.token_ids == again.token_ids == whole
    assert answer.stats.num_drafted > 0 == again.stats.num_drafted
    (line,) = answer.stats.downgrades
    assert "drafts no more in this session" in line
    assert "damaged" in line
    assert line in said


# F10: where answers end, whatever was drafted beyond


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([0.0, 0.8]),
    likeness=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    schedule=st.sampled_from(SCHEDULES),
    length=st.sampled_from([None, 1, 2, 4, 9]),
    max_tokens=st.integers(1, 20),
    end_tokens=st.lists(st.integers(0, 19), max_size=3),
    stop=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 4)), max_size=2),
)
def test_answers_end_where_plain_decoding_ends_them(
    manifest: Manifest,
    tokenizer: Tokenizer,
    seed: int,
    temperature: float,
    likeness: float,
    schedule: str,
    length: int | None,
    max_tokens: int,
    end_tokens: list[int],
    stop: list[tuple[int, int]],
) -> None:
    """End tokens, stop strings and counts fall into drafts, behind them and between them."""
    params = SamplingParams(temperature=temperature, seed=seed)
    table = TableDecoder(tiny.VOCAB, seed, context_length=200)
    endless = replace(manifest, eos_token_ids=())
    whole = plain_engine(endless, tokenizer, table).generate(PROMPT, sampling=params, max_tokens=20)
    # Those that the answer comes to, so that they matter.
    ends = tuple({whole.token_ids[i] for i in end_tokens})
    strings = [whole.text[start : start + size] for start, size in stop]
    stated = replace(manifest, eos_token_ids=ends)
    wanted = plain_engine(stated, tokenizer, table).generate(
        PROMPT, sampling=params, max_tokens=max_tokens, stop=[text for text in strings if text]
    )
    drafter = TableDecoder(tiny.VOCAB, seed + 1, table, likeness)
    with drafted_engine(stated, tokenizer, table, drafter, length=length, schedule=schedule) as engine:
        chunks = list(
            engine.stream(PROMPT, sampling=params, max_tokens=max_tokens, stop=[text for text in strings if text])
        )
    text, last = "".join(chunk.text for chunk in chunks), chunks[-1]
    assert (text, joined(chunks), last.finish_reason) == (wanted.text, wanted.token_ids, wanted.finish_reason)
    assert joined(chunks) == whole.token_ids[: len(joined(chunks))]
    assert last.stats is not None
    assert last.stats.num_emitted == len(joined(chunks)) == sum(len(chunk.origins) for chunk in chunks)
    assert last.stats.num_accepted <= last.stats.num_drafted
    assert last.stats.passes <= max(1, wanted.stats.passes)


# F11, F13: any history of an engine on real graphs


class Sessions(RuleBasedStateMachine):
    """An engine with a drafter, after each step compared with one that holds nothing and drafts nothing."""

    def __init__(self, engine: Engine, oracle: Engine, drafter: OnnxDecoder, compared: list[int]) -> None:
        super().__init__()
        self.engine, self.oracle, self.compared = engine, oracle, compared
        (drafting,) = engine._pool.decoders.values()
        # What runs trees has tests of its own (test_tree.py).
        self.pairs = [
            (engine.target, oracle.target),
            *([(drafting, drafter)] if type(drafting) is OnnxDecoder else []),
        ]
        self.messages: list[Message] = []

    @rule(seed=st.integers(0, 3), max_tokens=st.integers(1, 14), words=st.sampled_from(["the in", "an on", "re"]))
    def generate(self, seed: int, max_tokens: int, words: str) -> None:
        """Say something more, or begin anew when there is much."""
        if len(self.messages) > 6:
            self.messages = []
        self.messages.append(Message("user", words))
        self.messages.append(Message("assistant", self.answered(seed, max_tokens)))

    @precondition(lambda self: self.messages)
    @rule(seed=st.integers(0, 3))
    def retry(self, seed: int) -> None:
        """Back to before the last answer."""
        self.messages[-1] = Message("assistant", self.answered(seed, 9, self.messages[:-1]))

    @precondition(lambda self: len(self.messages) > 2)
    @rule()
    def undo(self) -> None:
        self.messages = self.messages[:-2]

    @precondition(lambda self: self.messages)
    @rule(num_chunks=st.integers(0, 4))
    def leave(self, num_chunks: int) -> None:
        """A reader who goes in the midst."""
        with self.engine.stream(self.messages[:-1], sampling=HOT, max_tokens=20) as stream:
            list(islice(stream, num_chunks))

    @precondition(lambda self: self.messages)
    @rule(delay_ms=st.floats(0, 12), seed=st.integers(0, 3))
    def cancel(self, delay_ms: float, seed: int) -> None:
        """Another thread ends it, within whatever it does by then."""
        sampling = replace(HOT, seed=seed)
        stream = self.engine.stream(self.messages[:-1], sampling=sampling, max_tokens=30)
        timer = threading.Timer(delay_ms / 1e3, stream.cancel)
        timer.start()
        chunks = list(stream)
        timer.join()
        assert chunks[-1].finish_reason in ("cancelled", "length", "stop")
        whole = self.oracle.generate(self.messages[:-1], sampling=sampling, max_tokens=30).token_ids
        assert joined(chunks) == whole[: len(joined(chunks))]
        self.compared.append(len(chunks))

    def answered(self, seed: int, max_tokens: int, messages: list[Message] | None = None) -> str:
        messages = self.messages if messages is None else messages
        sampling = replace(HOT, seed=seed)
        answer = self.engine.generate(messages, sampling=sampling, max_tokens=max_tokens)
        wanted = self.oracle.generate(messages, sampling=sampling, max_tokens=max_tokens)
        assert (answer.token_ids, answer.text) == (wanted.token_ids, wanted.text)
        self.compared.append(len(answer.token_ids))
        return answer.text

    @invariant()
    def caches_hold_what_they_say(self) -> None:
        """Asked behind what it holds, each decoder gives what it gives after reading all of it anew."""
        for decoder, other in self.pairs:
            assert isinstance(decoder, OnnxDecoder)
            assert isinstance(other, OnnxDecoder)
            if len(held := decoder.held_tokens):
                found = decoder.logits(held, 1).copy()
                other.forget()
                assert np.abs(found - other.logits(held, 1)).max() < 1e-3


@pytest.fixture(scope="module")
def near_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Often of one mind with the tiny model, and no coarser, so that no rounding hides a wrong cache."""
    place = tmp_path_factory.mktemp("near")
    weights, others = tiny.random_weights(), tiny.random_weights(1)
    tiny.write_gguf(place / "near.gguf", {name: weights[name] + 0.1 * others[name] for name in weights})
    export_model(place / "near.gguf", place / "near", precision="fp32")
    return place / "near"


def walk(target: Path, drafter: Path, schedule: str, examples: int, steps: int) -> int:
    """Compare over random histories; how many tokens and pieces."""
    compared: list[int] = []
    fresh = OnnxDecoder(drafter, read_manifest(drafter), find_device("cpu"), num_threads=1)
    with (
        load(target, drafter="none", deterministic=True, num_threads=1) as oracle,
        load(
            target,
            drafter=str(drafter),
            draft_length=3,
            schedule=schedule,
            deterministic=True,
            num_threads=1,
        ) as engine,
    ):
        run_state_machine_as_test(
            partial(Sessions, engine, oracle, fresh, compared),  # type: ignore[arg-type]
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            ),
        )
    return sum(compared)


def test_engine_says_the_same_after_any_history(tiny_model: Path, near_model: Path) -> None:
    assert walk(tiny_model, near_model, "pipelined", 2, 8) > 20


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_engine_says_the_same_after_long_histories(tiny_model: Path, near_model: Path, schedule: str) -> None:
    assert walk(tiny_model, near_model, schedule, 12, 20) > 300


# F14: many answers and engines that come and go


def taken() -> tuple[int, int, int]:
    """Threads, files and bytes of this process."""
    process = psutil.Process()
    return process.num_threads(), process.num_fds(), process.memory_info().rss


@pytest.mark.slow
def test_a_thousand_answers_that_are_left_leave_nothing(tiny_model: Path, tiny_drafter: Path) -> None:
    moments = random.Random(5)
    with load(tiny_model, drafter=str(tiny_drafter), schedule="pipelined", deterministic=True) as engine:
        whole = engine.generate(PROMPT, sampling=HOT, max_tokens=20).token_ids
        before = taken()
        for i in range(1000):
            stream = engine.stream(PROMPT, sampling=replace(HOT, seed=i), max_tokens=20)
            list(islice(stream, moments.randrange(5)))
            (stream.close, stream.cancel, list)[i % 3](*([stream] if i % 3 == 2 else []))
            del stream
            if i == 200:  # pools of the allocator are filled by now
                before = taken()
        gc.collect()
        after = taken()
        assert after[0] <= before[0] + 1, "threads"
        assert after[1] <= before[1], "files"
        assert after[2] - before[2] < 16 << 20, "bytes"
        assert engine.generate(PROMPT, sampling=HOT, max_tokens=20).token_ids == whole


@pytest.mark.slow
def test_engines_that_come_and_go_leave_nothing(tiny_model: Path, tiny_drafter: Path) -> None:
    before, texts = taken(), set()
    for i in range(40):
        with load(tiny_model, drafter=str(tiny_drafter), draft_length=2, deterministic=True) as engine:
            texts.add(engine.generate(PROMPT, sampling=HOT, max_tokens=8).text)
        del engine
        if i == 9:
            gc.collect()
            before = taken()
    gc.collect()
    after = taken()
    assert len(texts) == 1
    assert after[0] <= before[0]
    assert after[1] <= before[1]
    assert after[2] - before[2] < 32 << 20


# F16: a seed repeats its text, also when an answer before it was ended in the midst


@pytest.mark.parametrize(
    # What is drafted ahead hangs on time, and with it what rejection keeps.
    ("schedule", "rule"),
    [*((schedule, equality) for schedule in SCHEDULES), ("serial", rejection)],
)
def test_a_seed_repeats_its_text_after_an_interrupted_round(
    manifest: Manifest, tokenizer: Tokenizer, schedule: str, rule: Acceptance
) -> None:
    table = TableDecoder(tiny.VOCAB, 3, context_length=400)
    near = TableDecoder(tiny.VOCAB, 4, table)
    with drafted_engine(manifest, tokenizer, table, near, schedule=schedule, accept=rule) as engine:
        whole = engine.generate(PROMPT, sampling=HOT, max_tokens=40)
        assert whole.stats.num_accepted > 0
        for num_chunks in (0, 1, 3):
            stream = engine.stream(PROMPT, sampling=HOT, max_tokens=40)
            cut = joined(list(islice(stream, num_chunks)))
            stream.close()
            again = engine.generate(PROMPT, sampling=HOT, max_tokens=40)
            assert again.token_ids == whole.token_ids
            assert cut == whole.token_ids[: len(cut)]


# F19: what drafts from the text, after a text that went back


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 30), st.lists(st.integers(0, 3), min_size=1, max_size=9)), min_size=2, max_size=8
    )
)
def test_what_was_taken_back_leaves_no_trace_in_what_is_drafted_from_the_text(
    steps: list[tuple[int, list[int]]],
) -> None:
    """Texts that are each cut back by some tokens and go on otherwise, as in a cascade or a new answer."""
    tokens, sampler = np.zeros(0, np.int32), GumbelSampler(SamplingParams())
    kept = SuffixDrafter()
    for num_back, more in steps:
        tokens = append(tokens[: max(0, len(tokens) - num_back)], more)
        draft, fresh = (each.draft(tokens, DraftRequest(6), sampler) for each in (kept, SuffixDrafter()))
        assert (draft.tokens.tolist(), draft.buckets) == (fresh.tokens.tolist(), fresh.buckets)
        assert set(draft.tokens.tolist()) <= set(tokens.tolist())


# F21: whoever reads an answer fails, or leaves


class Left(Exception):
    pass


@pytest.mark.parametrize("is_closed", [True, False], ids=["with", "without"])
def test_a_reader_that_raises_ends_its_answer_and_has_its_error_once(
    manifest: Manifest, tokenizer: Tokenizer, is_closed: bool
) -> None:
    table = TableDecoder(tiny.VOCAB, 3, context_length=400)
    with drafted_engine(
        manifest, tokenizer, table, TableDecoder(tiny.VOCAB, 4, table), schedule="pipelined"
    ) as engine:
        whole = engine.generate(PROMPT, sampling=HOT, max_tokens=30).token_ids

        def read() -> None:
            stream = engine.stream(PROMPT, sampling=HOT, max_tokens=300)
            if is_closed:
                with stream:
                    for _ in stream:
                        raise Left
            for _ in stream:
                raise Left

        with pytest.raises(Left) as raised:
            read()
        assert raised.value.__context__ is None
        del raised
        gc.collect()
        assert engine._queue._holder is None
        fed = table.num_fed
        time.sleep(0.02)
        assert table.num_fed == fed, "nobody goes on with it"
        assert engine.generate(PROMPT, sampling=HOT, max_tokens=30).token_ids == whole


class Broken(TableDecoder):
    """Fails from its sixth pass on."""

    __slots__ = ("num_passes",)

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        self.num_passes = getattr(self, "num_passes", 0) + 1
        if self.num_passes > 5:
            raise RuntimeError("the device was lost")
        return super().logits(tokens, num_last)


def test_a_report_that_raises_reaches_the_reader_once(manifest: Manifest, tokenizer: Tokenizer) -> None:
    """It is told of a parked drafter at the end of an answer; by then all of that is with its reader."""
    told: list[str] = []

    def report(line: str) -> None:
        told.append(line)
        raise Left

    table = TableDecoder(tiny.VOCAB, 3, context_length=400)
    wanted = plain_engine(manifest, tokenizer, table).generate(PROMPT, sampling=HOT, max_tokens=30).token_ids
    with drafted_engine(manifest, tokenizer, table, Broken(tiny.VOCAB, 4, table), report=report) as engine:
        with pytest.raises(Left):
            engine.generate(PROMPT, sampling=HOT, max_tokens=30)
        assert len(told) == 1
        assert "the device was lost" in told[0]
        assert engine.generate(PROMPT, sampling=HOT, max_tokens=30).token_ids == wanted
    assert len(told) == 1


# F26: drafters that change between answers


def test_what_changes_between_answers_is_reported_as_the_next_one_begins(
    manifest: Manifest, tokenizer: Tokenizer
) -> None:
    table, told = TableDecoder(tiny.VOCAB, 3, context_length=400), list[str]()
    drafter = TableDecoder(tiny.VOCAB, 4, table)
    with drafted_engine(manifest, tokenizer, table, drafter, report=told.append) as engine:
        wanted = engine.generate(PROMPT, sampling=HOT, max_tokens=30).token_ids
        engine._pool.changes.add("drafting steps down")  # as the thread that looks between answers does
        assert told == [], "a user may be typing"
        with engine.stream(PROMPT, sampling=HOT, max_tokens=30) as answer:
            assert told == ["drafting steps down"], "before its first chunk"
            chunks = list(answer)
        assert told == ["drafting steps down"]
        assert chunks[-1].stats is not None
        assert chunks[-1].stats.downgrades == ("drafting steps down",)
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == wanted


# F22: forks


FORKED = """
import os, sys
from edgespec import EdgeSpecError, load

engine = load(sys.argv[1], drafter=sys.argv[2], draft_length=2, schedule="pipelined", num_threads=2)
whole = engine.generate("the in", max_tokens=12).token_ids
stream = engine.stream("the in", max_tokens=12)
made = [next(stream)]
conversation = engine.chat()
child = os.fork()
if child == 0:
    refused = 0
    for ask in (
        lambda: engine.generate("the in", max_tokens=3),
        lambda: next(stream),
        lambda: engine.plain().generate("the in"),
        lambda: conversation.say("the in"),
        lambda: engine.count("the in"),
    ):
        try:
            ask()
        except EdgeSpecError as error:
            refused += "of which this one is a fork" in str(error) and "'spawn'" in str(error)
    with load(sys.argv[1], drafter="none") as own:
        refused += own.generate("the in", max_tokens=12).token_ids == whole
    engine.close()
    sys.exit(refused)
_, status = os.waitpid(child, 0)
made += stream
assert tuple(token for chunk in made for token in chunk.token_ids) == whole
assert engine.generate("the in", max_tokens=12).token_ids == whole
engine.close()
print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork, which Windows lacks")
def test_a_fork_is_told_to_load_its_own_and_its_parent_goes_on(tiny_model: Path, tiny_drafter: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED, str(tiny_model), str(tiny_drafter)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("6\n", "", 0)


# F23: signals while a model is loaded, and while it answers

BUSY = {
    "import": """
class Slow:
    def find_spec(self, name, *arguments):
        if name == "edgespec.cli.chat":
            print("busy", flush=True); time.sleep(60)
sys.meta_path.insert(0, Slow())
""",
    "load": """
import edgespec.runtimes.session as session
def hang(graph, device, cancel, **options):
    print("busy", flush=True)
    while not cancel.is_set: time.sleep(0.01)
    cancel.require_unset()
session.load_graph = hang
""",
    "template": """
import edgespec.tokenization.template_process as template
def hang(*arguments): print("busy", flush=True); time.sleep(60)
template._ask = hang
""",
    "answer": """
import edgespec.runtimes.passes as passes
run = passes.Passes.run
def slow(self, *arguments, **named):
    print("busy", flush=True); time.sleep(0.3)
    return run(self, *arguments, **named)
passes.Passes.run = slow
""",
    "check": """
import edgespec.loading.open_model as open_model, edgespec.runtimes.passes as passes
from edgespec.runtimes.devices import Device, find_device
init, run = passes.Passes.__init__, passes.Passes.run
def on_cpu(self, graph, manifest, device, **options):
    init(self, graph, manifest, find_device("cpu"), **options)
def hang(self, *arguments, **named):
    print("busy", flush=True)
    while not self._options.terminate: time.sleep(0.01)
    return run(self, *arguments, **named)
passes.Passes.__init__, passes.Passes.run = on_cpu, hang
decoder = open_model.OnnxDecoder
gpu = Device("gpu", "GpuExecutionProvider", "gpu")
open_model._decoder_class = lambda *given, **named: lambda folder, manifest, device, **options: decoder(
    folder, manifest, gpu, **options)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
@pytest.mark.parametrize("moment", BUSY)
def test_a_signal_ends_the_command_with_its_code(
    tiny_model: Path, tmp_path: Path, number: str, code: int, moment: str
) -> None:
    import signal

    # A shell's background jobs ignore Ctrl-C, and with them this test.
    heeded = "import signal, sys, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{heeded}\n{BUSY[moment]}\nfrom edgespec.__main__ import main\nsys.exit(main())"
    command = ["chat", str(tiny_model), "--prompt", "the", "--max-tokens", "600", "--drafter", "none"]
    with subprocess.Popen(
        [sys.executable, "-c", program, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "EDGESPEC_HOME": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline() != b"busy\n":
            assert process.poll() is None
        inner = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(getattr(signal, number))
        started = time.monotonic()
        try:
            _, error = process.communicate(timeout=30)
        finally:
            process.kill()
    # Before the command is there, other signals than Ctrl-C end Python itself.
    assert process.returncode in ((code, 128 - code) if moment == "import" else (code,))
    assert time.monotonic() - started < 5
    assert b"Traceback" not in error
    _, alive = psutil.wait_procs(inner, timeout=5)
    assert alive == []


# F25: a provider that was asked for and does not run the model


def test_a_session_that_silently_runs_elsewhere_is_refused(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime opens the model on the CPU, and says that all is as it was asked for."""
    real = onnxruntime.InferenceSession

    def lying(path: str, options: object, **how: object) -> object:
        session = real(path, options, providers=["CPUExecutionProvider"])
        session.get_providers = lambda: ["WebGpuExecutionProvider", "CPUExecutionProvider"]
        return session

    monkeypatch.setattr(onnxruntime, "InferenceSession", lying)
    manifest = read_manifest(tiny_model)
    with pytest.raises(
        DeviceUnavailable, match=r"none of .*model\.onnx runs on WebGpuExecution.*on CPU"
    ) as refused:
        OnnxDecoder(tiny_model, manifest, Device("webgpu", "WebGpuExecutionProvider", "cpu"))
    assert refused.value.exit_code == 4
