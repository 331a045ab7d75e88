"""Conversations on an engine that answers by rule, a token a word."""

import gc
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from chunk_stream import stream_of
from scripted import scripted_engine

from edgespec import ContextOverflow, Engine, Message, Round, SamplingParams, UsageError, load, split_reasoning
from edgespec.engine.answer_stream import AnswerStream
from edgespec.engine.answers import Chunk
from edgespec.engine.conversation import Conversation
from edgespec.engine.preset_defaults import Preset


class WordEngine:
    """Answers with the seed and the last message, word by word. A message is its words and one token more."""

    model_sampling: SamplingParams | None = None
    preset = None
    reasons = False

    def __init__(self, context_length: int = 100) -> None:
        self.context_length = context_length
        self.manifest = SimpleNamespace(name="words", context_length=context_length)
        self.tokenizer = SimpleNamespace(encode=lambda text, is_behind_text: text.split())
        self.asked: list[tuple[Message, ...]] = []
        self.begun: str | None = None

    def count(self, messages: Sequence[Message], thinking: bool | None = None, tools: Any = None) -> int:
        return sum(1 + len(each.content.split()) for each in messages)

    def opens_reasoning(self, messages: Sequence[Message], **options: Any) -> bool:
        return self.reasons

    def stream(self, messages: Sequence[Message], *, sampling: SamplingParams, **limits: Any) -> AnswerStream:
        self.asked.append(tuple(messages))
        self.begun = limits.get("prefill")
        if (num := self.count(messages) + len((self.begun or "").split())) > self.context_length:
            raise ContextOverflow(num, self.context_length, self.context_length)
        return stream_of(self._chunks(messages, sampling))

    def _chunks(self, messages: Sequence[Message], sampling: SamplingParams) -> Generator[Chunk, None, None]:
        words = [f"{sampling.seed}:", *messages[-1].content.split()]
        for word in words[:-1]:
            yield Chunk(text=f"{word} ", token_ids=(0,))
        yield Chunk(text=words[-1], token_ids=(0,), finish_reason="stop")


def talk(context_length: int = 100, **settings: Any) -> tuple[Conversation, WordEngine]:
    engine = WordEngine(context_length)
    return Conversation(engine, **settings), engine  # type: ignore[arg-type]


def answer(conversation: Conversation, text: str) -> str:
    reply = conversation.stream(text)
    return "".join(chunk.text for chunk in reply)


def contents(messages: Sequence[Message]) -> list[str]:
    return [each.content for each in messages]


def test_each_turn_is_sent_with_all_before_it() -> None:
    conversation, engine = talk(system="be brief")
    assert answer(conversation, "one") == "0: one"
    assert answer(conversation, "two") == "0: two"
    assert contents(engine.asked[1]) == ["be brief", "one", "0: one", "two"]
    assert conversation.messages == (*engine.asked[1], Message("assistant", "0: two"))


def test_an_empty_system_message_is_none() -> None:
    conversation, engine = talk(system="")
    answer(conversation, "one")
    assert contents(engine.asked[0]) == ["one"]
    assert contents(conversation.transcript().messages) == ["one", "0: one"]


def test_retry_takes_the_next_seed_and_the_place_of_the_answer() -> None:
    conversation, _ = talk(sampling=SamplingParams(seed=5))
    answer(conversation, "one")
    assert [*conversation.retry()][-1].finish_reason == "stop"
    assert contents(conversation.messages) == ["one", "6: one"]
    assert [*conversation.retry()]
    assert contents(conversation.messages) == ["one", "7: one"]
    answer(conversation, "two")
    assert contents(conversation.messages)[-1] == "5: two"


def test_a_message_that_is_taken_back_leaves_everything_as_it_was() -> None:
    conversation, engine = talk(40, overflow="drop-oldest", sampling=SamplingParams(seed=5))

    def send_and_undo() -> None:
        with conversation.stream("long " * 13) as reply:
            assert reply.dropped
        conversation.undo()

    for text in ("message number one", "message number two", "three"):
        answer(conversation, text)
    assert [*conversation.retry()]
    send_and_undo()
    assert conversation.num_dropped == 0
    assert [*conversation.retry()]
    assert conversation.rounds[-1].answer == "7: three"
    conversation.rewrite("<think></think>No.")
    conversation.rewrite("Yes,")
    engine.reasons = True
    send_and_undo()
    conversation.go_on().close()
    assert engine.begun == "Yes,"


def test_undo_takes_back_a_round_and_then_there_is_none() -> None:
    conversation, _ = talk()
    answer(conversation, "one")
    assert conversation.undo() == Round("one", "0: one")
    assert conversation.undo() is None
    assert conversation.messages == ()
    with pytest.raises(UsageError, match="nothing to answer"):
        conversation.retry()


@pytest.mark.parametrize("num_read", [0, 2])
@pytest.mark.parametrize("is_let_go", [False, True])
def test_undo_takes_back_an_answer_as_a_transcript_has_it(num_read: int, is_let_go: bool) -> None:
    conversation, _ = talk()
    answer(conversation, "one two")
    reply: Any = conversation.retry()
    for _ in range(num_read):
        next(reply)
    kept = conversation.transcript()
    if is_let_go:
        del reply
        assert conversation.messages == kept.messages
    removed = conversation.undo()
    assert removed is not None
    assert removed.answer == ("1: one " if num_read else "0: one two")
    conversation.redo(removed)
    assert conversation.transcript() == kept


def test_a_turn_that_is_closed_keeps_what_there_was_of_it() -> None:
    conversation, _ = talk()
    with conversation.stream("a b c d") as reply:
        next(reply)
        next(reply)
    assert contents(conversation.messages) == ["a b c d", "0: a "]
    assert conversation.transcript().cut_short == ((1, "cancelled"),)


def test_one_answer_is_made_at_a_time_also_from_several_threads() -> None:
    conversation, engine = talk()
    reply = conversation.stream("a b c d")
    next(reply)
    with ThreadPoolExecutor() as pool:
        for ask in (partial(conversation.stream, "e"), partial(conversation.say, "f"), conversation.retry):
            with pytest.raises(UsageError, match="is being answered"):
                pool.submit(ask).result()
    assert [*reply]
    assert answer(conversation, "g") == "0: g"
    assert contents(conversation.messages) == ["a b c d", "0: a b c d", "g", "0: g"]
    assert len(engine.asked) == 2


def test_options_of_one_answer_are_those_of_the_engine(engine: Engine) -> None:
    conversation = engine.chat(max_tokens=6)
    plain = conversation.say("the in")
    with conversation.retry(logprobs=2, banned=plain.text[:1], priority=-1, timeout_s=1e6) as reply:
        other = reply.completion()
    messages = [Message("user", "the in")]
    wanted = engine.generate(
        messages, sampling=SamplingParams(seed=1), max_tokens=6, logprobs=2, banned=plain.text[:1]
    )
    assert (other.token_ids, other.logprobs) == (wanted.token_ids, wanted.logprobs)
    assert len(other.logprobs[0].top) == 2
    with conversation.retry(max_tokens=3, stop="z", temperature=0.9, seed=4) as reply:
        other = reply.completion()
    wanted = engine.generate("the in", stop="z", sampling=SamplingParams(temperature=0.9, seed=4), max_tokens=3)
    assert other.token_ids == wanted.token_ids
    assert conversation.retry().completion().finish_reason == plain.finish_reason  # as before
    for wrong in ({"system": "be brief"}, {"raw": True}, {"tools": []}):
        with pytest.raises(TypeError, match="is an option of an answer; give it to Engine"):
            conversation.say("the", **wrong)  # type: ignore[arg-type]
    assert len(conversation.rounds) == 1


def test_a_message_that_gets_no_word_in_time_stays_unanswered(engine: Engine) -> None:
    conversation = engine.chat(max_tokens=6)
    reply = conversation.say("the in", timeout_s=1e-9)
    assert (reply.text, reply.finish_reason) == ("", "timeout")
    assert conversation.rounds == (Round("the in", None),)


def test_what_was_read_of_an_answer_that_nobody_reads_on_stays() -> None:
    conversation, _ = talk()
    for chunk in conversation.stream("a b c d"):
        if "a" in chunk.text:
            break
    gc.collect()
    answer(conversation, "e")
    assert contents(conversation.messages) == ["a b c d", "0: a ", "e", "0: e"]
    assert conversation.transcript().cut_short == ((1, "cancelled"),)


def test_a_message_is_put_back_behind_an_answer_alone_that_nobody_reads() -> None:
    conversation, _ = talk()
    answer(conversation, "one")
    removed = conversation.undo()
    assert removed is not None
    reply = conversation.stream("two three")
    next(reply)
    with pytest.raises(UsageError, match="is being answered") as kept:  # as a notebook keeps the last error
        conversation.redo(removed)
    del reply
    conversation.redo(removed)
    assert kept.tb is not None
    assert contents(conversation.messages) == ["two three", "0: ", "one", "0: one"]


@pytest.mark.parametrize("take_back", [Conversation.undo, Conversation.clear])
def test_a_message_may_be_taken_back_while_it_is_answered(take_back: Callable[[Conversation], Any]) -> None:
    conversation, _ = talk()
    answer(conversation, "a")
    reply = conversation.stream("b c d")
    next(reply)
    take_back(conversation)
    kept = conversation.messages
    assert [*reply]
    assert conversation.messages == kept
    assert answer(conversation, "e") == "0: e"
    assert contents(conversation.messages)[-2:] == ["e", "0: e"]


def test_an_answer_that_is_made_is_in_the_transcript_as_if_it_were_cancelled() -> None:
    conversation, _ = talk(system="be brief")
    with conversation.stream("a b c d") as reply:
        next(reply)
        assert conversation.messages == (Message("system", "be brief"), Message("user", "a b c d"))
        so_far = conversation.transcript()
    assert contents(so_far.messages) == ["be brief", "a b c d", "0: "]
    assert so_far == conversation.transcript()
    with conversation.retry() as reply:
        assert conversation.transcript() == so_far  # until another one has a word
        assert [*reply]
    assert conversation.transcript().cut_short == ()


def test_an_answer_stays_where_another_one_has_no_word_so_far() -> None:
    conversation, _ = talk(sampling=SamplingParams(seed=5))
    answer(conversation, "one")
    conversation.retry().close()
    assert contents(conversation.messages) == ["one", "5: one"]
    with conversation.retry() as reply:
        next(reply)
    assert contents(conversation.messages) == ["one", "6: "]
    conversation.retry().close()
    assert contents(conversation.messages) == ["one", "6: "]
    assert conversation.transcript().cut_short != ()


@pytest.mark.parametrize("finish_reason", ["stop", "context"])
def test_an_answer_stays_where_another_one_ends_without_a_word(
    finish_reason: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation, engine = talk(sampling=SamplingParams(seed=5))
    answer(conversation, "one")
    saved = conversation.transcript()
    with monkeypatch.context() as patch:
        end = Chunk(text="", token_ids=(), finish_reason=finish_reason)
        patch.setattr(engine, "_chunks", lambda messages, sampling: (each for each in [end]))
        assert [*conversation.retry()] == [end]
        assert conversation.transcript() == saved
    conversation.retry().close()
    assert [*conversation.retry()]
    assert contents(conversation.messages) == ["one", "7: one"]


@pytest.mark.parametrize("again", [Conversation.retry, Conversation.go_on])
def test_an_answer_stays_where_the_reply_in_its_place_is_let_go(again: Callable[[Conversation], Any]) -> None:
    conversation, engine = talk()
    answer(conversation, "one")
    again(conversation)
    gc.collect()
    answer(conversation, "two")
    assert contents(engine.asked[-1]) == ["one", "0: one", "two"]


def test_what_is_undone_while_it_is_answered_again_takes_no_place_of_another_message() -> None:
    conversation, _ = talk()
    conversation.stream("one").close()
    answer(conversation, "two")
    conversation.retry()
    conversation.undo()
    assert contents(conversation.transcript().messages) == ["one"]
    answer(conversation, "three")
    assert contents(conversation.messages) == ["one", "three", "0: three"]


def test_a_message_without_an_answer_is_answered_by_retry_or_kept_and_not_sent() -> None:
    conversation, engine = talk()
    conversation.stream("one").close()
    assert conversation.messages == (Message("user", "one"),)
    assert [*conversation.retry()]
    assert contents(conversation.messages) == ["one", "0: one"]
    conversation.stream("two").close()
    answer(conversation, "three")
    assert contents(engine.asked[-1]) == ["one", "0: one", "three"]
    assert contents(conversation.messages) == ["one", "0: one", "two", "three", "0: three"]
    assert contents(conversation.sent) == ["one", "0: one", "three", "0: three"]
    assert conversation.num_tokens == engine.count(conversation.sent)


def test_a_context_that_is_full_is_an_error_and_nothing_was_said() -> None:
    conversation, _ = talk(context_length=10)
    answer(conversation, "a b c")
    with pytest.raises(ContextOverflow, match="11 tokens do not fit the context of 10"):
        conversation.stream("d")
    assert len(conversation.messages) == 2


def test_oldest_rounds_are_dropped_whole_and_said_to_be() -> None:
    conversation, engine = talk(context_length=40, system="be brief", overflow="drop-oldest")
    dropped = []
    for i in range(12):
        reply = conversation.stream(f"message number {i}")
        dropped += reply.dropped
        assert [*reply]
        sent = engine.asked[-1]
        assert engine.count(sent) <= 40
        assert [sent[0].role, sent[1].role, sent[-1].role] == ["system", "user", "user"]
        assert conversation.num_dropped == len(dropped)
        assert conversation.messages[1 : 1 + len(dropped)] == tuple(dropped)
    assert dropped
    assert len(conversation.messages) == 25


def test_dropping_makes_room_for_several_turns_at_once() -> None:
    conversation, _ = talk(context_length=200, overflow="drop-oldest")
    drops = []
    for i in range(60):
        reply = conversation.stream(f"message number {i}")
        drops.append(len(reply.dropped))
        assert [*reply]
    assert 0 < sum(each > 0 for each in drops) <= len(drops) // 4


def test_dropping_makes_room_for_the_beginning_of_an_answer_too() -> None:
    conversation, engine = talk(context_length=40, overflow="drop-oldest")
    for text in ("message number one", "message number two", "long " * 12):
        answer(conversation, text)
    assert conversation.num_dropped == 0
    reply = conversation.go_on()
    assert contents(engine.asked[-1]) == ["long " * 12]
    assert contents(reply.dropped) == contents(conversation.messages[:4])
    assert [*reply]
    assert conversation.rounds[-1].answer == ("0: " + "long " * 12).strip() * 2
    with pytest.raises(ContextOverflow, match="44 tokens do not fit"):
        conversation.stream("one", begun="long " * 42)


def test_what_does_not_even_fit_alone_is_an_error_with_any_policy() -> None:
    conversation, _ = talk(context_length=10, overflow="drop-oldest")
    answer(conversation, "one")
    with pytest.raises(ContextOverflow, match="12 tokens"):
        conversation.stream("a " * 11)
    assert len(conversation.messages) == 2


def test_a_wider_context_or_an_undo_lets_no_more_be_dropped_than_there_is() -> None:
    conversation, _ = talk(context_length=20, overflow="drop-oldest")
    for i in range(6):
        answer(conversation, f"message number {i}")
    while conversation.undo():
        assert conversation.num_dropped <= len(conversation.messages)


def test_saved_and_loaded_is_the_same_conversation(tmp_path: Path) -> None:
    conversation, engine = talk(context_length=30, system="be brief", overflow="drop-oldest")
    for text in ("one two three", "un \x1b[31m \ud800 ✓", "three four five"):
        answer(conversation, text)
    for text in ("unanswered", "again"):
        conversation.stream(text).close()
    conversation.save(tmp_path / "talk.jsonl")
    loaded = Conversation.load(engine, tmp_path / "talk.jsonl", overflow="drop-oldest")  # type: ignore[arg-type]
    assert loaded.transcript() == conversation.transcript()
    assert (loaded.system, loaded.num_dropped) == ("be brief", conversation.num_dropped)
    assert loaded.num_dropped > 0


@pytest.mark.parametrize("bad", ["ask", "", None])
def test_unknown_overflow_policies_are_refused(bad: Any) -> None:
    with pytest.raises(UsageError, match="wanted error or drop-oldest"):
        talk(overflow=bad)


def test_a_message_must_be_text() -> None:
    conversation, _ = talk()
    with pytest.raises(UsageError, match="wanted a text"):
        conversation.stream(b"one")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return load(tiny_model, drafter="suffix", deterministic=True)


def test_a_conversation_answers_as_the_engine_answers_its_messages(engine: Engine) -> None:
    conversation = engine.chat(system="the in", max_tokens=12)
    first = conversation.say("an on")
    second = conversation.say("the")
    messages = [
        Message("system", "the in"),
        Message("user", "an on"),
        Message("assistant", first.text),
        Message("user", "the"),
    ]
    assert engine.generate(messages, max_tokens=12).token_ids == second.token_ids
    assert conversation.num_tokens > second.prompt_tokens


@pytest.mark.parametrize("num_read", [0, 2])
def test_an_answer_that_was_closed_is_given_as_far_as_it_was_read(engine: Engine, num_read: int) -> None:
    conversation = engine.chat(max_tokens=12)
    with conversation.stream("the in") as reply:
        for _ in range(num_read):
            next(reply)
    done = reply.completion()
    assert (done.text, done.finish_reason) == (reply.text, "cancelled")
    assert bool(done.text) == bool(num_read)
    assert done.stats.num_emitted == len(done.token_ids)


def test_an_engine_counts_no_empty_system_message(engine: Engine) -> None:
    assert engine.encode("the in", system="") == engine.encode("the in") != engine.encode("the in", system="an")


def test_special_tokens_that_a_user_types_stay_text(engine: Engine) -> None:
    special = {"<|im_start|>": 1, "<|im_end|>": 2}
    typed = "".join(special)
    plain, spelled = (engine.encode([Message("user", text)]) for text in ("x", typed))
    for token in special.values():
        assert spelled.count(token) == plain.count(token)
    conversation = engine.chat(max_tokens=3)
    reply = conversation.stream(typed)
    assert reply.prompt_tokens == len(spelled)
    reply.close()


def test_context_ends_an_answer_and_the_next_message_makes_room(engine: Engine) -> None:
    conversation = engine.chat(overflow="drop-oldest", max_tokens=8)
    num_dropped = []
    for _ in range(5):
        conversation.say("the in the an " * 25)
        num_dropped.append(conversation.num_dropped)
    assert num_dropped[0] == 0
    assert num_dropped[-1] > 0
    assert conversation.engine.context_length == tiny.CONTEXT


class LoopEngine(WordEngine):
    """Repeats twenty words for ever."""

    model_sampling = SamplingParams(temperature=0.2, top_p=0.9)

    def stream(self, messages: Sequence[Message], *, sampling: SamplingParams, **limits: Any) -> AnswerStream:
        return stream_of(self._endless(), ends_loops=limits["ends_loops"])

    def _endless(self) -> Generator[Chunk, None, None]:
        for i in range(5000):
            yield Chunk(text=f"w{i % 20} ", token_ids=(i % 20,))
        yield Chunk(text="", token_ids=(), finish_reason="length")


def test_a_loop_ends_with_a_reason_of_its_own_where_that_is_asked_for() -> None:
    conversation = Conversation(LoopEngine(), ends_loops=True)  # type: ignore[arg-type]
    reply = conversation.stream("go")
    assert [*reply][-1].finish_reason == "loop"
    assert reply.last is not None
    assert reply.last.finish_reason == "loop"
    assert conversation.transcript().cut_short == ((1, "loop"),)
    assert [*Conversation(LoopEngine()).stream("go")][-1].finish_reason == "length"  # type: ignore[arg-type]


@pytest.mark.slow
def test_an_answer_that_nothing_bounds_ends_where_it_repeats_itself(tiny_model: Path, tmp_path: Path) -> None:
    words = " ".join(["the in a"] * 300)
    with scripted_engine(tiny_model, tmp_path, lambda prompt: words) as engine:
        assert engine.generate("go").finish_reason == engine.chat().say("go").finish_reason == "loop"
        assert engine.generate("go", max_tokens=600).finish_reason == "length"
        assert engine.generate("go", ends_loops=False).finish_reason == "stop"
        assert engine.generate("go", max_tokens=600, ends_loops=True).finish_reason == "loop"


def test_a_loop_ends_at_one_place_with_any_drafter_and_not_where_a_schema_demands_it(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.decoding.repetition._LIMITS", ((1, 8, 96),))
    zeros = {"type": "array", "items": {"enum": [0]}, "minItems": 150, "maxItems": 150}
    lengths = set()
    for drafter in ("none", "suffix"):
        with load(tiny_model, drafter=drafter, draft_length=4) as engine:
            looped = engine.generate("the", logit_bias={5: 100})
            assert looped.finish_reason == "loop"
            lengths.add(len(looped.token_ids))
            assert engine.generate("the", schema=zeros).parse() == [0] * 150
    assert lengths == {128}


def test_the_sampling_is_the_models_unless_stated_and_goes_with_the_conversation(tmp_path: Path) -> None:
    engine: Any = LoopEngine()
    assert Conversation(engine).sampling == LoopEngine.model_sampling
    warm = SamplingParams(temperature=0.7, seed=3)
    conversation = Conversation(engine, sampling=warm)
    answer(conversation, "go")
    conversation.save(tmp_path / "talk")
    assert Conversation.load(engine, tmp_path / "talk").sampling == warm
    assert Conversation.load(engine, tmp_path / "talk", sampling=SamplingParams()).sampling == SamplingParams()
    damaged = (tmp_path / "talk").read_text().replace('"temperature": 0.7', '"temperature": -1')
    (tmp_path / "talk").write_text(damaged)
    with pytest.raises(UsageError, match="sampling makes no sense"):
        Conversation.load(engine, tmp_path / "talk")


def test_an_answer_is_given_its_beginning_goes_on_and_is_changed() -> None:
    conversation, engine = talk()
    reply = conversation.stream("one", begun="Well, ")
    assert "".join(chunk.text for chunk in reply) == "0: one"
    assert (engine.begun, conversation.rounds[-1].answer) == ("Well, ", "Well, 0: one")
    conversation.go_on().close()
    assert conversation.rounds[-1].answer == "Well, 0: one"
    assert [*conversation.go_on()][-1].finish_reason == "stop"
    assert (engine.begun, conversation.rounds[-1].answer) == ("Well, 0: one", "Well, 0: one0: one")
    assert conversation.transcript().cut_short == ()
    conversation.rewrite("changed ")
    reply = conversation.go_on()
    next(reply)
    assert conversation.transcript().messages[-1].content == "changed 0: "
    reply.close()
    assert contents(conversation.messages) == ["one", "changed 0: "]
    answer(conversation, "two")
    assert contents(engine.asked[-1]) == ["one", "changed 0: ", "two"]
    assert engine.begun is None


def test_an_answer_that_was_cut_within_a_character_goes_on_before_it() -> None:
    conversation, engine = talk()
    answer(conversation, "one")
    conversation.rewrite("caf\ufffd")
    assert [*conversation.go_on()]
    assert (engine.begun, conversation.rounds[-1].answer) == ("caf", "caf0: one")
    conversation.rewrite("tea \ufffd")
    conversation.go_on().close()
    assert engine.begun == "tea"
    conversation.rewrite("\ufffd")
    assert [*conversation.go_on()]
    assert (engine.begun, conversation.rounds[-1].answer) == (None, "0: one")


def test_an_answer_in_a_format_goes_on_outside_the_reasoning() -> None:
    conversation, engine = talk()
    engine.reasons = True
    answer(conversation, "one")
    conversation.go_on().close()
    assert engine.begun == "<think>0: one"
    conversation.go_on(schema={"const": 4}).close()
    assert engine.begun == "0: one"
    assert [*conversation.stream("one", schema={"const": 4})]
    conversation.go_on().close()
    assert engine.begun == "0: one"
    answer(conversation, "one")
    conversation.response_format = {"type": "json_object"}
    conversation.go_on().close()
    assert engine.begun == "0: one"


def test_a_changed_answer_is_no_reasoning_unless_that_had_no_end() -> None:
    conversation, engine = talk()
    engine.reasons = True
    for text, begun in [("thought", "<think>Yes,"), ("thought </think> No.", "Yes,")]:
        answer(conversation, text)
        conversation.rewrite("Yes,")
        conversation.go_on().close()
        assert engine.begun == begun
    conversation.stream("one").close()
    conversation.rewrite("Yes,")
    conversation.go_on().close()
    assert engine.begun == "Yes,"


def test_what_is_restored_goes_on_within_the_reasoning_only_where_it_was_cut_short() -> None:
    conversation, engine = talk()
    engine.reasons = True
    with conversation.stream("one") as reply:
        next(reply)
    conversation.restore(conversation.transcript())
    conversation.go_on().close()
    assert engine.begun == "<think>0: "
    conversation.rewrite("so it is </think> No.")
    conversation.rewrite("Yes,")
    conversation.restore(conversation.transcript())
    conversation.go_on().close()
    assert engine.begun == "Yes,"


def test_reasoning_goes_on_where_the_format_of_the_preset_is_left_out(tiny_model: Path, tmp_path: Path) -> None:
    template = "{{ messages[-1].content }}<|im_start|>assistant\n<think>\n{% if 1 %}{% endif %}"
    said = "<think>\nLet me see. It is so.\n</think>\n\nFour."
    with scripted_engine(tiny_model, tmp_path, lambda prompt: said, template) as engine:
        engine.preset = Preset(name="four", model="tiny", schema='{"const": 4}')
        conversation = engine.chat()
        assert conversation.say("2 + 2?").text == "4"
        conversation.response_format = None
        with conversation.stream("2 + 2?") as reply:
            while "me" not in reply.text:
                next(reply)
        conversation.go_on().completion()
        assert conversation.rounds[-1].answer == said.removeprefix("<think>\n")


@pytest.mark.parametrize("opening", ["", "<think>\n"])
def test_reasoning_that_is_cut_short_is_never_taken_for_the_answer(
    tiny_model: Path, tmp_path: Path, opening: str
) -> None:
    template = f"{{{{ messages[-1].content }}}}<|im_start|>assistant\n{opening}{{% if 1 %}}{{% endif %}}"
    said = "<think>\nLet me see. It is so.\n</think>\n\nFour."
    with scripted_engine(tiny_model, tmp_path, lambda prompt: said, template) as engine:
        conversation = engine.chat()
        with conversation.stream("2 + 2?") as reply:
            while "me" not in reply.text:
                next(reply)
            saved = conversation.transcript()
        for messages in (saved.messages, conversation.messages, conversation.transcript().messages):
            reasoning, answer = split_reasoning(messages[-1].content)
            assert (reasoning.strip(), answer) == (reply.text.removeprefix("<think>\n").strip(), "")
        conversation.go_on().completion()
        assert conversation.rounds[-1].answer == said.removeprefix(opening)


def test_nothing_goes_on_or_is_changed_before_there_is_an_answer() -> None:
    conversation, _ = talk()
    with pytest.raises(UsageError, match="no answer to continue"):
        conversation.go_on()
    with pytest.raises(UsageError, match="needs a message"):
        conversation.rewrite("text")


def test_a_conversation_is_cut_to_its_first_messages() -> None:
    conversation, engine = talk()
    for text in ("one", "two", "three"):
        answer(conversation, text)
    conversation.keep(1)
    assert contents(conversation.messages) == ["one", "0: one"]
    answer(conversation, "other")
    assert contents(engine.asked[-1]) == ["one", "0: one", "other"]


@pytest.mark.parametrize("number", [-1, "1", True, 1.0])
def test_a_conversation_is_cut_to_a_number_of_messages(number: Any) -> None:
    conversation, _ = talk()
    answer(conversation, "one")
    with pytest.raises(UsageError, match="wanted a whole number from 0"):
        conversation.keep(number)
    assert contents(conversation.messages) == ["one", "0: one"]


def test_a_context_that_the_user_bounds(tiny_model: Path, tmp_path: Path) -> None:
    with load(tiny_model, drafter="none", context=40, home=tmp_path) as engine:
        assert engine.context_length == 40
        assert engine.generate("the in").finish_reason == "context"
    with pytest.raises(UsageError, match="has a context of 700 tokens"):
        load(tiny_model, drafter="none", context=701, home=tmp_path)
    with pytest.raises(UsageError, match="wanted a whole number of tokens, 16 at least"):
        load(tiny_model, drafter="none", context=3, home=tmp_path)
