"""An answer can be ended at any moment, and several can be asked for at once."""

import asyncio
import gc
import random
import signal
import threading
from _thread import _count as num_threads
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Timer
from time import monotonic, sleep
from types import FrameType
from typing import Any

import numpy as np
import pytest
import tiny
from double import Double
from table_decoder import TableDecoder
from threads_left import wait_for_threads_since
from until import SOON_S, until

from edgespec import AnswerStream, Chunk, Completion, Engine, Reply, SamplingParams
from edgespec.draft.drafter_sets import Candidate, OpenModel, drafter_sets
from edgespec.draft.lane_drafter import LaneDrafter
from edgespec.draft.lanes import CallerLane, Lane, ThreadLane
from edgespec.draft.model_drafter import ModelDrafter
from edgespec.draft.pool import DrafterPool
from edgespec.draft.speculation import Speculation
from edgespec.engine.generation import LoadedModel, OpenDrafters
from edgespec.engine.target_caches import TargetCaches
from edgespec.errors import EdgeSpecError, MemoryExhausted, UsageError
from edgespec.manifest import read_manifest
from edgespec.memory.free_memory import HOST, FreeMemory
from edgespec.setup.open_model import SubsetDecoder
from edgespec.text.prompt_encoder import PromptEncoder
from edgespec.text.tokenizer import Tokenizer
from edgespec.types import Logits, TokenIds

HOT = SamplingParams(temperature=1.0, seed=3)
PROMPT = "the in the an"
LONGEST_S = 2 * SOON_S  # of a pass that nobody ends


class StuckDecoder(Double):
    """A table that gets stuck once, after stuck_at passes, until it is interrupted."""

    vocab_size, context_length = tiny.VOCAB, 400

    def __init__(self, stuck_at: int | None = None) -> None:
        self.is_stuck = Event()
        self.error: Exception = EdgeSpecError("interrupted")
        self._table = TableDecoder(tiny.VOCAB, seed=3)
        self._num_left = stuck_at
        self._ended: SimpleQueue[None] = SimpleQueue()  # a signal handler may put into it while it does so

    @property
    def num_fed(self) -> int:
        return self._table.num_fed

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        if self._num_left is not None:
            self._num_left -= 1
            if self._num_left < 0:
                self._num_left = None
                self._get_stuck()
        return self._table.logits(tokens, num_last)

    def interrupt(self) -> None:
        self._ended.put(None)

    def _forget(self) -> None:
        with suppress(Empty):
            while True:
                self._ended.get_nowait()

    def _get_stuck(self) -> None:
        self._forget()
        self.is_stuck.set()
        with suppress(Empty):
            self._ended.get(timeout=LONGEST_S)
            raise self.error


EngineOf = Callable[..., Engine]


@pytest.fixture
def engine_of(tiny_model: Path) -> EngineOf:
    """An engine of a decoder, and of a drafter that agrees with it often."""
    near = TableDecoder(tiny.VOCAB, seed=4, near=TableDecoder(tiny.VOCAB, seed=3))
    drafting = Speculation(lambda: [ModelDrafter(near, tiny.VOCAB, "near")], draft_length=3)
    manifest = read_manifest(tiny_model)
    return lambda decoder, speculation=drafting, pool=None: Engine(
        LoadedModel(manifest=manifest, encoder=PromptEncoder(manifest, Tokenizer(tiny_model / "tokenizer.json"))),
        TargetCaches(decoder),
        OpenDrafters(speculation=speculation, pool=pool or DrafterPool()),
    )


@pytest.fixture(params=[0, 2], ids=["before the first token", "within a later pass"])
def stuck(request: pytest.FixtureRequest) -> StuckDecoder:
    return StuckDecoder(request.param)


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    before = num_threads()
    yield
    until(lambda: num_threads() <= before)  # one that was told to go is gone


def when_stuck(decoder: StuckDecoder, act: Callable[[], object]) -> None:
    def wait() -> None:
        decoder.is_stuck.wait(LONGEST_S)
        act()

    threading.Thread(target=wait, daemon=True).start()


def test_a_closed_stream_has_the_last_chunk_that_nobody_took(engine_of: EngineOf) -> None:
    decoder = StuckDecoder(2)
    stream = engine_of(decoder).stream(PROMPT, sampling=HOT, max_tokens=20)
    assert stream.last is None
    when_stuck(decoder, stream.close)
    chunks = list(stream)
    assert stream.last is not None
    assert stream.last not in chunks
    assert stream.last.finish_reason == "cancelled"
    assert sum(each.lane == "target" for each in stream.last.timeline) == len(chunks)


@pytest.fixture
def whole(engine_of: EngineOf) -> tuple[int, ...]:
    return engine_of(StuckDecoder()).generate(PROMPT, sampling=HOT, max_tokens=20).token_ids


def test_cancelling_from_another_thread_ends_an_answer_at_once(
    engine_of: EngineOf, stuck: StuckDecoder, whole: tuple[int, ...]
) -> None:
    engine = engine_of(stuck)
    stream = engine.stream(PROMPT, sampling=HOT, max_tokens=20)
    when_stuck(stuck, stream.cancel)
    started = monotonic()
    chunks = list(stream)
    assert monotonic() - started < SOON_S
    last = chunks[-1]
    made = tuple(token for chunk in chunks for token in chunk.token_ids)
    assert last.finish_reason == "cancelled"
    assert last.stats is not None
    assert last.stats.num_emitted == len(made)
    assert last.stats.passes == len(last.timeline) == len(chunks) - 1
    assert made == whole[: len(made)]
    assert engine.generate(PROMPT, sampling=HOT, max_tokens=20).token_ids == whole


def test_a_timeout_ends_an_answer_with_what_was_written(
    engine_of: EngineOf, stuck: StuckDecoder, whole: tuple[int, ...]
) -> None:
    engine = engine_of(stuck)
    answer = engine.generate(PROMPT, sampling=HOT, max_tokens=20, timeout_s=0.2)
    assert answer.finish_reason == "timeout"
    assert answer.token_ids == whole[: len(answer.token_ids)] != whole
    assert answer.stats.num_emitted == len(answer.token_ids)
    stuck._num_left = None
    in_time = engine.generate(PROMPT, sampling=HOT, max_tokens=20, timeout_s=1e6)
    assert (in_time.token_ids, in_time.finish_reason) == (whole, "length")


def test_a_timeout_ends_the_answer_of_a_task(engine_of: EngineOf, whole: tuple[int, ...]) -> None:
    engine = engine_of(StuckDecoder(2))

    async def read() -> list[Chunk]:
        options: dict[str, Any] = {"sampling": HOT, "max_tokens": 20, "timeout_s": 0.2}
        return [chunk async for chunk in engine.astream(PROMPT, **options)]

    chunks = asyncio.run(read())
    made = tuple(token for chunk in chunks for token in chunk.token_ids)
    assert (chunks[-1].finish_reason, made) == ("timeout", whole[: len(made)])


def test_a_timeout_counts_the_making_of_the_tokens(engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(StuckDecoder())
    read = engine._requests.read

    def read_slowly(*request: Any) -> Any:
        sleep(0.06)
        return read(*request)

    monkeypatch.setattr(engine._requests, "read", read_slowly)
    answer = engine.generate(PROMPT, max_tokens=1, timeout_s=0.05)
    assert (answer.finish_reason, answer.token_ids) == ("timeout", ())


def test_a_timeout_counts_for_a_reader_that_rests(engine_of: EngineOf, whole: tuple[int, ...]) -> None:
    for timeout_s in (0.3, 3.0, 30.0):  # in which a busy machine has made the first chunk
        with engine_of(StuckDecoder()).stream(PROMPT, sampling=HOT, max_tokens=20, timeout_s=timeout_s) as answer:
            first = next(answer)
            if first.finish_reason is None:
                sleep(timeout_s + 0.1)
                (last,) = answer
                break
    assert last.finish_reason == "timeout"
    assert first.token_ids == whole[: len(first.token_ids)]


def test_an_answer_that_waits_for_others_ends_in_time(engine_of: EngineOf, whole: tuple[int, ...]) -> None:
    decoder = StuckDecoder(1)
    engine = engine_of(decoder)
    other = engine.stream(PROMPT, sampling=HOT, max_tokens=20)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(list, other)
        decoder.is_stuck.wait(LONGEST_S)
        answer = engine.generate(PROMPT, sampling=HOT, max_tokens=20, timeout_s=0.1)
        other.cancel()
        chunks = reading.result(SOON_S)
    assert (answer.finish_reason, answer.token_ids) == ("timeout", ())
    assert chunks[-1].finish_reason == "cancelled"
    assert engine.generate(PROMPT, sampling=HOT, max_tokens=20).token_ids == whole


def test_closing_from_another_thread_ends_it_without_a_last_chunk(
    engine_of: EngineOf, stuck: StuckDecoder, whole: tuple[int, ...]
) -> None:
    engine = engine_of(stuck)
    stream = engine.stream(PROMPT, sampling=HOT, max_tokens=20)
    when_stuck(stuck, stream.close)
    assert all(chunk.finish_reason is None for chunk in stream)
    assert engine.generate(PROMPT, sampling=HOT, max_tokens=20).token_ids == whole


@pytest.mark.parametrize("way", ["astream", "agenerate", "stream", "chat"])
def test_cancelling_a_task_ends_its_answer(
    engine_of: EngineOf, stuck: StuckDecoder, whole: tuple[int, ...], way: str
) -> None:
    engine = engine_of(stuck)

    async def read() -> Sequence[Chunk | Completion]:
        if way == "astream":
            return [chunk async for chunk in engine.astream(PROMPT, sampling=HOT, max_tokens=20)]
        if way == "agenerate":
            return [await engine.agenerate(PROMPT, sampling=HOT, max_tokens=20)]
        if way == "stream":
            stream: AnswerStream | Reply = engine.stream(PROMPT, sampling=HOT, max_tokens=20)
        else:
            stream = engine.chat(sampling=HOT, max_tokens=20).stream(PROMPT)
        async with stream as answer:
            return [chunk async for chunk in answer]

    async def cancelled() -> None:
        task = asyncio.create_task(read())
        await asyncio.to_thread(stuck.is_stuck.wait, LONGEST_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def whole_again() -> tuple[int, ...]:
        await cancelled()
        return tuple(token for chunk in await read() for token in chunk.token_ids)

    started, before = monotonic(), set(threading.enumerate())
    assert asyncio.run(whole_again()) == whole
    assert monotonic() - started < SOON_S
    wait_for_threads_since(before)


def test_a_task_has_a_whole_answer_while_others_have_theirs(engine_of: EngineOf, whole: tuple[int, ...]) -> None:
    engine = engine_of(StuckDecoder())
    prompts = [PROMPT, "another on", "re re re"]
    wanted = [engine.generate(prompt, sampling=HOT, max_tokens=20) for prompt in prompts]

    async def all_of_them() -> list[Completion]:
        ticks = asyncio.create_task(asyncio.sleep(0))
        found = await asyncio.gather(*(engine.agenerate(each, sampling=HOT, max_tokens=20) for each in prompts))
        assert ticks.done()
        return found

    found = asyncio.run(all_of_them())
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
    assert [each.prompt_tokens for each in found] == [each.prompt_tokens for each in wanted]

    async def wrong(**options: Any) -> None:
        await engine.agenerate(PROMPT, **options)

    with pytest.raises(UsageError, match="max_tokens"):
        asyncio.run(wrong(max_tokens=-2))
    with pytest.raises(TypeError, match=r"Engine\.agenerate\(\) got an unexpected keyword argument 'tokens'"):
        asyncio.run(wrong(tokens=1))
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(wrong(max_tokens=10**6), 1e-3))


def test_a_task_that_stops_reading_ends_its_answer_and_a_conversation_keeps_what_it_read(
    engine_of: EngineOf, whole: tuple[int, ...]
) -> None:
    engine = engine_of(StuckDecoder())
    conversation = engine.chat(sampling=HOT, max_tokens=20)

    async def begin() -> str:
        async with conversation.stream(PROMPT) as reply:
            async for chunk in reply:
                assert chunk.token_ids == whole[: len(chunk.token_ids)]
                break
        assert reply.last is not None or reply.is_over
        return reply.text

    async def go_on() -> list[Chunk]:
        async with conversation.retry() as reply:
            return [chunk async for chunk in reply]

    begun = asyncio.run(begin())
    assert [each.answer for each in conversation.rounds] == [begun or None]
    asyncio.run(go_on())
    assert len(conversation.rounds) == 1
    assert engine.generate(PROMPT, sampling=HOT, max_tokens=20).token_ids == whole


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs setitimer, which Windows lacks")
@pytest.mark.parametrize("raises", [False, True], ids=["cancels", "interrupts"])
def test_a_signal_ends_an_answer_for_which_the_main_thread_waits(
    engine_of: EngineOf, stuck: StuckDecoder, whole: tuple[int, ...], raises: bool
) -> None:
    engine = engine_of(stuck)
    stream = engine.stream(PROMPT, sampling=HOT, max_tokens=20)

    def handle(number: int, frame: FrameType | None) -> None:
        if not stuck.is_stuck.is_set():
            return
        if raises:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt
        stream.cancel()

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    chunks: list[Chunk] = []
    started = monotonic()
    try:
        if raises:
            with pytest.raises(KeyboardInterrupt):
                chunks.extend(stream)
        else:
            chunks.extend(stream)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert monotonic() - started < SOON_S
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ([] if raises else ["cancelled"])
    assert list(stream) == []
    assert engine.generate(PROMPT, sampling=HOT, max_tokens=20).token_ids == whole


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs setitimer, which Windows lacks")
def test_signals_do_not_stop_the_wait_from_repeating_an_interrupt(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first interrupt comes just before the pass, while signals come in thousands, also as each wait ends."""
    stuck, first = StuckDecoder(0), iter([None])
    interrupt = stuck.interrupt
    monkeypatch.setattr(stuck, "interrupt", lambda: next(first, interrupt) and interrupt())
    stream = engine_of(stuck).stream(PROMPT, sampling=HOT, max_tokens=20)

    def handle(number: int, frame: FrameType | None) -> None:
        sleep(0.0003)

    def cancel() -> None:
        sleep(0.5)
        stream.cancel()

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    started = monotonic()
    try:
        when_stuck(stuck, cancel)
        assert [chunk.finish_reason for chunk in stream] == ["cancelled"]
        assert monotonic() - started < SOON_S
        over = monotonic()
        assert list(stream) == []
        assert monotonic() - over < SOON_S
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("ahead", "kind"),
    [(False, ThreadLane), (True, ThreadLane), (False, CallerLane)],
    ids=["serial", "ahead", "caller"],
)
def test_cancelling_ends_a_draft_for_which_the_target_waits(
    engine_of: EngineOf, whole: tuple[int, ...], ahead: bool, kind: Callable[[str], Lane]
) -> None:
    stuck, lane = StuckDecoder(0), kind("drafter")
    decoder = SubsetDecoder(stuck, np.arange(tiny.VOCAB, dtype=np.int32), tiny.VOCAB) if ahead else stuck
    drafter = LaneDrafter(ModelDrafter(decoder, tiny.VOCAB, "near"), lane, ahead)
    candidate = Candidate("near", {}, lambda cancel, report: OpenModel(drafter, stuck, lane))
    pool = DrafterPool(drafter_sets([[candidate]], frozenset(), frozenset(), len), tiny.VOCAB)
    pool.start({HOST: FreeMemory(1 << 40, "a test")}, {})
    engine = engine_of(StuckDecoder(), Speculation(pool.drafters, draft_length=3), pool)
    stream = engine.stream(PROMPT, sampling=HOT, max_tokens=20)
    when_stuck(stuck, stream.cancel)
    started = monotonic()
    assert [chunk.finish_reason for chunk in stream] == ["cancelled"]
    assert monotonic() - started < SOON_S
    again = engine.generate(PROMPT, sampling=HOT, max_tokens=20)
    assert again.token_ids == whole
    assert again.stats.downgrades == (), "the drafter is at no fault"
    assert again.stats.num_accepted > 0


def test_a_stream_that_nobody_holds_is_closed(engine_of: EngineOf) -> None:
    engine = engine_of(StuckDecoder())
    for _ in islice(engine.stream(PROMPT, sampling=HOT), 2):
        pass
    stream = engine.stream(PROMPT, sampling=HOT)
    stream.myself = stream  # type: ignore[attr-defined]
    next(stream)
    assert len(engine._caches.queue._holders) == 1
    del stream
    gc.collect()
    until(lambda: engine._caches.queue._holders == [])
    assert engine.generate(PROMPT, sampling=HOT, max_tokens=2).finish_reason == "length"


@pytest.mark.parametrize("num_read", [0, 1])
def test_cancelling_between_two_chunks_ends_it_with_the_next(
    engine_of: EngineOf, whole: tuple[int, ...], num_read: int
) -> None:
    engine = engine_of(StuckDecoder())
    with engine.stream(PROMPT, sampling=HOT, max_tokens=20) as stream:
        chunks = list(islice(stream, num_read))
        stream.cancel()
        stream.cancel()
        (last,) = stream
        read = [token for chunk in chunks for token in chunk.token_ids]
        assert (last.token_ids, last.finish_reason) == ((), "cancelled")
        assert tuple(read) == whole[: len(read)]
        assert "".join(chunk.text for chunk in [*chunks, last]) == engine.tokenizer.decode(read)
        stream.cancel()
        assert list(stream) == []


def test_cancelling_an_answer_that_is_over_changes_nothing(engine_of: EngineOf, whole: tuple[int, ...]) -> None:
    engine = engine_of(StuckDecoder())
    stream = engine.stream(PROMPT, sampling=HOT, max_tokens=20)
    chunks = list(stream)
    stream.cancel()
    stream.close()
    stream.cancel()
    assert chunks[-1].finish_reason == "length"
    assert list(stream) == []
    assert engine.generate(PROMPT, sampling=HOT, max_tokens=20).token_ids == whole


def test_an_error_within_a_pass_comes_as_it_is_and_the_engine_answers_on(
    engine_of: EngineOf, stuck: StuckDecoder, whole: tuple[int, ...]
) -> None:
    stuck.error = MemoryExhausted("no memory", needed_bytes=7)
    engine = engine_of(stuck).plain()
    when_stuck(stuck, stuck.interrupt)
    with pytest.raises(MemoryExhausted, match="no memory") as raised:
        engine.generate(PROMPT, sampling=HOT, max_tokens=20)
    assert raised.value.needed_bytes == 7
    assert any(entry.name == "_get_stuck" for entry in raised.traceback)
    assert engine.generate(PROMPT, sampling=HOT, max_tokens=20).token_ids == whole


def test_threads_have_their_answers_one_after_the_other(engine_of: EngineOf) -> None:
    engine = engine_of(StuckDecoder())
    prompts = ["the in the", "another on", "re re re", "an", "in the in"]
    wanted = [engine.generate(prompt, sampling=HOT, max_tokens=25).token_ids for prompt in prompts]
    fed = engine.target.num_fed
    alone = [engine.generate(prompt, sampling=HOT, max_tokens=25).token_ids for prompt in prompts]
    assert alone == wanted
    fed = engine.target.num_fed - fed
    before = engine.target.num_fed
    with ThreadPoolExecutor(5) as pool:
        asked = [pool.submit(engine.generate, prompt, sampling=HOT, max_tokens=25) for prompt in prompts]
        assert [answer.result().token_ids for answer in asked] == wanted
    assert engine.target.num_fed - before < 1.3 * fed, "no prompt is read again and again"


def test_tasks_have_their_answers_one_after_the_other(engine_of: EngineOf) -> None:
    engine = engine_of(StuckDecoder())
    prompts = ["the in the", "another on", "re re re"]
    wanted = [engine.generate(prompt, sampling=HOT, max_tokens=25).token_ids for prompt in prompts]

    async def read(prompt: str) -> tuple[int, ...]:
        chunks = [chunk async for chunk in engine.astream(prompt, sampling=HOT, max_tokens=25)]
        assert chunks[-1].finish_reason == "length"
        return tuple(token for chunk in chunks for token in chunk.token_ids)

    async def all_of_them() -> list[tuple[int, ...]]:
        return await asyncio.gather(*map(read, prompts))

    assert asyncio.run(all_of_them()) == wanted


def test_an_answer_may_be_asked_for_while_another_is_read(engine_of: EngineOf) -> None:
    engine = engine_of(StuckDecoder())
    wanted = engine.generate(PROMPT, sampling=HOT, max_tokens=9).token_ids
    started, made = monotonic(), list[int]()
    with engine.stream("re re", sampling=HOT, max_tokens=5) as outer:
        for chunk in outer:
            made += chunk.token_ids
            assert engine.generate(PROMPT, sampling=HOT, max_tokens=9).token_ids == wanted
    assert tuple(made) == engine.generate("re re", sampling=HOT, max_tokens=5).token_ids
    assert monotonic() - started < SOON_S


def test_each_token_says_where_it_comes_from(engine_of: EngineOf) -> None:
    answer = engine_of(StuckDecoder()).generate("the in the in the in", sampling=HOT, max_tokens=200)
    assert len(answer.origins) == len(answer.token_ids) == 200
    assert answer.origins.count("near") == answer.stats.num_accepted > 0
    assert set(answer.origins) == {"target", "near"}


def test_tokens_are_counted_as_the_context_has_them(engine_of: EngineOf) -> None:
    engine = engine_of(StuckDecoder())
    ids = engine.tokenize("the in")
    assert engine.tokenizer.decode(ids) == "the in"
    assert (
        engine.count("the in")
        == len(engine.encode("the in"))
        == engine.generate("the in", max_tokens=1).prompt_tokens
    )
    assert engine.count("the in", "be brief") > engine.count("the in")


class HastyDecoder(StuckDecoder):
    """A table whose passes take from nothing to 2 ms, and end when they are interrupted."""

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        self._forget()
        with suppress(Empty):
            self._ended.get(timeout=0.002 * random.random() ** 4)
            raise EdgeSpecError("interrupted")
        return super().logits(tokens, num_last)


def ended_somehow(engine: Engine, prompt: str, rng: random.Random) -> tuple[str, list[int]]:
    """How an answer was ended, and its tokens."""
    how = rng.choice(["whole", "cancelled", "closed", "left", "read on after another"])
    stream = engine.stream(prompt, sampling=HOT, max_tokens=15)
    if how == "whole":
        return how, [token for chunk in stream for token in chunk.token_ids]
    if how in ("cancelled", "closed"):
        end = Timer(0.01 * rng.random() ** 2, stream.cancel if how == "cancelled" else stream.close)
        end.start()
        made = [token for chunk in stream for token in chunk.token_ids]
        end.join()
        return how, made
    made = [token for chunk in islice(stream, rng.randrange(4)) for token in chunk.token_ids]
    if how == "left":
        return how, made
    engine.generate(PROMPT, sampling=HOT, max_tokens=3)
    return "whole", made + [token for chunk in stream for token in chunk.token_ids]


@pytest.mark.parametrize("num_answers", [12, pytest.param(400, marks=pytest.mark.slow)])
def test_answers_that_are_ended_at_any_moment_leave_the_others_alone(
    engine_of: EngineOf, num_answers: int
) -> None:
    engine = engine_of(HastyDecoder())
    prompts = ["the in the", "another on", "re re re"]
    wanted = {prompt: engine.generate(prompt, sampling=HOT, max_tokens=15).token_ids for prompt in prompts}

    def some(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(num_answers // 3):
            prompt = rng.choice(prompts)
            how, made = ended_somehow(engine, prompt, rng)
            assert tuple(made) == wanted[prompt][: len(made)]
            assert how != "whole" or len(made) == 15

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(some, seed) for seed in range(3)]:
            done.result(120)
    gc.collect()
    until(lambda: engine._caches.queue._holders == [])


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs setitimer, which Windows lacks")
@pytest.mark.parametrize("num_answers", [40, pytest.param(2000, marks=pytest.mark.slow)])
# Ctrl-C within a callback of a weak set or of the garbage collector is ignored by the interpreter.
@pytest.mark.filterwarnings("ignore:.*(WeakSet|gc_callback):pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_moment_leaves_an_engine_that_answers_on(engine_of: EngineOf, num_answers: int) -> None:
    engine, rng = engine_of(HastyDecoder()), random.Random(1)
    wanted = engine.generate(PROMPT, sampling=HOT, max_tokens=15).token_ids
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    num_interrupted = 0
    try:
        for _ in range(num_answers):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + 0.012 * rng.random() ** 2)
                assert engine.generate(PROMPT, sampling=HOT, max_tokens=15).token_ids == wanted
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                num_interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert num_interrupted > num_answers // 4
    assert engine.generate(PROMPT, sampling=HOT, max_tokens=15).token_ids == wanted
