"""Conversations in which tools are called: what the model is sent, what is remembered, and what is saved."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rule_chat import RuleEngine
from scripted import scripted_engine

from edgespec import ContextOverflow, Message, Round, UsageError
from edgespec.engine.conversation import Conversation
from edgespec.text.chat_template import CallMessage, ResultMessage


def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"sunny in {city}"


CALL = {"call": "weather", "arguments": {"city": "Rome"}}
SCRIPT = {
    "Rain?": ["I look. ", CALL],
    "sunny in Rome": ["It is ", "sunny."],
    "again": ["Still sunny."],
    "two": [CALL, CALL],
    "talk": ["Well."],
}


class Engine(RuleEngine):
    """Remembers what it was sent."""

    def __init__(self, context_length: int = 10_000) -> None:
        super().__init__(SCRIPT)
        self.context_length = context_length
        self.asked: list[Any] = []
        self.limits: list[dict[str, Any]] = []

    def stream(self, messages: Any, **limits: Any) -> Any:
        self.asked.append(messages)
        self.limits.append(limits)
        return super().stream(messages, **limits)


def talk(context_length: int = 10_000, **settings: Any) -> tuple[Conversation, Engine]:
    engine: Any = Engine(context_length)
    return Conversation(engine, tools=[weather], **settings), engine


def test_results_go_back_and_the_answer_ends_the_round() -> None:
    conversation, engine = talk()
    first = conversation.say("Rain?")
    assert (first.text, first.finish_reason) == ("I look. ", "tool_calls")
    (call,) = conversation.calls
    assert call.parse(weather) == {"city": "Rome"}
    assert conversation.rounds[0] == Round("Rain?", "I look. ", cut_short="tool_calls")
    second = conversation.give_results([weather(**call.parse(weather))]).completion()
    assert (second.text, conversation.calls) == ("It is sunny.", ())
    sent = (
        Message("user", "Rain?"),
        CallMessage("I look. ", (call,)),
        ResultMessage("sunny in Rome", call.id, "weather"),
    )
    assert engine.asked[1] == sent
    assert conversation.messages == (*sent, Message("assistant", "It is sunny."))
    assert conversation.rounds[0].steps == sent[1:]
    assert engine.limits[1]["whole_tool_calls"]
    assert [tool.__name__ for tool in engine.limits[1]["tools"]] == ["weather"]
    conversation.say("again")
    assert engine.asked[2] == (*conversation.messages[:4], Message("user", "again"))


def test_it_is_saved_with_its_calls_and_goes_on(tmp_path: Path) -> None:
    conversation, engine = talk()
    conversation.say("Rain?")
    conversation.give_results(["sunny in Rome"]).completion()
    conversation.save(tmp_path / "talk")
    lines = [json.loads(line) for line in (tmp_path / "talk").read_text().splitlines()]
    assert lines[2]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert (lines[3]["role"], lines[3]["content"], lines[3]["name"]) == ("tool", "sunny in Rome", "weather")
    loaded = Conversation.load(engine, tmp_path / "talk")
    assert loaded.rounds == conversation.rounds
    assert loaded.say("again").text == "Still sunny."
    damaged = (tmp_path / "talk").read_text().replace('"tool_calls": [', '"tool_calls": [3, ')
    (tmp_path / "talk").write_text(damaged)
    with pytest.raises(UsageError, match=r"line 3: tool_calls has 3"):
        Conversation.load(engine, tmp_path / "talk")


def test_calls_without_results_are_neither_sent_nor_saved_but_what_was_written_before_them() -> None:
    conversation, engine = talk()
    conversation.say("Rain?")
    saved = conversation.transcript()
    written = (Message("user", "Rain?"), Message("assistant", "I look. "))
    assert saved.messages == written
    assert conversation.say("talk").text == "Well."
    assert engine.asked[-1] == (*written, Message("user", "talk"))
    assert conversation.calls == ()
    conversation.restore(saved)
    assert conversation.retry().completion().finish_reason == "tool_calls"
    assert len(conversation.calls) == 1


@pytest.mark.parametrize("results", [[], ["a"], ["a", "b", "c"], ["a", 3], "ab", 2])
def test_each_call_has_one_result(results: Any) -> None:
    conversation, _ = talk()
    with pytest.raises(UsageError, match="wanted a text for each of the 0 calls"):
        conversation.give_results(["a"])
    conversation.say("two")
    with pytest.raises(UsageError, match="wanted a text for each of the 2 calls"):
        conversation.give_results(results)
    assert conversation.give_results(["no", "sunny in Rome"]).completion().text == "It is sunny."


def test_results_that_do_not_fit_are_not_given() -> None:
    conversation, _ = talk(context_length=12)
    conversation.say("Rain?")
    before = conversation.rounds
    with pytest.raises(ContextOverflow):
        conversation.give_results(["word " * 20])
    assert conversation.rounds == before
    conversation.stream("talk").close()
    conversation.undo()
    assert conversation.give_results(["sunny in Rome"]).completion().text == "It is sunny."


def test_commands_on_answers_keep_or_drop_their_calls() -> None:
    conversation, engine = talk()
    conversation.say("Rain?")
    conversation.give_results(["sunny in Rome"]).completion()
    steps = conversation.rounds[0].steps
    conversation.rewrite("It is")
    assert conversation.rounds[0].steps == steps
    engine._script = {**SCRIPT, "sunny in Rome|It is": [" warm."]}
    assert conversation.go_on().completion().text == " warm."
    assert conversation.rounds[0][:3] == ("Rain?", "It is warm.", steps)
    assert conversation.retry().completion().tool_calls != ()
    assert conversation.rounds[0].steps == ()
    conversation.undo()
    assert conversation.calls == ()


def test_a_message_that_is_put_back_has_its_calls_and_seeds_again() -> None:
    conversation, _ = talk()
    conversation.say("talk")
    conversation.say("Rain?")
    for _ in range(2):
        conversation.retry().completion()
    before, calls = conversation._now, conversation.calls
    removed = conversation.undo()
    assert removed
    assert conversation.calls == ()
    conversation.redo(removed)
    assert (conversation._now, conversation.calls) == (before, calls)
    assert conversation.undo() is removed
    conversation.say("talk")
    conversation.redo(removed)
    assert conversation.calls == ()


def test_an_answer_that_is_rewritten_while_a_message_is_away_has_no_calls_again() -> None:
    conversation, _ = talk()
    conversation.say("Rain?")
    conversation.say("talk")
    removed = conversation.undo()
    assert removed
    assert conversation.calls
    conversation.rewrite("It will not rain.")
    conversation.redo(removed)
    conversation.undo()
    assert conversation.calls == ()


def test_calls_alone_are_no_answer() -> None:
    conversation, engine = talk()
    conversation.say("two")
    assert conversation.transcript().messages == (Message("user", "two"),)
    conversation.say("talk")
    assert engine.asked[-1] == (Message("user", "talk"),)


def test_an_answer_that_goes_on_to_a_call_stays_where_that_gets_no_result() -> None:
    conversation, engine = talk()
    engine._script = {**SCRIPT, "talk|Well.": [" I look.", CALL], "talk|Well. I look.": [" No."]}
    conversation.say("talk")
    conversation.go_on().completion()
    assert len(conversation.calls) == 1
    assert conversation.transcript().messages[1:] == (Message("assistant", "Well. I look."),)
    conversation.go_on().completion()
    assert conversation.calls == ()
    assert conversation.rounds == (Round("talk", "Well. I look. No."),)


def test_calls_and_steps_stay_where_the_answer_in_their_place_has_no_word() -> None:
    conversation, engine = talk()
    engine._script = {**SCRIPT, "sunny in Rome": [CALL]}
    conversation.say("Rain?")
    conversation.give_results(["sunny in Rome"]).completion()
    calls, rounds = conversation.calls, conversation.rounds
    saved = conversation.transcript()
    with conversation.retry():
        assert conversation.calls == ()
        assert conversation.transcript() == saved
    assert (conversation.calls, conversation.rounds) == (calls, rounds)
    assert calls != ()
    assert len(rounds[0].steps) == 2


def undo_and_redo(conversation: Conversation) -> None:
    removed = conversation.undo()
    assert removed
    conversation.redo(removed)


@pytest.mark.parametrize("put_back", [undo_and_redo, lambda conversation: conversation.retry().close()])
def test_calls_that_are_put_back_stand_behind_the_steps_of_their_own_answer(
    put_back: Callable[[Conversation], None],
) -> None:
    conversation, engine = talk()
    engine._script = {**SCRIPT, "Rain?": [CALL]}
    conversation.say("Rain?")
    conversation.give_results(["sunny in Rome"]).completion()
    conversation.retry().completion()
    (call,) = conversation.calls
    put_back(conversation)
    conversation.give_results(["sunny in Rome"]).completion()
    assert engine.asked[-1] == (
        Message("user", "Rain?"),
        CallMessage("", (call,)),
        ResultMessage("sunny in Rome", call.id, "weather"),
    )


def test_old_rounds_leave_with_their_calls() -> None:
    conversation, engine = talk(context_length=40, overflow="drop-oldest", max_tokens=4)
    conversation.say("Rain?")
    conversation.give_results(["sunny in Rome"]).completion()
    for _ in range(8):
        conversation.say("talk")
    assert conversation.num_dropped >= 4
    assert engine.asked[-1][0].role == "user"
    restored = Conversation(engine)
    restored.restore(conversation.transcript())
    assert restored.num_dropped == conversation.num_dropped


def test_what_is_no_tool_is_refused() -> None:
    engine: Any = Engine()
    for tools in (3, [3], [weather, weather]):
        with pytest.raises(UsageError, match="tools"):
            Conversation(engine, tools=tools)  # type: ignore[arg-type]
    conversation = Conversation(engine)
    with pytest.raises(UsageError, match="tools"):
        conversation.tools = [3]


def test_through_an_engine_what_the_model_is_told_of_tools_counts(tiny_model: Path, tmp_path: Path) -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'

    def answer(prompt: str) -> str:
        return "It is sunny." if "sunny in Rome" in prompt else text

    make: Callable[..., Any] = scripted_engine
    with make(tiny_model, tmp_path, answer) as engine:
        assert engine.takes_tools
        conversation = engine.chat(tools=[weather])
        bare = engine.count("Rain?")
        assert engine.count("Rain?", tools=[weather]) > bare + 20
        conversation.say("Rain?")
        assert conversation.num_tokens > bare + 20
        (call,) = conversation.calls
        assert conversation.give_results([weather(**call.parse(weather))]).completion().text == "It is sunny."
