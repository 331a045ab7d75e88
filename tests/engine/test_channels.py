"""Answers in messages with channels, as gpt-oss writes them: reasoning, calls and text as of any other model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted import scripted_engine

from edgespec import Engine, Message, UsageError, has_spent
from edgespec.text.chat_template import CallMessage, ResultMessage
from edgespec.text.tokenizer import TextStream, Tokenizer
from edgespec.tools import channels
from edgespec.tools.channels import read_channels
from edgespec.tools.tool import ToolCall

HEADER = "?<|end|><|start|>assistant"  # behind a question
# A short template in the manner of gpt-oss.
TEMPLATE = (
    "{% if tools %}<|start|>developer<|message|>{% for tool in tools %}{{ tool.function.name }} {% endfor %}"
    "<|end|>{% endif %}{% for m in messages %}{% if m.tool_calls %}{% if m.content and m.thinking %}"
    "{{ raise_exception('content and thinking') }}{% endif %}"
    "{% if m.content or m.thinking %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.content or m.thinking }}<|end|>{% endif %}{% set call = m.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
    "{{ call.arguments | tojson }}<|call|>{% elif m.role == 'assistant' %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% elif m.role == 'tool' %}"
    "<|start|>functions.x to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>{% else %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
WEATHER = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ANALYSIS, FINAL, NEXT = channels.ANALYSIS, channels.FINAL, channels.NEXT
CALLS = {
    "usual": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
    "recipient first": " to=functions.get_weather<|channel|>commentary json<|message|>",
    "without a type": "<|channel|>commentary to=functions.get_weather<|message|>",
    "of the analysis": "<|channel|>analysis to=functions.get_weather code<|message|>",
}
ROME = '{"city": "Rome"}'
Make = Callable[..., Engine]


@pytest.fixture
def make(tiny_model: Path, tmp_path: Path) -> Make:
    def make(answer: str, **options: Any) -> Engine:
        given = (tiny_model, tmp_path, lambda prompt: answer, TEMPLATE, channels.MARKS)
        return scripted_engine(*given, header=HEADER, **options)

    return make


def prompt_of(engine: Engine, turns: Sequence[Any], **options: Any) -> str:
    return engine.tokenizer.decode(engine.encode(turns, **options), engine.tokenizer.special_tokens.values())


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (f"{FINAL}Hi.", "Hi."),
        (f"{ANALYSIS}Hm.{NEXT}{FINAL}Hi.<|return|>", "<think>\nHm.\n</think>\n\nHi."),
        (f"{ANALYSIS}Hm.{NEXT}{ANALYSIS}So.{NEXT}{FINAL}Hi.", "<think>\nHm.\n\nSo.\n</think>\n\nHi."),
        (f"{ANALYSIS}Hm.", "<think>\nHm."),
        (f"{ANALYSIS}Hm.<|end|><|start|>assist", "<think>\nHm."),
        (f"<|channel|>commentary<|message|>I look.{NEXT}{FINAL}Hi.", "I look.\n\nHi."),
        ("Hm. I see.", "Hm. I see."),
        (" to=the point", " to=the point"),
        (" today", " today"),
        (f"so it is.{NEXT}{FINAL}Hi.", "so it is.\n</think>\n\nHi."),
        (f"{ANALYSIS}Hm.<|channel|>final<|message|>Hi.", "<think>\nHm.\n</think>\n\nHi."),
        ("<|channel|>final", ""),
    ],
)
def test_messages_are_one_text(written: str, text: str) -> None:
    assert read_channels(written) == text


def test_marks_that_are_spelled_as_text_stay_text(make: Make) -> None:
    with make("") as engine:
        tokenizer: Tokenizer = engine.tokenizer
        tokens = [*tokenizer.encode(f"{ANALYSIS}a", special=True), *tokenizer.encode("<|end|>é\N{ROCKET}")]
        stream = TextStream(tokenizer)
        assert "".join(stream.push([token]) for token in tokens) + stream.flush() == "<think>\na<|end|>é\N{ROCKET}"
        raw = TextStream(tokenizer, before=tokens[:1])
        assert raw.push(tokens[1:]) + raw.flush() == "analysisa<|end|>é\N{ROCKET}"


def test_reasoning_and_answer_are_told_apart(make: Make) -> None:
    with make(f"{ANALYSIS}Let me see.{NEXT}{FINAL}Four.") as engine:
        assert engine.can_think
        answer = engine.generate("2 + 2?")
        assert (answer.reasoning, answer.answer) == ("Let me see.", "Four.")
        assert "".join(chunk.text for chunk in engine.stream("2 + 2?")) == answer.text
        assert engine.generate("2 + 2?", stop=channels.MARKS).text == answer.text, "no message ends the answer"
        said = [Message("user", "Q"), Message("assistant", "Four.", "Let me see."), Message("user", "Why?")]
        assert f"<|start|>assistant{FINAL}Four.<|end|>" in prompt_of(engine, said)


@pytest.mark.parametrize("header", CALLS.values(), ids=CALLS)
def test_calls_are_read_however_their_header_is_written(make: Make, header: str) -> None:
    with make(f"{ANALYSIS}I may write {ROME}.{NEXT}{header}{ROME}") as engine:
        answer = engine.generate("Weather in Rome?", tools=[WEATHER])
        assert engine.tool_format == "harmony, by the chat template"
        assert [(call.name, call.parse()) for call in answer.tool_calls] == [("get_weather", {"city": "Rome"})]
        assert answer.finish_reason == "tool_calls"
        assert answer.reasoning == f"I may write {ROME}."
        assert answer.answer.strip() == ""


def test_reasoning_goes_back_with_the_call_that_it_led_to(make: Make) -> None:
    call = ToolCall(id="a", name="get_weather", arguments=ROME)
    turns = [Message("user", "Q"), CallMessage("I look.", (call,), "Hm."), ResultMessage("Rain", "a")]
    with make("") as engine:
        text = prompt_of(engine, turns, tools=[WEATHER])
    assert (
        f"{ANALYSIS}Hm.\n\nI look.{NEXT} to=functions.get_weather<|channel|>commentary json<|message|>{ROME}"
        in text
    )
    assert "Rain" in text


def test_an_answer_that_is_begun_goes_on_in_its_channel(make: Make) -> None:
    with make(f"{FINAL}Four, I say.") as engine:
        assert engine.generate("2 + 2?", prefill="Four,").text == " I say."
    with make(f"{ANALYSIS}Let me see.{NEXT}{FINAL}Four.") as engine:
        answer = engine.generate("2 + 2?", prefill="<think>\nLet me")
        assert answer.text == " see.\n</think>\n\nFour."
        assert engine.generate("2 + 2?", prefill="<think>\nLet me see.\n</think>\n\nFo").text == "ur."


def test_a_format_is_that_of_the_answer(make: Make) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}
    with make(f"{FINAL}4") as engine:
        assert engine.generate("2 + 2?", response_format=schema).text == "4"


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_calls_can_be_ensured(make: Make, choice: str) -> None:
    tool = {"type": "function", "function": WEATHER | {"strict": True}}
    thought = f"{ANALYSIS}Hm.{NEXT}" if choice == "auto" else ""
    with make(f"{thought}{CALLS['usual']}{ROME}") as engine:
        answer = engine.generate("Rome?", tools=[tool], tool_choice=choice, max_tokens=1500)
        assert answer.reasoning == ("Hm." if thought else "")
        assert [call.parse() for call in answer.tool_calls] == [{"city": "Rome"}]


def test_reasoning_can_be_bounded(make: Make) -> None:
    with make(f"{ANALYSIS}Let me see if that is so.{NEXT}{FINAL}Four.") as engine:
        whole = engine.generate("2 + 2?")
        cut = engine.generate("2 + 2?", thinking_budget=4)
        assert 0 < len(cut.reasoning) < len(whole.reasoning)
        assert whole.reasoning.startswith(cut.reasoning)
        for answer, is_spent in ((whole, False), (cut, True)):
            tokens = np.array(answer.token_ids, np.int32)
            assert has_spent(tokens, 4 if is_spent else 100, engine.tokenizer, is_open=False) is is_spent
        with pytest.raises(UsageError, match="is banned"):
            engine.generate("2 + 2?", thinking_budget=4, banned=["final"])
