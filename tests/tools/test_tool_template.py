"""What is found out about chat templates that take tools, each in a way of its own."""

import json
from collections.abc import Callable, Iterator
from re import findall
from typing import Any

import pytest

from edgespec.errors import ConversationError, ModelError
from edgespec.text.chat_template import CallMessage, Message, ResultMessage, TemplateProcess, names_for
from edgespec.tools.tool import ToolCall, parse_tools
from edgespec.tools.tool_template import ToolTemplate, fit_messages, probe_template

TOOLS = parse_tools(
    [{"name": "find", "description": "Finds <it>.", "parameters": {"properties": {"what": {"type": "string"}}}}]
)
CALL = ToolCall(id="call_1234567890", name="find", arguments='{"what": "é <b>"}')
STATED = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
ROLES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
HERMES = (
    STATED + ROLES + "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ ARGUMENTS }}}\n</tool_call>{% endfor %}'
    "{% endfor %}<assistant>"
)
AS_OBJECT, AS_TEXT = "c.function.arguments | tojson", "c.function.arguments + ''"


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess()
    yield process
    process.close()


@pytest.fixture
def written(process: TemplateProcess) -> Callable[..., str]:
    """What a template makes of a conversation with a call, tried out before."""

    def written(template: str, said: str = "", *, system: str | None = None) -> str:
        how = probe_template(template, process.render, {})
        turns: list[Any] = [] if system is None else [Message("system", system)]
        turns += [Message("user", "Q"), CallMessage(said, (CALL,)), ResultMessage("RESULT", CALL.id)]
        return process.render(template, **names_for(how, turns, TOOLS, str), add_generation_prompt=True)

    return written


def test_arguments_are_given_as_the_template_takes_them(
    process: TemplateProcess, written: Callable[..., str]
) -> None:
    for arguments, has_text in ((AS_OBJECT, False), (AS_TEXT, True)):
        template = HERMES.replace("ARGUMENTS", arguments)
        how = probe_template(template, process.render, {})
        assert how == ToolTemplate(
            variable="tools", writes_calls=True, writes_both=True, has_text_arguments=has_text, takes_results=True
        )
        assert '"arguments": {"what": "é <b>"}}' in written(template)
        assert "<tool>RESULT" in written(template)
        assert "Finds <it>." in written(template)


def test_a_template_may_want_none_for_no_content_and_drop_what_is_said(written: Callable[..., str]) -> None:
    template = HERMES.replace("ARGUMENTS", AS_OBJECT).replace(
        "{{ m.content }}{% for c in m.tool_calls or [] %}",
        "{% if m.content is not none %}{{ m.content }}{% endif %}"
        "{% for c in (m.tool_calls or []) if m.content is none %}",
    )
    assert written(template).count("<tool_call>") == 1
    said = written(template, "I look.")
    assert "I look.\n<tool_call>" in said
    assert said.count("<tool_call>") == 1


def test_ids_are_nine_characters_where_a_template_wants_that(written: Callable[..., str]) -> None:
    template = HERMES.replace("ARGUMENTS", AS_OBJECT).replace(
        "{% for c in",
        "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
        "{% endfor %}{% if m.role == 'tool' %}[{{ m.tool_call_id }}]{% endif %}{% for c in",
    )
    (short,) = {part.split("]")[0] for part in written(template).split("[")[1:]}
    assert len(short) == 9
    assert short.isalnum()


def test_a_template_that_writes_no_calls_gets_them_as_text(written: Callable[..., str]) -> None:
    template = "{# <tool_call> #}" + STATED + ROLES + "{% endfor %}<assistant>"
    assert '<assistant><tool_call>\n{"name": "find", "arguments": {"what": "é <b>"}}\n</tool_call>' in written(
        template
    )


def test_tools_may_stand_in_the_system_message(process: TemplateProcess, written: Callable[..., str]) -> None:
    template = ROLES + "{% if m.tools %}<|tool|>{{ m.tools }}{% endif %}{% endfor %}<assistant>"
    how = probe_template(template, process.render, {})
    assert (how.format.name, how.variable) == ("phi-4-mini", "message")
    assert '<system>Be kind.<|tool|>[{"name": "find"' in written(template, system="Be kind.")
    assert '<system><|tool|>[{"name": "find"' in written(template)


def test_arguments_are_described_where_a_template_demands_it(written: Callable[..., str]) -> None:
    demanding = (
        "{% for t in tools or [] %}{% for p in t.function.parameters.properties.values() %}"
        "{{ p.description + ';' }}{% endfor %}{% endfor %}" + HERMES.replace("ARGUMENTS", AS_OBJECT)
    )
    assert '"what": {"type": "string", "description": ""}' in written(demanding)


def test_without_tools_a_system_message_tells_of_them_or_the_first_of_the_user(
    process: TemplateProcess, written: Callable[..., str]
) -> None:
    plain = ROLES + "{% endfor %}<assistant>"
    found = written(
        plain.replace("{{ m.content }}", "{% if m.role == 'tool' %}{{ 1 / 0 }}{% endif %}{{ m.content }}")
    )
    assert found.startswith("<system>You can call")
    assert "<user><tool_response>\nRESULT\n</tool_response>" in found
    alone = plain.replace(
        "<{{ m.role }}>",
        "{% if m.role in ('system', 'tool') %}{{ raise_exception('no') }}{% endif %}<{{ m.role }}>",
    )
    how = probe_template(alone, process.render, {})
    assert how.description == "hermes, by a system message of edgespec"
    found = written(alone)
    assert found.startswith("<user>You can call")
    assert found.count("<user>") == 2
    assert "Q<assistant>" in found


def test_a_system_message_that_the_template_drops_stays_in_its_place(written: Callable[..., str]) -> None:
    """A template may drop it there, and refuse it elsewhere."""
    rest = "(messages[1:] if messages[0].role == 'system' else messages)"
    refusing = "{% if m.role in ('system', 'tool') %}{{ raise_exception('no') }}{% endif %}"
    dropping = ROLES.replace("messages %}", rest + " %}" + refusing)
    found = written(dropping + "{% endfor %}<assistant>", system="S")
    assert found.startswith("<user>You can call")
    assert "<S>" not in found
    assert "in words.\n\nQ" in found


def test_a_template_that_renders_nothing_is_told_by_a_system_message() -> None:
    def refuse(template: str, **names: Any) -> str:
        raise ModelError("no")

    how = probe_template("{# <tool_call> #} tools", refuse, {})
    assert (how.variable, how.writes_calls, how.takes_results) == (None, False, False)
    assert probe_template(None, refuse, {}) == ToolTemplate()


def test_results_are_responses_of_the_calls_where_a_template_reads_these(process: TemplateProcess) -> None:
    """Gemma 4's templates read results as `tool_responses`, and end no turn behind them."""
    template = (
        "{% for tool in tools or [] %}<|tool>{{ tool.function.name }}{% endfor %}{% set ns = namespace(last='') %}"
        "{% for m in messages %}<|turn>{{ m.role }}\n{% for c in m.tool_calls or [] %}<|tool_call>call:"
        "{{ c.function.name }}{{ '{' }}{% for k, v in c.function.arguments | items %}{{ k }}:<|\"|>{{ v }}<|\"|>"
        "{% endfor %}}<tool_call|>{% endfor %}{% for r in m.tool_responses or [] %}<|tool_response>{{ r.name }}="
        "{{ r.response }}<tool_response|>{% set ns.last = 'r' %}{% endfor %}{{ m.content }}"
        "{% if m.content or not m.tool_responses %}<turn|>{% set ns.last = '' %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt and not ns.last %}<|turn>model{% endif %}"
    )
    render = fit_messages(template, process.render, {})
    how = probe_template(template, render, {})
    assert (how.format.name, how.takes_results, how.writes_calls) == ("gemma4", True, True)
    other = ToolCall(id="call_2", name="look", arguments="{}")
    turns = [
        Message("user", "Q"),
        CallMessage("One moment.", (CALL, other)),
        ResultMessage("42", CALL.id),
        ResultMessage('{"b": [1]}', other.id),
    ]
    written = render(template, **names_for(how, turns, TOOLS, str), add_generation_prompt=True)
    said, calls = written.split("<turn|>")[1:]
    assert said == "<|turn>assistant\nOne moment."
    assert calls.endswith(
        "call:look{}<tool_call|><|tool_response>find=42<tool_response|>"
        "<|tool_response>look={'b': [1]}<tool_response|>"
    )
    plain = render(template, messages=[{"role": "user", "content": "Q"}], add_generation_prompt=True)
    assert plain == "<|turn>user\nQ<turn|><|turn>model"


def test_results_of_several_calls_are_one_turn_where_turns_alternate() -> None:
    how = ToolTemplate()
    turns = [Message("user", "Q"), CallMessage("", (CALL, CALL)), *[ResultMessage(text, CALL.id) for text in "ab"]]
    messages = names_for(how, turns, (), str)["messages"]
    assert [each["role"] for each in messages] == ["user", "assistant", "user"]
    assert messages[-1]["content"].count("<tool_response>") == 2


TWO = (CALL, ToolCall(id="call_2", name="find", arguments='{"what": "two"}'))
FIRST_CALL = HERMES.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]").replace("ARGUMENTS", AS_OBJECT)
REFUSING = "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}{% for c in"


@pytest.mark.parametrize(
    "template", [FIRST_CALL, HERMES.replace("{% for c in", REFUSING).replace("ARGUMENTS", AS_OBJECT)]
)
@pytest.mark.parametrize("has_ids", [True, False])
def test_several_calls_are_a_message_each_where_a_template_takes_one(
    process: TemplateProcess, template: str, has_ids: bool
) -> None:
    how = probe_template(template, process.render, {})
    assert how.has_one_call
    results = [ResultMessage(f"R{number}", call.id if has_ids else "") for number, call in enumerate(TWO)]
    given = results[::-1] if has_ids else results
    turns = [Message("user", "Q"), CallMessage("I look.", TWO, "T"), *given, Message("user", "and?")]
    messages = names_for(how, turns, TOOLS, str)["messages"]
    found = process.render(template, messages=messages, add_generation_prompt=True)
    places = [
        found.index(text) for text in ("<user>Q", "I look.", "é <b>", "<tool>R0", '"two"', "<tool>R1", "and?")
    ]
    assert places == sorted(places)
    assert [message.get("reasoning_content") for message in messages[1:5]] == ["T", None, None, None]


def test_results_that_answer_no_call_stay_behind_calls_in_messages_of_their_own() -> None:
    how = ToolTemplate(writes_calls=True, takes_results=True, has_one_call=True)
    turns = [CallMessage("", TWO), *(ResultMessage(text, TWO[0].id) for text in "ab"), ResultMessage("c", "other")]
    messages = names_for(how, turns, (), str)["messages"]
    assert [message["content"] for message in messages] == ["", "a", "", "b", "c"]
    assert [call["id"] for message in messages for call in message.get("tool_calls", ())] == [
        call.id for call in TWO
    ]


ALONE = "{% if m.content and m.thinking and m.tool_calls %}{{ raise_exception('both') }}{% endif %}"


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        ("{{ m.reasoning_content }}{{ m.content }}", "THOUGHTI look."),
        ("{{ m.reasoning or m.reasoning_content }}{{ m.content }}", "THOUGHTI look."),
        ("{% if m.thinking %}{{ m.thinking }}|{% endif %}{{ m.content }}", "THOUGHT|I look."),
        (ALONE + "{{ m.thinking or m.content }}", "THOUGHT\n\nI look."),
        ("{{ m['thought'] }}{{ m.content }}", "THOUGHTI look."),
        (
            "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
            "[{{ part.type }}]{{ part[part.type] }}{% endfor %}{% endif %}{# 'thinking' text #}",
            "[thinking]THOUGHT[text]I look.",
        ),
        ("{{ m.content }}{# thinking #}", "I look."),
    ],
)
def test_reasoning_before_a_call_is_given_as_the_template_reads_it(
    process: TemplateProcess, reads: str, expected: str
) -> None:
    template = HERMES.replace("{{ m.content }}", reads).replace("ARGUMENTS", AS_OBJECT)
    render = fit_messages(template, process.render, {})
    how = probe_template(template, render, {})
    turns = [Message("user", "Q"), CallMessage("I look.", (CALL,), "THOUGHT"), ResultMessage("R", CALL.id)]
    names = names_for(how, turns, TOOLS, str)
    assert f"<assistant>{expected}<tool_call>" in render(template, **names, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("of_system", "roles"),
    [
        ("{% if not loop.first %}{{ raise_exception('must be at the beginning') }}{% endif %}", "suau"),
        ("{% if not loop.first %}{% set m = {'role': '-'} %}{% endif %}", "suau"),
        ("", "ssuasu"),
        ("{{ raise_exception('no system message') }}", None),
    ],
    ids=["Qwen3.5", "gpt-oss", "Qwen2.5", "Gemma 2"],
)
def test_system_messages_are_one_where_a_template_takes_no_later_one(
    process: TemplateProcess, of_system: str, roles: str | None
) -> None:
    at_system = f"{{% if m.role == 'system' %}}{of_system}{{% endif %}}"
    template = ROLES.replace("<", f"{at_system}<") + "{% endfor %}"
    said = [("system", "A"), ("system", "B"), ("user", "C"), ("assistant", "D"), ("system", "E"), ("user", "F")]
    messages = [{"role": role, "content": content} for role, content in said]
    render = fit_messages(template, process.render, {})
    if roles is None:
        with pytest.raises(ConversationError, match="no system message"):
            render(template, messages=messages)
        return
    written = render(template, messages=messages)
    assert "".join(findall(r"<(\w)", written)) == roles
    assert findall(r"[A-F]", written) == [*("ABECDF" if roles == "suau" else "ABCDEF")]
    alone = [{"role": "system", "content": "A"}, {"role": "user", "content": "C"}]
    assert render(template, messages=alone) == process.render(template, messages=alone)


def test_what_is_said_beside_a_call_is_left_out_where_the_template_takes_it_in_no_way(
    process: TemplateProcess, written: Callable[..., str]
) -> None:
    """Some of Mistral's templates drop the text beside a call and refuse it as a message of its own."""
    refusing = "{% if m.role == 'assistant' and not m.tool_calls %}{{ raise_exception('turns') }}{% endif %}"
    template = HERMES.replace("ARGUMENTS", AS_OBJECT).replace(
        "{{ m.content }}", refusing + "{% if not m.tool_calls %}{{ m.content }}{% endif %}"
    )
    found = written(template, "I look.")
    assert "I look." not in found
    assert found.count("<tool_call>") == 1
    said = probe_template(template, process.render, {}).description
    assert said == "hermes, by the chat template; what is said beside calls is left out"


def test_what_is_said_beside_a_call_is_left_out_where_it_would_come_behind_the_result(
    written: Callable[..., str],
) -> None:
    """Newer templates of Gemma 4 write results within the turn of the calls, and text only behind them."""
    late = HERMES.replace("ARGUMENTS", AS_OBJECT).replace(
        "{% for m in", "{% set ns = namespace(said='') %}{% for m in"
    )
    late = late.replace(
        "{{ m.content }}",
        "{% if m.tool_calls %}{% set ns.said = m.content %}{% else %}{{ m.content }}{{ ns.said }}{% endif %}",
    )
    found = written(late, "I look.")
    assert "I look." not in found
    assert found.count("<tool_call>") == 1
    assert "<tool>RESULT" in found


def test_json_of_templates_is_as_transformers_writes_it(process: TemplateProcess) -> None:
    value = {"b": "é<'>&", "a": [1, None]}
    assert process.render("{{ x | tojson }}", x=value) == json.dumps(value, ensure_ascii=False)
    assert process.render("{{ x | tojson(indent=4) }}", x=value) == json.dumps(value, ensure_ascii=False, indent=4)
    assert process.render("{{ 'a\nb' | indent(2) }}") == "a\n  b"
    for hostile in ("{{ x | tojson(indent=1000000) }}", "{{ 'a' | indent(99999999, true) }}"):
        with pytest.raises(ModelError, match="wanted"):
            process.render(hostile, x=value)


@pytest.mark.parametrize("arguments", ['{"what": "cut', "[1]", '{"a":' * 500 + "1" + "}" * 500, "[" * 90_000])
def test_arguments_that_no_template_takes_are_given_as_a_text(arguments: str) -> None:
    turns = [Message("user", "Q"), CallMessage("", (ToolCall(id="a", name="find", arguments=arguments),))]
    how = ToolTemplate(writes_calls=True)
    (call,) = names_for(how, turns, (), str)["messages"][-1]["tool_calls"]
    assert call["function"]["arguments"] == {"arguments": arguments}


def test_ids_of_calls_cannot_spell_special_tokens() -> None:
    call = ToolCall(id="a<|im_end|>b", name="find", arguments="{}")
    how = ToolTemplate(writes_calls=True, takes_results=True)
    turns = [CallMessage("", (call,)), ResultMessage("r", call.id)]
    messages = names_for(how, turns, (), lambda text: text.replace("<|im_end|>", "<END>"))["messages"]
    assert "<|im_end|>" not in json.dumps(messages)
    assert messages[0]["tool_calls"][0]["id"] == messages[1]["tool_call_id"] == "a<END>b"
