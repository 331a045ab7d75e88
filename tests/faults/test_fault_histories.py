"""An engine gives the same answers, and leaves nothing behind, after any history of answers and engines."""

import gc
import random
import threading
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import psutil
import pytest
import tiny
from fault_answers import HOT, PROMPT, joined
from faulty import SCHEDULES
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from edgespec import Engine, Message, load
from edgespec.export.convert import export_model
from edgespec.manifest import read_manifest
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.onnx import OnnxDecoder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_thread_stays")]  # a module of many models or processes


# F11, F13: any history of an engine on real graphs


class Sessions(RuleBasedStateMachine):
    """An engine with a drafter, after each step compared with one that holds nothing and drafts nothing."""

    def __init__(self, engine: Engine, oracle: Engine, drafter: OnnxDecoder, compared: list[int]) -> None:
        super().__init__()
        self.engine, self.oracle, self.compared = engine, oracle, compared
        (drafting,) = engine._drafting.pool.decoders.values()
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
    assert walk(tiny_model, near_model, schedule, 7, 20) > 170


# F14: many answers and engines that come and go


def taken(most_threads: int = 0) -> tuple[int, int, int]:
    """Threads, files and bytes of this process; threads that have nothing left to do but to end are waited for."""
    gc.collect()
    process = psutil.Process()
    deadline_s = monotonic() + 120
    while most_threads and process.num_threads() > most_threads and monotonic() < deadline_s:
        sleep(0.01)
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
        after = taken(before[0] + 1)
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
            before = taken()
    after = taken(before[0])
    assert len(texts) == 1
    assert after[0] <= before[0]
    assert after[1] <= before[1]
    assert after[2] - before[2] < 32 << 20
