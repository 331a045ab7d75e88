"""Calls, reasoning and the marks around answers of families that are read, by templates made in their manner."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from scripted import scripted_engine

from edgespec import Engine
from edgespec.text.chat_template import CallMessage, Message, ResultMessage
from edgespec.tools.tool import ToolCall

TOOLS = [
    {
        "name": "weather",
        "description": "Tells it.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["place"],
        },
    }
]
ROME, BONN = {"place": "Rome <b>", "days": 2}, {"place": "Bonn"}
STATED = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
EACH = "{% for call in m.tool_calls or [] %}{% set f = call.function %}"
EXAONE = (
    "{% if tools %}[|system|]\n" + STATED + "<tool_call>[|endofturn|]\n{% endif %}{% for m in messages %}"
    "[|{{ m.role }}|]\n{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{% if m.role == 'tool' %}<tool_result>{{ m.content | tojson }}</tool_result>{% else %}{{ m.content }}"
    "{% endif %}" + EACH + '<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
    "</tool_call>{% if not loop.last %}\n{% endif %}{% endfor %}[|endofturn|]\n{% endfor %}[|assistant|]\n"
    "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
)
ERNIE = (
    "<|im_start|>{% if tools %}<tools>" + STATED + "</tools>{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|im_start|>assistant\n{% if m.content %}<response>\n{{ m.content }}\n"
    "</response>\n{% endif %}"
    "" + EACH + '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
    "\n</tool_call>\n{% endfor %}{% elif m.role == 'tool' %}<tool_output>{{ m.content }}</tool_output>"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n<think>\n{{ '' }}"
)
HUNYUAN = (
    "{% if tools %}" + STATED + "<tool_calls><tool_call>name\n```json\n{}\n```</tool_call></tool_calls>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}<tool_calls>"
    + EACH
    + "<tool_call>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```</tool_call>{% endfor %}</tool_calls>"
    "{% endif %}{% endfor %}<|assistant|>{% if enable_thinking is false %}<think>\n\n</think>\n{% endif %}"
)
HUNYUAN_MOE = (
    "{% if tools %}" + STATED + "<tool_calls>[]</tool_calls>{% endif %}{% for m in messages %}"
    "<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}<tool_calls>["
    + EACH
    + '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}{% if not loop.last %}, {% endif %}'
    "{% endfor %}]</tool_calls>{% endif %}{% endfor %}<|assistant|>"
)
GLM4 = (
    "[gMASK]{% if tools %}<|system|>\n{% for tool in tools %}## {{ tool.function.name }}\n\n{{ tool | tojson }}"
    "{% endfor %}{% endif %}{% for m in messages %}{% set name = m.get('metadata', '') %}"
    "{% if m.role == 'assistant' %}<|assistant|>{{ name }}\n{{ m.content }}"
    "{% elif m.role == 'observation' %}<|observation|>\n{{ m.content }}"
    "{% elif m.role in ('system', 'user') %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "<|assistant|>"
)
GLM45 = (
    "{% if tools %}<|system|>" + STATED + "<arg_key>{% endif %}{% for m in messages %}<|{{ m.role }}|>\n"
    "{{ m.content }}" + EACH + "\n<tool_call>{{ f.name }}\n{% for key, value in f.arguments.items() %}"
    "<arg_key>{{ key }}</arg_key>\n<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n"
    "{% endfor %}</tool_call>{% endfor %}{% endfor %}<|assistant|>{% if enable_thinking is false %}"
    "\n<think></think>"
    "{% endif %}"
)
SEED = (
    "{% if tools %}<|im_start|>" + STATED + "<seed:tool_call><|im_end|>{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}" + EACH + "<seed:tool_call>\n<function={{ f.name }}>\n"
    "{% for key, value in f.arguments.items() %}"
    "<parameter={{ key }}>{{ value if value is string else value | tojson }}"
    "</parameter>\n{% endfor %}</function>\n</seed:tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{{ '' }}"
)
MINIMAX = (
    "{% if tools %}<|im_start|>" + STATED + "<minimax:tool_call><|im_end|>{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}<minimax:tool_call>\n"
    + EACH
    + '<invoke name="{{ f.name }}">\n{% for key, value in f.arguments.items() %}<parameter name="{{ key }}">'
    "{{ value if value is string else value | tojson }}</parameter>\n{% endfor %}</invoke>\n{% endfor %}"
    "</minimax:tool_call>{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n<think>\n{{ '' }}"
)


class Family(NamedTuple):
    """A template; its own tokens; what opens an answer; two calls, and an answer, as its models write them."""

    template: str
    special: tuple[str, ...]
    header: str
    calls: str
    answer: str = "<think>\nSo.\n</think>\n\nFour."
    form: str = "hermes"


_HERMES_CALLS = "\n".join(
    f'<tool_call>{{"name": "weather", "arguments": {json.dumps(each)}}}</tool_call>' for each in (ROME, BONN)
)
FAMILIES = {
    "exaone4": Family(
        EXAONE,
        ("[|system|]", "[|user|]", "[|assistant|]", "[|tool|]", "[|endofturn|]"),
        "[|assistant|]\n<think>\n\n</think>\n\n",
        _HERMES_CALLS,
        "Four.",
    ),
    "ernie4_5_moe": Family(
        ERNIE,
        ("<think>", "</think>", "<response>", "</response>"),
        "<|im_start|>assistant\n<think>\n",
        "So.\n</think>\n\n" + _HERMES_CALLS,
        "So.\n</think>\n<response>\nFour.\n</response>\n",
    ),
    "hunyuan_v1_dense": Family(
        HUNYUAN,
        ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"),
        "<|assistant|>",
        "<think>\nSo.\n</think>\n<answer>\n<tool_calls><tool_call>weather\n```json\n"
        + json.dumps(ROME)
        + "\n```</tool_call>\n<tool_call>weather\n```json\n"
        + json.dumps(BONN)
        + "\n```</tool_call></tool_calls>\n</answer>",
        "<think>\nSo.\n</think>\n<answer>\nFour.\n</answer>",
        "hunyuan",
    ),
    "hunyuan_v1_moe": Family(
        HUNYUAN_MOE,
        ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"),
        "<|assistant|>",
        "<think>\nSo.\n</think>\n<answer>\n<tool_calls>["
        + ", ".join(f'{{"name": "weather", "arguments": {json.dumps(each)}}}' for each in (ROME, BONN))
        + "]</tool_calls>\n</answer>",
        "<think>\n\n</think>\n<answer>\nFour.\n</answer>",
        "apriel",
    ),
    "glm4": Family(
        GLM4,
        ("[gMASK]", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        "?<|assistant|>",  # of the prompt: an answer has this mark too
        f"weather\n{json.dumps(ROME)}<|assistant|>weather\n{json.dumps(BONN)}",
        "\nFour.",
        "glm4",
    ),
    "glm4_moe": Family(
        GLM45,
        ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|tool|>"),
        "<|assistant|>",
        "\n<think>So.</think>\n<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>Rome <b></arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>weather\n"
        "<arg_key>place</arg_key>\n<arg_value>Bonn</arg_value>\n</tool_call>",
        "\n<think>So.</think>\nFour.",
        "glm",
    ),
    "seed_oss": Family(
        SEED,
        ("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
        "<|im_start|>assistant\n",
        "<seed:think>So.</seed:think><seed:tool_call>\n<function=weather>\n<parameter=place>Rome <b></parameter>\n"
        "<parameter=days>2</parameter>\n</function>\n</seed:tool_call><seed:tool_call>\n<function=weather>\n"
        "<parameter=place>Bonn</parameter>\n</function>\n</seed:tool_call>",
        "<seed:think>So.</seed:think>Four.",
        "seed",
    ),
    "minimax_m2": Family(
        MINIMAX,
        ("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
        "<|im_start|>assistant\n<think>\n",
        'So.\n</think>\n\n<minimax:tool_call>\n<invoke name="weather">\n'
        '<parameter name="place">Rome <b></parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="weather">\n<parameter name="place">Bonn'
        "</parameter>\n</invoke>\n</minimax:tool_call>",
        "So.\n</think>\n\nFour.",
        "minimax",
    ),
}


def make(name: str, model: Path, folder: Path, answer: str, header: str | None = None) -> Engine:
    family = FAMILIES[name]
    return scripted_engine(
        model,
        folder,
        lambda prompt: answer,
        family.template,
        family.special,
        header=family.header if header is None else header,
        architecture=name,
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_and_answers_are_found_as_the_family_writes_them(
    name: str, tiny_model: Path, tmp_path: Path
) -> None:
    family = FAMILIES[name]
    with make(name, tiny_model, tmp_path / "calls", family.calls) as engine:
        assert engine.tool_format.partition(",")[0] == family.form
        answer = engine.generate("How is it?", tools=TOOLS)
        assert [call.parse() for call in answer.tool_calls] == [ROME, BONN]
        assert (answer.answer.strip(), answer.finish_reason) == ("", "tool_calls")
        prompt = engine.tokenizer.decode(_prompt(engine), engine.tokenizer.special_tokens.values())
        assert prompt.count("sunny") == 1
        assert prompt.count("Bonn") == 1
    with make(name, tiny_model, tmp_path / "text", family.answer) as engine:
        for given in ({}, {"tools": TOOLS}):
            answer = engine.generate("2 + 2?", **given)
            assert answer.answer.strip() == "Four."
            assert answer.reasoning in ("So.", "")
            assert bool(answer.reasoning) == ("So." in family.answer)
            assert "".join(chunk.text for chunk in engine.stream("2 + 2?", **given)) == answer.text


def _prompt(engine: Engine) -> Any:
    """The tokens of a conversation with a call and its result."""
    call = ToolCall(id="call_1", name="weather", arguments=json.dumps(BONN))
    turns = [Message("user", "How is it?"), CallMessage("", (call,)), ResultMessage("sunny", "call_1", "weather")]
    return engine.encode(turns, tools=TOOLS)


def test_what_only_looks_like_a_mark_stays_text(tiny_model: Path, tmp_path: Path) -> None:
    for number, (answer, text) in enumerate(
        (
            ("weather\nis what you ask for", "weather\nis what you ask for"),
            ("\nWell: weather\n{}", "\nWell: weather\n{}"),
            ("rain\n{}", "rain\n{}"),
        )
    ):
        with make("glm4", tiny_model, tmp_path / f"glm{number}", answer) as engine:
            found = engine.generate("How is it?", tools=TOOLS)
            assert (found.text, found.tool_calls) == (text, ())
    for number, (answer, text) in enumerate(
        (
            ("<answer>Four.", "Four."),
            ("<answers>", "<answers>"),
            (" Four</answer>", " Four</answer>"),
            ("<answer>\na </ans</answer>\n", "a </ans"),
            ("<think>a</think> <answer>\n</answer>", "<think>a</think>"),
            ("<answ", "<answ"),
        )
    ):
        with make("hunyuan_v1_moe", tiny_model, tmp_path / f"hy{number}", answer) as engine:
            assert engine.generate("2 + 2?").text == text
    with make("glm4_moe", tiny_model, tmp_path / "other", "<answer>4</answer>") as engine:
        assert engine.generate("2 + 2?").text == "<answer>4</answer>"


@pytest.mark.parametrize("name", ["glm4", "hunyuan_v1_dense", "exaone4"])
def test_a_demanded_call_is_one_of_the_family(name: str, tiny_model: Path, tmp_path: Path) -> None:
    wrong = FAMILIES[name].calls.replace("weather", "rain")
    with make(name, tiny_model, tmp_path, wrong) as engine:
        answer = engine.generate("How is it?", tools=TOOLS, tool_choice="required", max_tokens=300)
        assert {call.name for call in answer.tool_calls} == {"weather"}
