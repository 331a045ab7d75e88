"""Passes go on while their reader is busy, and what nobody takes is as if it had never been."""

import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from time import monotonic, sleep

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from table_decoder import TableDecoder
from until import SOON_S, until

from edgespec import AnswerStream, Chunk, Engine, SamplingParams
from edgespec.draft.answer_cache import AnswerCache
from edgespec.engine import run_ahead
from edgespec.engine.generation import AnswerWriter, Generation, LoadedModel, OpenDrafters
from edgespec.engine.request import AnswerSettings, Request
from edgespec.engine.run_ahead import RequestQueue, RunAhead, Ticket
from edgespec.engine.target_caches import TargetCaches
from edgespec.errors import EdgeSpecError
from edgespec.manifest import read_manifest
from edgespec.text.prompt_encoder import PromptEncoder
from edgespec.text.tokenizer import Tokenizer
from edgespec.types import Logits, TokenIds

HOT = SamplingParams(temperature=1.0, seed=3)
PROMPT = "the in the an"


class Passes(Iterator[int]):
    """Numbers from 0, of which it counts how many were made; from stuck_at on each waits for an interrupt."""

    def __init__(
        self, num: int | None = None, stuck_at: int | None = None, error: Exception | None = None
    ) -> None:
        self.num_made = 0
        self.is_stuck, self.is_closed = Event(), Event()
        self._interrupts: SimpleQueue[None] = SimpleQueue()
        self._num, self._stuck_at, self._error = num, stuck_at, error

    def __next__(self) -> int:
        if self.num_made == self._stuck_at:
            self.is_stuck.set()
            self._interrupts.get(timeout=2 * SOON_S)
            raise EdgeSpecError("interrupted")
        if self.num_made == self._num:
            if self._error:
                raise self._error
            raise StopIteration
        self.num_made += 1
        return self.num_made - 1

    def interrupt(self) -> None:
        if self.is_stuck.is_set():  # one that comes before has no effect, as on a real session
            self._interrupts.put(None)

    def close(self) -> None:
        self.is_closed.set()


class Reader(Iterator[int]):
    """Takes passes one after the other."""

    def __init__(
        self,
        passes: Passes,
        queue: RequestQueue | None = None,
        max_ahead: int = 5,
        *,
        is_prompt: bool = True,
    ) -> None:
        self.ticket = Ticket(passes.interrupt, "me")
        self.ahead: RunAhead[int] = RunAhead(
            passes,  # type: ignore[arg-type]
            queue or RequestQueue(idle_s=60),
            self.ticket,
            max_ahead,
            is_prompt=is_prompt,
        )

    def __next__(self) -> int:
        made = self.ahead.wait()
        if made.error:
            raise made.error
        if made.result is None:
            raise StopIteration
        return made.result

    def close(self) -> None:
        assert self.ahead.end(SOON_S)


@given(num=st.integers(0, 12), max_ahead=st.integers(0, 5), pauses=st.sets(st.integers(0, 12)))
def test_the_passes_are_those_of_the_generator(num: int, max_ahead: int, pauses: set[int]) -> None:
    ahead, found = Reader(passes := Passes(num), max_ahead=max_ahead), list[int]()
    for each in ahead:
        found.append(each)
        if each in pauses:
            sleep(0.001)
    assert found == list(range(num))
    assert list(ahead) == []
    assert passes.is_closed.is_set()
    ahead.close()


def test_passes_go_on_while_the_reader_is_busy_and_no_further_than_they_may() -> None:
    ahead = Reader(passes := Passes(), max_ahead=5)
    assert passes.num_made == 0
    for num_taken in range(1, 4):
        next(ahead)
        until(lambda num=num_taken: passes.num_made == num + 5)  # type: ignore[misc]
        sleep(0.02)
        assert passes.num_made == num_taken + 5
    ahead.close()
    assert passes.is_closed.is_set()
    assert passes.num_made == 8


@pytest.mark.parametrize("num", [0, 1, 7])
def test_passes_that_are_handed_over_later_are_all_handed_over(num: int) -> None:
    """With the next pass, where the thread would rest, and at the end."""
    passes = Passes(num)
    ahead = Reader(passes, RequestQueue(), 3, is_prompt=False)
    assert list(ahead) == list(range(num))
    ahead.close()


def test_a_chunk_is_handed_over_when_the_next_pass_begins(engine: Engine) -> None:
    with engine.stream(PROMPT, sampling=HOT, max_tokens=4) as answer:
        CountingDecoder.pause = Event()
        assert len(list(islice(answer, 2))) == 2
        assert CountingDecoder.num_passes == 2, "the third pass has begun and not ended"
        CountingDecoder.pause.set()
        assert len(list(answer)) == 2


def test_the_first_pass_is_handed_over_before_the_next_one_begins() -> None:
    """A reader that wakes as a pass begins on all cores waits for one of them."""
    ahead = Reader(passes := Passes(2, stuck_at=1), is_prompt=False)
    assert next(ahead) == 0
    assert not passes.is_closed.is_set(), "it came with the end"
    until(passes.is_stuck.is_set)
    ahead.close()


@pytest.mark.parametrize("is_prompt", [False, True])
def test_the_first_pass_is_read_before_the_next_one_begins(
    is_prompt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that is woken alone waits for the interpreter, and then for a core with the next pass."""
    pauses, is_read = list[float](), Event()

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        assert is_read.wait(SOON_S)

    monkeypatch.setattr(run_ahead, "sleep", pause)
    ahead = Reader(passes := Passes(2), is_prompt=is_prompt)
    assert next(ahead) == 0
    assert passes.num_made == 1
    is_read.set()
    assert next(ahead) == 1
    assert pauses == [run_ahead._READ_S]
    ahead.close()


def test_an_error_comes_behind_the_passes_that_were_made() -> None:
    ahead = Reader(Passes(3, error=MemoryError("none")))
    assert list(islice(ahead, 3)) == [0, 1, 2]
    with pytest.raises(MemoryError, match="none"):
        next(ahead)
    ahead.close()


def test_cancelling_drops_what_waits() -> None:
    queue = RequestQueue(idle_s=60)
    ahead = Reader(passes := Passes(), queue)
    next(ahead)
    until(lambda: passes.num_made == 6)
    queue.cancel(ahead.ticket)
    assert list(ahead) == []
    ahead.close()


def test_an_answer_that_is_cancelled_while_it_waits_makes_no_pass() -> None:
    queue = RequestQueue(idle_s=60)
    queue.take(Ticket(), "another")
    ahead, found = Reader(passes := Passes(), queue), list[int]()
    reading = Thread(target=lambda: found.extend(ahead))
    reading.start()
    until(lambda: ahead.ticket in queue._waiting)
    queue.cancel(ahead.ticket)
    reading.join(SOON_S)
    ahead.close()
    assert (found, passes.num_made, passes.is_closed.is_set()) == ([], 0, True)


def test_closing_ends_a_pass_that_nobody_waits_for() -> None:
    ahead = Reader(passes := Passes(stuck_at=2))
    next(ahead)
    passes.is_stuck.wait(SOON_S)
    started = monotonic()
    ahead.close()
    assert monotonic() - started < SOON_S
    assert passes.is_closed.is_set()


def test_an_interrupt_that_comes_before_its_pass_is_repeated() -> None:
    class Late(Passes):
        def __next__(self) -> int:
            if self.num_made == 1:
                sleep(0.1)  # as a draft before the pass
            return super().__next__()

    ahead = Reader(passes := Late(stuck_at=1))
    next(ahead)
    ahead.close()
    assert passes.is_closed.is_set()


def test_a_text_that_was_interrupted_half_made_has_no_last_chunk() -> None:
    class Interrupted:
        num_closed = 0

        def add(self, new: int) -> Chunk:
            raise KeyboardInterrupt

        def finish(self, last: Chunk) -> Chunk:
            raise AssertionError("its state is half made")

        def close(self) -> None:
            self.num_closed += 1

    ticket, writer = Ticket(), Interrupted()
    passes: RunAhead[int] = RunAhead(made := Passes(9), RequestQueue(), ticket)  # type: ignore[arg-type]
    stream = AnswerStream(passes, writer, ticket)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert (stream.last, list(stream), writer.num_closed) == (None, [], 1)
    assert made.is_closed.is_set()


def test_an_answer_that_was_never_asked_for_is_closed_without_a_thread() -> None:
    ahead = Reader(passes := Passes())
    ahead.close()
    assert passes.is_closed.is_set()
    assert not ahead.ahead.is_begun


def test_one_reader_of_two_answers_waits_for_neither() -> None:
    queue = RequestQueue(idle_s=60)
    both = [Reader(Passes(20), queue) for _ in range(2)]
    started = monotonic()
    assert [(next(both[0]), next(both[1])) for _ in range(20)] == [(i, i) for i in range(20)]
    assert monotonic() - started < SOON_S
    for each in both:
        each.close()
    assert queue._holders == []


def test_passes_go_ahead_beside_others_who_wait_but_not_for_an_idle_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    monkeypatch.setattr(run_ahead, "monotonic", lambda: now_s)

    class Slow(Passes):
        def __next__(self) -> int:
            sleep(0.002)
            return super().__next__()

    queue, taken = RequestQueue(idle_s=0.1), Event()
    ahead = Reader(passes := Slow(), queue, max_ahead=10**6)
    next(ahead)
    other = Ticket()

    def take() -> None:
        queue.take(other, "another")
        taken.set()

    thread = Thread(target=take)
    thread.start()
    until(lambda: other in queue._waiting or taken.is_set())
    made = passes.num_made
    until(lambda: passes.num_made > made)
    assert not taken.is_set()
    now_s = 0.2
    assert taken.wait(SOON_S)
    thread.join()
    made = passes.num_made
    sleep(0.02)
    assert passes.num_made == made, "the target belongs to the other"
    queue.release(other)
    queue.leave(other)
    assert list(islice(ahead, made + 5)) == list(range(1, made + 6)), "it goes on where it was"
    ahead.close()


def test_nothing_goes_ahead_of_a_reader_who_has_asked_for_nothing_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    monkeypatch.setattr(run_ahead, "monotonic", lambda: now_s)
    queue = RequestQueue(idle_s=0.05)
    ahead = Reader(passes := Passes(), queue, max_ahead=10**9)
    next(ahead)
    until(lambda: passes.num_made > 9)
    with queue._lock:  # so that no pass begins by the time before
        now_s = 0.06
    until(lambda: not ahead.ticket.is_working)
    made = passes.num_made
    sleep(0.05)
    assert passes.num_made == made
    ahead.close()


class CountingDecoder(TableDecoder):
    """Counts its passes."""

    num_passes = 0
    pause: Event | None = None  # passes from the third on wait for it

    def __init__(self) -> None:
        super().__init__(tiny.VOCAB, seed=3)

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        if self.pause and self.num_passes > 1:
            self.pause.wait(SOON_S)
        type(self).num_passes += 1
        return super().logits(tokens, num_last)

    def interrupt(self) -> None:
        pass


@pytest.fixture
def engine(tiny_model: Path, tmp_path: Path) -> Engine:
    CountingDecoder.num_passes, CountingDecoder.pause = 0, None
    manifest = read_manifest(tiny_model)
    caches = TargetCaches(CountingDecoder())
    caches.queue._idle_s = 2 * SOON_S  # within which a busy machine makes all passes ahead
    return Engine(
        LoadedModel(manifest=manifest, encoder=PromptEncoder(manifest, Tokenizer(tiny_model / "tokenizer.json"))),
        caches,
        OpenDrafters(answers=AnswerCache(tmp_path, "tiny", "0" * 64, tiny.VOCAB)),
    )


def test_the_next_pass_begins_before_its_predecessors_chunk_is_taken(engine: Engine) -> None:
    with engine.stream(PROMPT, sampling=HOT, max_tokens=20) as answer:
        assert CountingDecoder.num_passes == 0
        next(answer)
        until(lambda: CountingDecoder.num_passes == 20)
        assert len([token for chunk in answer for token in chunk.token_ids]) == 19
    assert CountingDecoder.num_passes == 20, "the count is known before the text is"


@pytest.mark.parametrize("num_read", [3, 6])
@pytest.mark.parametrize("ends", ["cancel", "close"])
def test_what_was_made_and_not_taken_is_nowhere(engine: Engine, num_read: int, ends: str) -> None:
    wanted = engine.generate(PROMPT, sampling=HOT, max_tokens=20)
    engine._drafting.answers._new.clear()  # type: ignore[union-attr]
    CountingDecoder.num_passes = 0
    talk = engine.chat(sampling=HOT, max_tokens=20)
    reply = talk.stream(PROMPT)
    read = list(islice(reply, num_read))
    until(lambda: CountingDecoder.num_passes == 20)
    getattr(reply, ends)()
    read += reply
    assert [chunk.finish_reason for chunk in read if chunk.finish_reason] == ["cancelled"] * (ends == "cancel")
    assert tuple(token for chunk in read for token in chunk.token_ids) == wanted.token_ids[:num_read]
    assert talk.messages[-1].content == "".join(chunk.text for chunk in read) == reply.text
    assert reply.last is not None
    assert reply.last.stats is not None
    assert reply.last.stats.num_emitted == reply.last.stats.passes == len(reply.last.timeline) == num_read
    (stored,) = engine._drafting.answers._new  # type: ignore[union-attr]
    assert tuple(stored[-num_read:]) == wanted.token_ids[:num_read]
    assert len(stored) == min(64, wanted.prompt_tokens) + num_read
    assert engine.generate(PROMPT, sampling=HOT, max_tokens=20).token_ids == wanted.token_ids


def test_a_stop_string_ends_the_answer_of_a_slow_reader_as_that_of_a_fast_one(engine: Engine) -> None:
    whole = engine.generate(PROMPT, sampling=HOT, max_tokens=40)
    stop = engine.tokenizer.decode(np.array(whole.token_ids[20:22], np.int32))
    fast = engine.generate(PROMPT, sampling=HOT, max_tokens=40, stop=stop)
    chunks = []
    with engine.stream(PROMPT, sampling=HOT, max_tokens=40, stop=stop) as answer:
        for chunk in answer:
            chunks.append(chunk)
            sleep(0.002)
    assert fast.finish_reason == chunks[-1].finish_reason == "stop"
    assert fast.text == "".join(chunk.text for chunk in chunks)
    assert fast.token_ids == tuple(token for chunk in chunks for token in chunk.token_ids)
    assert chunks[-1].stats is not None
    assert fast.stats.passes == chunks[-1].stats.passes == len(chunks)


def test_passes_that_wait_hold_no_logits(engine: Engine) -> None:
    request = Request(np.array(engine.encode(PROMPT), np.int32), AnswerSettings(sampling=HOT, max_tokens=20))
    generation, ticket = Generation(engine._model, engine._drafting), Ticket()
    made = generation._passes(engine.target, request, ticket, AnswerWriter(generation, request, ticket))
    assert all(each.block.logits.size == 0 for each in islice(made, 3))
    made.close()


# Each pass ends with a long one of another session, so that Python ends while one is being made.
FORGETFUL = """
import asyncio, sys
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper
from edgespec import load

SIZE, DEPTH = 1024, 12
steps = [helper.make_node("MatMul", [f"x{n}", "x0"], [f"x{n + 1}"]) for n in range(DEPTH)]
ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [SIZE, SIZE]) for name in ("x0", f"x{DEPTH}")]
graph = helper.make_graph(steps, "long", ends[:1], ends[1:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
long = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
run, given = ort.InferenceSession.run_with_iobinding, {"x0": np.zeros((SIZE, SIZE), np.float32)}

def run_long(*arguments):
    run(*arguments)
    long.run(None, given)

async def main():
    engine = load(sys.argv[1], drafter="none")
    ort.InferenceSession.run_with_iobinding = run_long
    async with engine.stream("the in the an", max_tokens=60) as answer:
        async for _ in answer:
            break

asyncio.run(main())
print("over")
"""


@pytest.mark.slow
def test_a_task_that_leaves_an_answer_and_the_engine_open_ends_without_an_abort(tiny_model: Path) -> None:
    """C++ aborts a process whose Python ends while a thread is within ONNX Runtime."""
    program = [sys.executable, "-c", FORGETFUL, str(tiny_model)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "over\n", "")
