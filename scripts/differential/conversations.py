"""Conversations by chance, in the form of OpenAI's API."""

import json
from random import Random
from typing import Any

_TEXTS = (
    "hi", " What is 2+2?\n", "Écris: «ça»", "", "a <b> & \"c\" 'd'",
    "日本語で", "line\n\nline  ", "{{ x }} {% y %}",
    "<think>\nhm\n</think>\n\nso", "</tool_call> not one", "\ttab\u00a0", "🙂", "{\"a\": 1}", "O'Brien \\ back",
)  # fmt: skip
TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather, also of \"tomorrow\" & <later>",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "Köln"}, "days": {"type": "integer"}},
                "required": ["place"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "The time",
            "parameters": {"type": "object", "properties": {}},
        },
    },
)  # fmt: skip


# What a caller may give beside: names that templates read.
SWITCHES: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"enable_thinking": False},
    {"enable_thinking": True},
    {"thinking": True},
    {"documents": [{"title": "A", "text": "first"}, {"title": "B <i>", "text": "second"}]},
    {"date_string": "1 Jan 2025", "builtin_tools": ["code", "search"]},
)


def draw_conversation(random: Random, *, with_tools: bool) -> list[dict[str, Any]]:
    """Messages that end where the assistant speaks next."""
    messages = [{"role": "system", "content": random.choice(_TEXTS)}] if random.random() < 0.5 else []
    for _ in range(random.randint(0, 2)):
        messages.append({"role": "user", "content": random.choice(_TEXTS)})
        if with_tools and random.random() < 0.7:
            messages += _call(random)
        answer = {"role": "assistant", "content": random.choice(_TEXTS)}
        if random.random() < 0.3:
            answer["reasoning_content"] = "because\nof this"
        messages.append(answer)
    messages.append({"role": "user", "content": random.choice(_TEXTS)})
    if with_tools and random.random() < 0.4:
        messages += _call(random)
    return messages


def _call(random: Random) -> list[dict[str, Any]]:
    """A turn with calls, and their results."""
    chosen = random.choices(({"place": "Köln <a>", "days": 3}, {"place": "x"}, {}), k=random.randint(1, 2))
    ids = [f"call{i:05}" for i in range(len(chosen))]
    calls = [
        {
            "id": ids[i],
            "type": "function",
            "function": {"name": "weather" if given else "now", "arguments": given},
        }
        for i, given in enumerate(chosen)
    ]
    content = random.choice(("", "", "I look."))
    results = [
        {
            "role": "tool",
            "tool_call_id": ids[i],
            "name": calls[i]["function"]["name"],  # type: ignore[index]
            "content": random.choice(("sunny", json.dumps({"t": 3}), "")),
        }
        for i in range(len(ids))
    ]
    return [{"role": "assistant", "content": content, "tool_calls": calls}, *results]
