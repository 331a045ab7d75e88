"""Reasoning between marks that are tokens of their own, as Seed-OSS, Ministral 3 and others write it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted import scripted_engine

from edgespec import Engine, UsageError, has_spent
from edgespec.tools.channels import THINK_HEADERS, THINK_MARKS

OPENING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{{ MARK }}"
)
TEMPLATE = OPENING.replace("MARK", "''")
Make = Callable[..., Engine]


@pytest.fixture(params=THINK_MARKS, ids=lambda marks: marks[0])
def special(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def marks(special: tuple[str, str]) -> tuple[str, str]:
    """The texts around reasoning, with what a model writes behind the first token."""
    return special[0] + THINK_HEADERS.get(special[0], ""), special[1]


@pytest.fixture
def make(tiny_model: Path, tmp_path: Path, special: tuple[str, str]) -> Make:
    def make(answer: str, template: str = TEMPLATE, **options: Any) -> Engine:
        return scripted_engine(tiny_model, tmp_path, lambda prompt: answer, template, special, **options)

    return make


def test_reasoning_and_answer_are_told_apart(make: Make, marks: tuple[str, str]) -> None:
    with make("{}Let me see.{}Four.".format(*marks)) as engine:
        assert engine.can_think
        answer = engine.generate("2 + 2?")
        assert (answer.reasoning, answer.answer) == ("Let me see.", "Four.")
        assert answer.text == "<think>Let me see.</think>Four."
        assert "".join(chunk.text for chunk in engine.stream("2 + 2?")) == answer.text
        assert not engine.opens_reasoning("2 + 2?")


def test_a_template_may_open_the_reasoning(make: Make, marks: tuple[str, str]) -> None:
    opening, rest = OPENING.replace("MARK", f"{marks[0]!r}"), f"Let me see.{marks[1]}Four."
    with make(rest, opening, header=f"assistant\n{marks[0]}") as engine:
        assert engine.opens_reasoning("2 + 2?")
        answer = engine.generate("2 + 2?")
        assert (answer.reasoning, answer.answer) == ("Let me see.", "Four.")


def test_a_channel_of_gemma4_loses_its_name_alone(tiny_model: Path, tmp_path: Path) -> None:
    """Other text behind the mark is reasoning; an empty thought, as an answer without one begins, is none."""
    for answer, reasoning in (
        ("<|channel>thought\n<channel|>Four.", ""),
        ("<|channel>thoughts count.<channel|>Four.", "thoughts count."),
        ("<|channel>thou<channel|>Four.", "thou"),
        ("<|channel>thought\nthought\n\nso<channel|>Four.", "thought\n\nso"),
    ):
        folder = tmp_path / str(len(answer))
        folder.mkdir()
        with scripted_engine(
            tiny_model, folder, lambda prompt, it=answer: it, TEMPLATE, THINK_MARKS[-1]
        ) as engine:
            found = engine.generate("2 + 2?")
            assert (found.reasoning, found.answer) == (reasoning, "Four.")
            assert "".join(chunk.text for chunk in engine.stream("2 + 2?")) == found.text


def test_reasoning_can_be_bounded_and_that_is_known(make: Make, marks: tuple[str, str]) -> None:
    with make("{}Let me see if that is so.{}Four.".format(*marks)) as engine:
        whole = engine.generate("2 + 2?")
        cut = engine.generate("2 + 2?", thinking_budget=4)
        assert 0 < len(cut.reasoning) < len(whole.reasoning)
        assert whole.reasoning.startswith(cut.reasoning)
        for answer, spent in ((whole, False), (cut, True)):
            tokens = np.array(answer.token_ids, np.int32)
            assert has_spent(tokens, 4 if spent else 100, engine.tokenizer, is_open=False) is spent
        with pytest.raises(UsageError, match="is banned"):
            engine.generate("2 + 2?", thinking_budget=4, banned=[marks[1]])


def test_an_answer_that_is_begun_goes_on_where_it_stands(make: Make, marks: tuple[str, str]) -> None:
    with make("{}Let me see.{}Four.".format(*marks)) as engine:
        assert engine.generate("2 + 2?", prefill="<think>Let me").text == " see.</think>Four."
    with make("Four, I say.") as engine:
        assert engine.generate("2 + 2?", prefill="Four,").text == " I say."
