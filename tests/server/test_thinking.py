"""Reasoning over HTTP: apart from the answer, whole and streamed, and switched off by a request."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted import scripted_engine
from served import Served, home_with, serving

from edgespec.server.model_names import ModelNames

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)


def answer(prompt: str) -> str:
    """Begins with what the template opens, which the decoder takes for written."""
    if "off" in prompt:
        return "<think>\n\n</think>\n\nNo, <think> is a mark."
    if "short" in prompt:
        return "<think>\nOnly this"
    return "<think>\nLet me see.\n</think>\n\nYes, 4."


@pytest.fixture(scope="module", params=[TEMPLATE, None], ids=["opened", "by itself"])
def served(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    template = request.param or TEMPLATE.replace("{% else %}<think>\n", "")
    names = ModelNames(home_with(tmp_path_factory.mktemp("home"), tiny=tiny_model))
    folder = tmp_path_factory.mktemp("tokenizer")
    with serving(names, lambda name: scripted_engine(tiny_model, folder, answer, template)) as found:
        yield found


def message(served: Served, text: str = "2 + 2?", **fields: Any) -> dict[str, Any]:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
    whole = served.post(CHAT, asked)
    assert whole.status_code == 200, whole.text
    found = dict(whole.json()["choices"][0]["message"])
    streamed = {"content": "", "reasoning_content": ""}
    lines = served.post(CHAT, {**asked, "stream": True}).text.splitlines()
    for line in lines:
        if line.startswith("data: {"):
            for name, piece in json.loads(line[6:])["choices"][0]["delta"].items():
                if name != "role":
                    streamed[name] += piece
    assert streamed["content"] == found["content"]
    assert streamed["reasoning_content"].rstrip() == found.get("reasoning_content", "")
    return found


def test_reasoning_is_a_field_of_its_own(served: Served) -> None:
    found = message(served)
    assert (found["reasoning_content"], found["content"]) == ("Let me see.", "Yes, 4.")


def test_reasoning_that_never_ends_is_no_answer(served: Served) -> None:
    found = message(served, "short")
    assert (found["reasoning_content"], found["content"]) == ("Only this", "")


@pytest.mark.parametrize(
    "switch", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}]
)
def test_a_request_turns_reasoning_off_and_later_marks_are_text(served: Served, switch: dict[str, Any]) -> None:
    found = message(served, "off", **switch)
    assert "reasoning_content" not in found
    assert found["content"] == "No, <think> is a mark."


def test_a_switch_that_is_no_truth_value_is_refused(served: Served) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "off"}]}
    refused = served.post(CHAT, {**asked, "chat_template_kwargs": {"enable_thinking": "no"}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "chat_template_kwargs.enable_thinking"
