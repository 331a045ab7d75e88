"""Reasoning that is closed when its tokens are spent: the same text whatever drafts."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from scripted import scripted_engine
from stuck import engine_of
from table_decoder import TableDecoder

from edgespec import Completion, Engine, SamplingParams, UsageError, load
from edgespec.decoding.tree import Tree
from edgespec.draft.drafter import Drafter, DraftRequest
from edgespec.draft.model_drafter import ModelDrafter
from edgespec.draft.ngram import NgramDrafter
from edgespec.draft.speculation import Speculation
from edgespec.draft.suffix import SuffixDrafter
from edgespec.engine.reasoning import CLOSE, TAGS, ThinkingBudget, has_spent
from edgespec.export.convert import export_model
from edgespec.types import Sampler, TokenIds

OPENS = "<|im_start|>user\n{{ messages[-1].content }}<|im_end|>\n<|im_start|>assistant\n<think>\n"
SAMPLINGS = {"greedy": SamplingParams(), "sampled": SamplingParams(temperature=0.9, seed=3)}
PROMPT = "the in the in"


class Foolish(Drafter):
    """Drafts what no target says."""

    name = "foolish"

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        return Tree(((tokens[-1] + np.arange(1, 5)) % 250 + 3).astype(np.int32), (0,) * 4, source=self.name)


def table(seed: int = 3, near: TableDecoder | None = None) -> TableDecoder:
    return TableDecoder(tiny.VOCAB, seed=seed, context_length=tiny.CONTEXT, near=near)


def drafters_of(kind: str) -> list[Drafter]:
    return {
        "texts": lambda: [NgramDrafter(), SuffixDrafter()],
        "foolish": lambda: [Foolish()],
        "near": lambda: [ModelDrafter(table(2, near=table()), tiny.VOCAB)],
        "perfect": lambda: [ModelDrafter(table(), tiny.VOCAB)],
    }[kind]()


@cache
def plain(folder: Path, sampling: str, budget: int | None) -> Completion:
    with engine_of(folder, table(), OPENS) as engine:
        return engine.generate(PROMPT, sampling=SAMPLINGS[sampling], max_tokens=50, thinking_budget=budget)


@pytest.mark.parametrize("sampling", list(SAMPLINGS))
@pytest.mark.parametrize("budget", [0, 1, 12])
def test_reasoning_is_closed_at_its_budget_and_the_answer_goes_on(
    tiny_model: Path, sampling: str, budget: int
) -> None:
    unbound, bound = plain(tiny_model, sampling, None), plain(tiny_model, sampling, budget)
    with engine_of(tiny_model, table(), OPENS) as engine:
        closing = tuple(engine.tokenizer.encode(TAGS.closing, special=True).tolist())
        without = engine.generate(PROMPT, sampling=SAMPLINGS[sampling], max_tokens=50)
        told = engine.chat(sampling=SAMPLINGS[sampling], max_tokens=50, thinking_budget=budget).say(PROMPT)
    assert without.token_ids == unbound.token_ids
    assert told.token_ids == bound.token_ids
    assert bound.token_ids == (*unbound.token_ids[:budget], *closing, *bound.token_ids[budget + len(closing) :])
    assert len(bound.token_ids) > budget + len(closing) + 5
    assert CLOSE not in bound.answer
    assert bound.answer.strip()
    assert plain(tiny_model, sampling, 50).token_ids == unbound.token_ids


@pytest.mark.parametrize("sampling", list(SAMPLINGS))
@pytest.mark.parametrize("length", [None, 4])
@pytest.mark.parametrize("kind", ["texts", "foolish", "near", "perfect"])
def test_the_text_is_the_same_whatever_drafts(
    tiny_model: Path, kind: str, length: int | None, sampling: str
) -> None:
    with engine_of(tiny_model, table(), OPENS) as engine:
        drafters = drafters_of(kind)
        engine._drafting = replace(
            engine._drafting, speculation=Speculation(lambda: drafters, draft_length=length)
        )
        found = engine.generate(PROMPT, sampling=SAMPLINGS[sampling], max_tokens=50, thinking_budget=12)
    assert found.token_ids == plain(tiny_model, sampling, 12).token_ids
    if length:
        assert found.stats.num_drafted


@pytest.fixture(scope="module")
def thinking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny.write_gguf(folder / "thinking.gguf", tiny.random_weights(), override={"tokenizer.chat_template": OPENS})
    export_model(folder / "thinking.gguf", folder / "thinking", precision="fp32")
    return folder / "thinking"


def test_the_text_is_the_same_by_any_schedule(thinking_model: Path, tiny_drafter: Path) -> None:
    def answer(**options: Any) -> Completion:
        with load(thinking_model, **options) as engine:
            return engine.generate(PROMPT, max_tokens=30, thinking_budget=6)

    wanted = answer(drafter="none")
    assert wanted.text.count(CLOSE) == 1
    for schedule in ("serial", "pipelined"):
        found = answer(drafter=str(tiny_drafter), draft_length=3, schedule=schedule)
        assert found.token_ids == wanted.token_ids
    sampled = answer(drafter=str(tiny_drafter), draft_length=3, schedule="serial", acceptance="rejection")
    assert sampled.text.count(CLOSE) == 1


def thinking(prompt: str) -> str:
    return "Yes, 4." if "plainly" in prompt else "<think>\nLet me see whether that is so.\n</think>\n\nYes, 4."


def test_reasoning_that_the_model_opens_is_counted_behind_its_mark(tiny_model: Path, tmp_path: Path) -> None:
    with scripted_engine(
        tiny_model, tmp_path, thinking, OPENS.removesuffix("<think>\n") + "{# <think> #}"
    ) as engine:
        whole = engine.generate("2 + 2?")
        opening = len(engine.tokenizer.encode("<think>", special=True))
        num = next(
            n
            for n in range(len(whole.token_ids))
            if CLOSE in engine.tokenizer.decode(whole.token_ids[opening : opening + n])
        )
        for enough in (num, -1):
            assert engine.generate("2 + 2?", thinking_budget=enough).token_ids == whole.token_ids
        cut = engine.generate("2 + 2?", thinking_budget=8)
        closing = tuple(engine.tokenizer.encode(TAGS.closing, special=True).tolist())
        assert cut.token_ids[: opening + 8 + len(closing)] == (*whole.token_ids[: opening + 8], *closing)
        assert whole.reasoning.startswith(cut.reasoning)
        assert 0 < len(cut.reasoning) < len(whole.reasoning)
        assert engine.generate("plainly", thinking_budget=0).text == "Yes, 4."
        for given, spent in ((whole, False), (cut, True)):
            tokens = np.array(given.token_ids, np.int32)
            assert has_spent(tokens, 8 if spent else num, engine.tokenizer, is_open=False) is spent


def test_what_may_follow_is_a_function_of_the_answer_alone() -> None:
    closing = np.array([7, 8, 9], np.int32)
    budget = ThinkingBudget(4, 20, closing, lambda tokens: "".join(f"{each} " for each in tokens), is_open=True)
    answer = np.array([1, 2, 3, 4, 7, 8, 9, 5, 6], np.int32)
    for num in range(len(answer)):
        bias, forced = budget.bias(answer[:num]), budget.forced(answer[:num], 2).tolist()
        if 4 <= num < 7:
            assert bias is not None
            assert np.flatnonzero(np.isfinite(bias)).tolist() == [answer[num]] == forced[:1]
            assert budget.way_out(answer[:num]) == answer[num]
        else:
            assert (bias, forced) == (None, [])
        assert budget.has_ample_room(answer[:num]) is not (4 <= num < 7)
        assert budget.num_allowed(answer[:num], answer[num:]) == len(answer) - num
    assert budget.num_allowed(answer[:2], np.array([3, 4, 5], np.int32)) == 2
    assert budget.num_allowed(answer[:2], np.array([3, 4, 7, 9], np.int32)) == 3
    closed = ThinkingBudget(4, 20, closing, lambda tokens: CLOSE, is_open=True)
    assert closed.bias(answer[:4]) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"thinking_budget": -2}, "wanted a whole number from 0, or -1"),
        ({"thinking_budget": 3.0}, "wanted a whole number from 0"),
        ({"thinking_budget": 3, "response_format": {"type": "json_object"}}, "has to begin with"),
        ({"thinking_budget": 3, "banned": "\n\n"}, "is banned"),
    ],
)
def test_a_budget_that_cannot_be_is_refused(tiny_model: Path, options: dict[str, Any], words: str) -> None:
    with engine_of(tiny_model, table(), OPENS) as engine, pytest.raises(UsageError, match=words):
        engine.stream(PROMPT, **options)


def test_a_model_that_does_not_reason_takes_no_budget(tiny_model: Path) -> None:
    engine: Engine
    with engine_of(tiny_model, table(), "{{ messages[0].content }}") as engine:
        assert not engine.can_think
        with pytest.raises(UsageError, match="does not reason"):
            engine.stream(PROMPT, thinking_budget=3)
    with engine_of(tiny_model, table(), OPENS) as engine:
        assert engine.can_think
