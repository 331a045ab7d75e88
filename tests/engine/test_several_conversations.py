"""Several conversations on one engine: switching between them reads no message again."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from double import Double

from edgespec import Conversation, Engine, MemoryExhausted, SamplingParams, load
from edgespec.decoding.decoder import Cache, Can, Forks, Pass
from edgespec.engine.run_ahead import RequestQueue, Ticket
from edgespec.engine.target_caches import AnswerDecoder, TargetCaches
from edgespec.evaluation.timed_answer import clear_cache
from edgespec.types import TokenIds

HOT = SamplingParams(temperature=0.9, seed=5)
TOPICS = ["the in the " * 20, "an other on " * 20, "one re the " * 20]
TURNS = ["an in", "on the", "re"]


def open_engine(model: Path, **options: Any) -> Engine:
    return load(model, **{"drafter": "none", "deterministic": True} | options)


def num_fed(engine: Engine) -> int:
    """How many tokens the target has read, in all of its caches."""
    return sum(decoder.num_fed for decoder in engine._caches.decoders)


def begin(engine: Engine, topic: str) -> Conversation:
    return engine.chat(system=topic, sampling=HOT, max_tokens=6)


def talk(engine: Engine, conversations: Sequence[Conversation], order: Sequence[int]) -> list[tuple[str, int]]:
    """Each answer, with how many tokens were read for it, by conversation and turn."""
    found, turns = [], [0] * len(conversations)
    for i in order:
        before = num_fed(engine)
        answer = conversations[i].say(TURNS[turns[i]])
        turns[i] += 1
        found.append((answer.text, num_fed(engine) - before))
    return found


def talk_alone(model: Path, **options: Any) -> list[list[tuple[str, int]]]:
    """The answers of each conversation in an engine of its own, and what was read for them."""
    found = []
    for topic in TOPICS:
        with open_engine(model, max_parallel=1, **options) as engine:
            found.append(talk(engine, [begin(engine, topic)], [0] * len(TURNS)))
    return found


@pytest.mark.parametrize("drafter", ["none", "suffix", "model", "lookahead"])
def test_switching_between_conversations_reads_what_each_alone_reads(
    tiny_model: Path, tiny_drafter: Path, drafter: str
) -> None:
    options: dict[str, Any] = {"drafter": str(tiny_drafter) if drafter == "model" else drafter}
    if drafter == "model":
        options |= {"draft_length": 2, "schedule": "serial"}
    if drafter == "lookahead":
        options["deterministic"] = False  # trees
    alone = talk_alone(tiny_model, **options)
    with open_engine(tiny_model, **options) as engine:
        conversations = [begin(engine, topic) for topic in TOPICS]
        order = [0, 1, 2, 1, 0, 2, 0, 1, 2]
        found = talk(engine, conversations, order)
    for i in range(len(TOPICS)):
        mine = [each for each, at in zip(found, order, strict=True) if at == i]
        assert [text for text, _ in mine] == [text for text, _ in alone[i]]
        if drafter in ("none", "model"):  # others draft more or less by what they learned in between
            assert [num for _, num in mine] == [num for _, num in alone[i]]
        assert max(num for _, num in mine[1:]) < mine[0][1]


def test_drafter_models_draft_for_the_conversation_that_goes_on(tiny_model: Path, tiny_drafter: Path) -> None:
    with open_engine(tiny_model, drafter=str(tiny_drafter), draft_length=2, schedule="serial") as engine:
        conversations = [begin(engine, topic) for topic in TOPICS]
        for i in (0, 1, 2, 0, 1, 2):
            assert conversations[i].say("the").stats.num_drafted > 0


def test_the_conversation_that_rested_the_longest_is_read_again(tiny_model: Path) -> None:
    with open_engine(tiny_model, max_parallel=2) as engine:
        conversations = [begin(engine, topic) for topic in TOPICS]
        found = [num for _, num in talk(engine, conversations, [0, 1, 2, 1, 2, 0, 2, 1])]
        whole = [conversation.num_tokens for conversation in conversations]
    is_whole = [num > len(TOPICS[0].split()) for num in found]
    assert is_whole == [True, True, True, False, False, True, False, True]
    assert min(whole) > len(TOPICS[0].split())


def test_memory_is_counted_where_the_texts_are(tiny_model: Path) -> None:
    with open_engine(tiny_model) as engine:
        watch = engine._drafting.pool.watch
        long, short = (
            engine.chat(system="the in " * 200, max_tokens=6),
            engine.chat(system="an on " * 20, max_tokens=6),
        )
        long.say("the")
        num_long = watch._num_held[0]
        short.say("the")
        num_short = watch._num_held[0]
        assert num_short < long.num_tokens <= num_long == watch._num_held[1]
        long.say("an")
        assert watch._num_held[1] == num_short
        assert watch._num_held[0] >= long.num_tokens


def test_one_conversation_takes_one_cache(tiny_model: Path) -> None:
    with open_engine(tiny_model) as engine:
        conversation = begin(engine, TOPICS[0])
        for turn in TURNS:
            conversation.say(turn)
        conversation.retry().completion()
        assert len(engine._caches.decoders) == 1


def test_conversations_in_threads_have_the_texts_of_each_alone(tiny_model: Path) -> None:
    alone = talk_alone(tiny_model)
    with open_engine(tiny_model) as engine, ThreadPoolExecutor(6) as pool:

        def run(i: int) -> list[str]:
            conversation = begin(engine, TOPICS[i % len(TOPICS)])
            return [conversation.say(turn).text for turn in TURNS]

        found = list(pool.map(run, range(6)))
    assert found == [[text for text, _ in alone[i % len(TOPICS)]] for i in range(6)]


def test_a_measured_answer_reads_its_whole_prompt(tiny_model: Path) -> None:
    with open_engine(tiny_model) as engine:
        for topic in [*TOPICS, *TOPICS]:
            clear_cache(engine)
            before = num_fed(engine)
            answer = engine.generate(topic, max_tokens=1)
            assert num_fed(engine) - before == answer.prompt_tokens
        assert len(engine._caches.decoders) == 1


class Forking(Double, Cache, Forks):
    """A decoder that remembers which text it holds, and makes so many forks."""

    vocab_size, context_length, num_fed, can_exchange = 9, 99, 0, True
    held_tokens: Any = None
    forks: Any = None
    cache: Any = None

    def __init__(self, num_forks: int) -> None:
        self.num_forks, self.held_tokens = num_forks, np.zeros(0, np.int32)
        self.forks, self.cache = self, self

    def fork(self) -> "Forking":
        if not self.num_forks:
            raise MemoryExhausted("none is left")
        self.num_forks -= 1
        return Forking(0)

    def exchange(self, other: "Forking") -> None:
        self.held_tokens, other.held_tokens = other.held_tokens, self.held_tokens

    def logits(self, tokens: TokenIds, num_last: int) -> Any: ...
    def share(self, max_callers: int, may_join: Any) -> None: ...
    def serve(self, caller: Any) -> None: ...
    def copy_prefix(self, other: Any, tokens: Any) -> bool:
        return False

    def forget(self) -> None:
        self.held_tokens = np.zeros(0, np.int32)


def answer(caches: TargetCaches, text: TokenIds) -> bool:
    """Answer alone; returns whether the first cache had it, and held it."""
    number = caches.choose(text, range(caches.num_caches))
    decoder: Any = caches.give(number, text)
    is_held = number == 0 and np.array_equal(decoder.held_tokens, text)
    caches.note(number, text)
    decoder.held_tokens = text
    return is_held


@pytest.mark.parametrize(("num_forks", "num_kept"), [(0, 1), (1, 2), (2, 3), (9, 3)])
def test_as_many_texts_are_kept_as_there_is_memory_for(num_forks: int, num_kept: int) -> None:
    freed = set[int]()
    caches = TargetCaches(Forking(num_forks), 3, report_freed=freed.add)
    texts = [np.full(40, i, np.int32) for i in range(num_kept)]
    assert [answer(caches, text) for text in texts * 3] == [False] * num_kept + [True] * num_kept * 2
    answer(caches, np.full(40, 9, np.int32))
    assert freed == {1, 2} & {num_forks + 1}


def test_a_text_that_is_to_move_for_a_prompt_can_be_given_up_for_it() -> None:
    """The first cache has its memory still when the prompt that was given that cache needs more."""
    freed, text, prompt = list[int](), np.full(40, 1, np.int32), np.full(40, 2, np.int32)
    caches = TargetCaches(Forking(9), 3, report_freed=freed.append)
    answer(caches, text)
    asked = Ticket(choose=lambda free: caches.choose(prompt, free))
    caches.queue.take(asked, "a thread")
    assert (asked.cache, caches.give_up(), freed) == (0, True, [1])
    assert [len(decoder.cache.held_tokens) for decoder in caches.decoders if decoder.cache] == [0, 0]
    assert not caches.give_up()
    caches.queue.leave(asked)
    caches.grow(0, 50)
    assert (caches.give_up(), freed) == (True, [1, 0])


def test_a_cache_that_an_answer_is_given_at_this_moment_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    caches, text, is_held = TargetCaches(Forking(9), 2), np.full(40, 1, np.int32), RequestQueue.is_held
    answer(caches, text)

    def answer_meanwhile(queue: RequestQueue, cache: int) -> bool:
        found = is_held(queue, cache)
        if not is_held(queue, 0):
            queue.take(Ticket(choose=partial(caches.choose, text)), "a thread")
        return found

    monkeypatch.setattr(RequestQueue, "is_held", answer_meanwhile)
    assert not caches.give_up()
    assert np.array_equal(caches.give(0, text).held_tokens, text)  # type: ignore[attr-defined]


def test_a_cache_that_is_given_up_goes_to_no_answer_before_it_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    caches, prompt, forget = TargetCaches(Forking(9), 2), np.full(40, 2, np.int32), Forking.forget
    answer(caches, np.full(40, 1, np.int32))
    asking = Thread(target=answer, args=(caches, prompt))

    def forget_while_one_asks(cache: Forking) -> None:
        asking.start()
        asking.join(0.2)
        forget(cache)

    monkeypatch.setattr(Forking, "forget", forget_while_one_asks)
    assert caches.give_up()
    asking.join()
    assert np.array_equal(caches.decoders[0].held_tokens, prompt)  # type: ignore[attr-defined]


def test_a_text_of_a_few_tokens_is_not_kept() -> None:
    caches = TargetCaches(Forking(9), 3)
    for i in range(4):
        answer(caches, np.full(8, i, np.int32))
    assert len(caches.decoders) == 1


class Holding(Forking):
    """It holds the text of its last pass."""

    can = Can()

    def fork(self) -> "Holding":
        return Holding(0)

    def logits(self, tokens: TokenIds, num_last: int) -> Any:
        self.held_tokens = tokens
        return np.zeros((num_last, self.vocab_size), np.float32)


def test_an_answer_that_gets_its_cache_again_leaves_other_texts_where_they_are_said_to_be() -> None:
    """Others had the cache meanwhile, and what it held goes to another one before the answer runs."""
    caches = TargetCaches(Holding(9), 2)
    texts = [np.full(40, i, np.int32) for i in range(3)]
    answers = [Ticket(choose=partial(caches.choose, text)) for text in texts]
    targets = [AnswerDecoder(caches, caches.decoders[0], *each) for each in zip(answers, texts, strict=True)]

    def step(i: int) -> None:
        caches.queue.take(answers[i], "a thread")
        targets[i].run(Pass(texts[i]))
        caches.queue.release(answers[i])

    step(0)
    step(1)
    step(2)
    assert [each.cache for each in answers] == [None, 1, 0]
    for each in answers[2:0:-1]:
        caches.queue.leave(each)
    step(0)
    assert answers[0].cache == 0
    assert {number: int(text[0]) for number, text in caches.texts().items()} == {1: 2}
