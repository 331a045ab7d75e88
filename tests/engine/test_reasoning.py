"""Reasoning told from answers, whatever pieces these come in."""

from pathlib import Path

import pytest
import tiny
from stuck import engine_of
from table_decoder import TableDecoder

from edgespec import Chunk, Completion, UsageError
from edgespec.engine.answers import Tally, join_chunks
from edgespec.engine.reasoning import ReasoningGate, ReasoningStream, split_reasoning

CASES = [
    ("<think>\nLet me see.\n\nYes.\n</think>\n\nThe sky.", False, "Let me see.\n\nYes.", "The sky."),
    ("\n<think>\n\n</think>\n\nThe sky.", False, "", "The sky."),
    ("Let me see.</think>The sky.", True, "Let me see.", "The sky."),
    ("  The <think> mark </think> is text.", False, "", "  The <think> mark </think> is text."),
    ("<thinking is hard", False, "", "<thinking is hard"),
    ("<think>cut </thi", False, "cut </thi", ""),
    ("<think>a < b and </ c </think>x </think> y", False, "a < b and </ c", "x </think> y"),
    ("no marks", True, "no marks", ""),
    ("", False, "", ""),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("text", "is_open", "reasoning", "answer"), CASES)
def test_reasoning_is_told_from_the_answer_and_every_character_kept(
    text: str, is_open: bool, reasoning: str, answer: str, size: int
) -> None:
    stream, gate = ReasoningStream(is_open=is_open), ReasoningGate(is_open=is_open)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    parts = [part for piece in pieces for part in stream.push(piece)] + stream.end()
    assert "".join(part.text for part in parts if part.is_reasoning).rstrip() == reasoning
    assert "".join(part.text for part in parts if not part.is_reasoning) == answer
    assert split_reasoning(text, is_open=is_open) == (reasoning, answer)
    if answer or not is_open:  # so that the text tells whether the prompt has opened the reasoning
        assert split_reasoning(text) == (reasoning, answer)
    gated = [*map(gate.push, pieces), gate.end()]
    inside, behind = ("".join(part) for part in zip(*gated, strict=True))
    assert inside + behind == text
    assert behind.strip() == answer.strip()
    assert reasoning in inside


@pytest.mark.parametrize(
    "text",
    [
        "a `</think>` b",
        "a </think> b",
        "a ('</think>') b",
        'a "</think>" b',
        "a:\n\n```python\nanswer = text.split('</think>')[-1]\n```\n\nb",
        "a:\n\n```\nso it is\n</think>\n42\n```",
        "a:\n\n```python\nre.sub('.*</think> *', '', text)\n```\n\nb",
    ],
)
def test_an_answer_about_the_mark_has_no_reasoning(text: str) -> None:
    assert split_reasoning(text) == ("", text)


@pytest.mark.parametrize("between", ["</think>", "\n</think>\n\n", "\n\n  </think>"])
@pytest.mark.parametrize(
    "reasoning", ["", "I say `a`.", 'I say "a"', "so\n```\na\n```", "so\n```\na", "`a` is it`"]
)
def test_the_mark_alone_ends_reasoning(reasoning: str, between: str) -> None:
    assert split_reasoning(f"{reasoning}{between}b") == (reasoning, "b")


def test_words_do_not_wait() -> None:
    stream = ReasoningStream()
    assert stream.push("<th") == []
    assert [part.text for part in stream.push("ink>Let me")] == ["Let me"]
    assert stream.is_reasoning
    assert [part.text for part in stream.push(" see</think>Yes")] == [" see", "Yes"]


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif opens %}<think>\n{% endif %}"
)


def table() -> TableDecoder:
    return TableDecoder(tiny.VOCAB, seed=3, context_length=tiny.CONTEXT)


def test_the_template_is_told_whether_to_think(tiny_model: Path, tmp_path: Path) -> None:
    with engine_of(tiny_model, table(), TEMPLATE) as engine:
        assert engine.can_switch_thinking
        default, on, off = (engine.count("the in", thinking=each) for each in (None, True, False))
        assert default == on < off
        assert engine.opens_reasoning("the in") is engine.opens_reasoning("the in", thinking=False) is False
        conversation = engine.chat(max_tokens=4)
        conversation.thinking = False
        assert conversation.stream("the in").completion().prompt_tokens == off


def test_a_template_may_open_the_reasoning_itself(tiny_model: Path) -> None:
    with engine_of(tiny_model, table(), TEMPLATE.replace("elif opens", "else")) as engine:
        assert engine.opens_reasoning("the in")
        assert not engine.opens_reasoning("the in", thinking=False)


def test_a_template_without_a_switch_takes_none(tiny_model: Path) -> None:
    with engine_of(tiny_model, table(), "{{ messages[0].content }}") as engine:
        assert not engine.can_switch_thinking
        with pytest.raises(UsageError, match="has no switch for it"):
            engine.stream("the in", thinking=True)


def test_a_completion_has_reasoning_and_answer_apart() -> None:
    def completion(text: str) -> Completion:
        stats = Tally().stats(drafter="none", draft_length="auto", target_device="cpu", drafter_device=None)
        last = Chunk(text=text, token_ids=(), finish_reason="stop", stats=stats)
        return join_chunks([last], 1)

    assert (completion("<think>a</think>\n\nb").reasoning, completion("<think>a</think>\n\nb").answer) == (
        "a",
        "b",
    )
    assert (completion("a</think>b").reasoning, completion("b").reasoning, completion("b").answer) == (
        "a",
        "",
        "b",
    )


@pytest.mark.parametrize("opens", [False, True])
def test_a_mark_in_a_message_opens_no_reasoning(tiny_model: Path, opens: bool) -> None:
    template = "{{ messages[0].content }}{% if opens %}<think>{% endif %}\n"
    with engine_of(tiny_model, table(), template.replace("if opens", f"if {opens}")) as engine:
        for text in ("What is <think>?", "a <think> b", "</think>", "<think>a</think>"):
            assert engine.opens_reasoning(text) is opens
