"""Answers that are made at once: each is the one that it is alone, and none waits for the end of another."""

import gc
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from double import Double
from threads_left import wait_for_threads_since

from edgespec import Completion, Engine, MemoryExhausted, SamplingParams, UsageError, load
from edgespec.engine.target_caches import TargetCaches
from edgespec.runtimes.passes import Passes

HOT = SamplingParams(temperature=0.9, seed=5)
SHARED = "in the an on er " * 8  # with which several prompts begin
PROMPTS = ["the in", SHARED + "re", "an other on", SHARED + "on the", "re", "the " * 40]
LENGTHS = [9, 25, 1, 40, 17, 30]


@pytest.fixture(scope="module")
def lone(tiny_model: Path) -> list[Completion]:
    """Each answer in an engine that makes one at a time, from nothing that it has read before."""
    with load(tiny_model, drafter="none", deterministic=True, max_parallel=1) as engine:
        return [ask(engine, i) for i in range(len(PROMPTS))]


def ask(engine: Engine, i: int, **options: Any) -> Completion:
    return engine.generate(PROMPTS[i], sampling=HOT, max_tokens=LENGTHS[i], **options)


def open_joined(model: Path, **options: Any) -> Engine:
    """An engine whose passes can run as one from the first on."""
    engine = load(model, **{"deterministic": True} | options)
    caches = engine._caches
    caches.give(1, np.zeros(1, np.int32))
    queue = engine.target._passes.queue  # type: ignore[attr-defined]
    if queue._joiner is not None:
        assert queue._joiner.wait()
    return engine


def all_at_once(engine: Engine, numbers: Sequence[int]) -> list[Completion]:
    with ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(lambda i: ask(engine, i), numbers))


@pytest.mark.parametrize("drafter", ["none", "suffix", "model"])
def test_answers_at_once_are_those_of_each_alone(
    tiny_model: Path, tiny_drafter: Path, lone: list[Completion], drafter: str
) -> None:
    named = str(tiny_drafter) if drafter == "model" else drafter
    length = "auto" if drafter == "none" else 3
    with open_joined(tiny_model, drafter=named, draft_length=length) as engine:
        assert engine.max_parallel == 4
        numbers = [*range(len(PROMPTS))] * 2
        found = all_at_once(engine, numbers)
        num_joined = engine.target._passes.queue.num_passes  # type: ignore[attr-defined]
    assert [each.token_ids for each in found] == [lone[i].token_ids for i in numbers]
    assert [each.text for each in found] == [lone[i].text for i in numbers]
    assert num_joined < sum(each.stats.passes for each in found)


def test_answers_by_turns_are_those_of_each_alone(
    tiny_model: Path, lone: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "edgespec.draft.memory_watch.MemoryWatch.promise", lambda watch, num_bytes: nullcontext(False)
    )
    with load(tiny_model, drafter="suffix", deterministic=True) as engine:
        found = all_at_once(engine, range(len(PROMPTS)))
    assert [each.token_ids for each in found] == [each.token_ids for each in lone]


def test_answers_at_once_are_those_of_each_alone_without_deterministic_mode(tiny_model: Path) -> None:
    with load(tiny_model, drafter="suffix", deterministic=False, max_parallel=1) as engine:
        wanted = [ask(engine, i).token_ids for i in range(4)]
    with open_joined(tiny_model, drafter="suffix", deterministic=False) as engine:
        assert [each.token_ids for each in all_at_once(engine, range(4))] == wanted


def test_trees_and_other_answers_take_turns(tiny_model: Path) -> None:
    with load(tiny_model, drafter="lookahead", draft_length=2, deterministic=False, max_parallel=1) as engine:
        wanted = [ask(engine, i).token_ids for i in range(3)]
    with load(tiny_model, drafter="lookahead", draft_length=2, deterministic=False) as engine:
        assert [each.token_ids for each in all_at_once(engine, range(3))] == wanted


@pytest.mark.slow
def test_answers_that_end_at_random_leave_the_others_as_they_are(tiny_model: Path, lone: list[Completion]) -> None:
    rng = random.Random(3)
    with open_joined(tiny_model, drafter="suffix", max_parallel=3) as engine:

        def run(i: int) -> tuple[int, tuple[int, ...], bool]:
            number, num_read = i % len(PROMPTS), rng.randrange(0, 30)
            stream = engine.stream(PROMPTS[number], sampling=HOT, max_tokens=LENGTHS[number], priority=i % 2)
            read = list(islice(stream, num_read))
            is_whole = bool(read) and read[-1].finish_reason is not None
            if rng.random() < 0.5:
                stream.cancel()
                read += [] if is_whole else stream
            stream.close()
            return number, tuple(token for chunk in read for token in chunk.token_ids), is_whole

        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(run, range(36)))
        assert [ask(engine, i).token_ids for i in range(len(PROMPTS))] == [each.token_ids for each in lone]
        assert engine._caches.queue._holders == engine._caches.queue._waiting == []
    for number, tokens, is_whole in found:
        wanted = lone[number].token_ids
        assert tokens == (wanted if is_whole else wanted[: len(tokens)])


def test_an_answer_that_fails_harms_no_other(
    tiny_model: Path, lone: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_joined(tiny_model, drafter="none") as engine:
        run = Passes.run

        def fail(self: Passes, tokens: Any, num_past: int, *arguments: Any, **options: Any) -> Any:
            if self.caller.priority == 7 and num_past > 4:
                raise MemoryExhausted("none is left")
            return run(self, tokens, num_past, *arguments, **options)

        monkeypatch.setattr(Passes, "run", fail)
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(ask, engine, i, priority=0) for i in (0, 1, 3)]
            failing = pool.submit(ask, engine, 4, priority=7)
            assert [each.result().token_ids for each in asked] == [lone[i].token_ids for i in (0, 1, 3)]
            with pytest.raises(MemoryExhausted):
                failing.result()
        monkeypatch.undo()
        assert ask(engine, 4).token_ids == lone[4].token_ids


def test_a_short_request_beside_three_long_ones_has_its_first_token_within_three_passes(tiny_model: Path) -> None:
    for is_joined in (True, False):
        with open_joined(tiny_model, drafter="none") as engine:
            if not is_joined:
                engine.target._passes.queue._joiner = None  # type: ignore[attr-defined]
            streams = [engine.stream("the an " * 60, sampling=HOT, max_tokens=300) for _ in range(3)]
            for stream in streams:
                next(stream)
            short = engine.stream("re on", sampling=HOT, max_tokens=1)
            assert list(short)[-1].finish_reason is not None
            assert 1 <= short._reading.ticket.caller.waited_passes <= 3
            for stream in streams:
                stream.close()


def test_a_request_of_lower_priority_waits_for_a_person(tiny_model: Path) -> None:
    with open_joined(tiny_model, drafter="none", max_parallel=2) as engine:
        engine._caches.queue._idle_s = 120.0  # however late a busy machine reads the next chunk
        person = engine.stream("an on", sampling=HOT, max_tokens=200)
        next(person)
        caller, rows_by_then = person._reading.ticket.caller, list[int]()

        def write_title() -> None:
            engine.generate("the in the", sampling=HOT, max_tokens=1, priority=-1)
            rows_by_then.append(caller.num_rows)

        title = threading.Thread(target=write_title)
        title.start()
        assert len([token for chunk in person for token in chunk.token_ids]) > 100
        title.join()
        assert rows_by_then == [caller.num_rows]


def test_a_person_takes_the_cache_of_a_request_of_lower_priority(tiny_model: Path, lone: list[Completion]) -> None:
    with load(tiny_model, drafter="none", deterministic=True, max_parallel=2) as engine:
        titles = [engine.stream("the an " * 9, sampling=HOT, max_tokens=150, priority=-1) for _ in range(2)]
        begun = [next(title) for title in titles]
        assert ask(engine, 0).token_ids == lone[0].token_ids
        texts = [
            "".join(chunk.text for chunk in (first, *rest)) for first, rest in zip(begun, titles, strict=True)
        ]
        assert texts[0] == texts[1]


def test_one_thread_may_read_more_answers_alternately_than_there_are_caches(
    tiny_model: Path, lone: list[Completion]
) -> None:
    with load(tiny_model, drafter="none", deterministic=True, max_parallel=2) as engine:
        streams = [engine.stream(PROMPTS[i], sampling=HOT, max_tokens=LENGTHS[i]) for i in range(4)]
        found: list[list[int]] = [[] for _ in streams]
        while any(stream.last is None for stream in streams):
            for own, stream in zip(found, streams, strict=True):
                for chunk in islice(stream, 1):
                    own.extend(chunk.token_ids)
    assert [tuple(own) for own in found] == [lone[i].token_ids for i in range(4)]


def test_a_conversation_finds_its_text_again_after_answers_at_once(tiny_model: Path) -> None:
    with load(tiny_model, drafter="none", deterministic=True) as engine:
        all_at_once(engine, [0, 1, 2, 3])
        caches = engine._caches
        first = engine.generate("an other one " * 9, max_tokens=8)
        held = [len(slot.text) for slot in caches._slots]
        fed = sum(decoder.num_fed for decoder in caches._decoders)
        again = engine.generate("an other one " * 9, max_tokens=8)
        assert again.token_ids == first.token_ids
        assert sum(decoder.num_fed for decoder in caches._decoders) - fed < 24
        assert max(held) >= first.prompt_tokens


def test_a_prefix_that_another_answer_has_read_is_not_read_again(tiny_model: Path) -> None:
    with open_joined(tiny_model, drafter="none") as engine:
        long = engine.stream(SHARED + "one", sampling=HOT, max_tokens=300)
        next(long)
        fed = engine._caches._decoders[1].num_fed
        answer = engine.generate(SHARED + "two", max_tokens=1)
        assert engine._caches._decoders[1].num_fed - fed < answer.prompt_tokens / 3
        long.close()


@pytest.mark.parametrize("num_requests", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_nothing_grows_with_the_number_of_requests(tiny_model: Path, num_requests: int) -> None:
    before = set(threading.enumerate())
    with open_joined(tiny_model, drafter="suffix") as engine:
        counts: list[Callable[[], int]] = [
            lambda: len(engine._caches.queue._holders) + len(engine._caches.queue._waiting),
            lambda: len(engine.target._passes.queue._working),  # type: ignore[attr-defined]
            lambda: len(engine._streams),
            lambda: len(engine._drafting.pool._in_round),
        ]
        with ThreadPoolExecutor(4) as pool:
            for _ in pool.map(
                lambda i: engine.generate(f"the {i % 9}", max_tokens=1 + i % 2), range(num_requests)
            ):
                pass
        gc.collect()
        assert [count() for count in counts] == [0, 0, 0, 0]
        assert len(engine._caches._decoders) <= 4
    wait_for_threads_since(before)


def test_closing_frees_all_caches(tiny_model: Path) -> None:
    engine = open_joined(tiny_model, drafter="none")
    all_at_once(engine, [0, 1])
    engine.close()
    assert engine._caches._decoders == []


def test_caches_that_no_answer_has_and_the_joined_session_are_given_up_where_memory_is_short(
    tiny_model: Path, lone: list[Completion]
) -> None:
    with open_joined(tiny_model, drafter="none") as engine:
        all_at_once(engine, [1, 3])
        slots, queue = engine._caches._slots, engine.target._passes.queue  # type: ignore[attr-defined]
        made = [number for number, slot in enumerate(slots) if slot.has_memory]
        for number in sorted(made, key=lambda number: slots[number].used_at):
            assert engine._drafting.pool.relieve()
            assert not slots[number].has_memory
            assert not len(engine._caches.decoders[number].cache.held_tokens)  # type: ignore[union-attr]
        assert queue._joiner.max_parts > 1
        assert engine._drafting.pool.relieve()
        assert queue._joiner.max_parts == 0
        assert not engine._drafting.pool.relieve()
        assert [each.text for each in all_at_once(engine, [1, 3])] == [lone[1].text, lone[3].text]
        assert queue._joiner.max_parts == 0


def test_memory_that_is_freed_for_forgotten_prompts_is_asked_for_again(tiny_model: Path) -> None:
    with load(tiny_model, drafter="none", max_parallel=2) as engine:
        held = engine._drafting.pool.watch._num_held
        for number in (0, 1):
            engine._drafting.pool.look(600, number)
        assert {*held} == {0, 1}
        engine.plain().forget_prompts()
        assert {*held} == {0}


def test_a_cache_takes_the_memory_of_a_prompt_before_its_first_pass(tiny_model: Path) -> None:
    with load(tiny_model, drafter="none") as engine:
        cache = engine.target._passes.cache  # type: ignore[attr-defined]
        cache.clear()
        found = list[int]()
        run = engine.target.run
        engine.target.run = lambda given: (found.append(cache._capacity), run(given))[1]  # type: ignore[method-assign]
        tokens = [1] * 600
        engine.generate(tokens, max_tokens=2)
        assert found[0] >= 600


@pytest.mark.parametrize("asked", [0, 17, 2.0, True, "4"])
def test_numbers_of_answers_that_make_no_sense_are_refused(tiny_model: Path, asked: Any) -> None:
    with pytest.raises(UsageError, match=r"max_parallel is .*; wanted a whole number from 1 to 16"):
        load(tiny_model, max_parallel=asked)


def test_a_priority_is_a_whole_number(tiny_model: Path) -> None:
    with load(tiny_model, drafter="none") as engine, pytest.raises(UsageError, match="priority is 'high'"):
        engine.stream("the", priority="high")  # type: ignore[arg-type]


def test_a_target_without_forks_makes_one_answer_at_a_time() -> None:
    class Plain(Double):
        vocab_size, context_length, num_fed = 3, 9, 0

        def logits(self, tokens: Any, num_last: int) -> Any: ...

    assert TargetCaches(Plain(), 4).num_caches == 1
