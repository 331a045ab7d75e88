"""The target answers several prompts at once, and another run goes on where one ended."""

import json
from pathlib import Path

import pytest
import tiny

from edgespec import load
from edgespec.training import target
from edgespec.training.stored_texts import TextsFile

PROMPTS = ["one", "two two", "three three three", "four"]


def answers(model: Path, file: Path, at_once: int, *, most_tokens: int = 10_000) -> dict[int, list[int]]:
    texts = TextsFile(file, tiny.VOCAB)
    with load(model, drafter="none", deterministic=True, max_parallel=at_once) as engine:
        target.write_answers(engine, PROMPTS, texts, longest=6, limit_s=600.0, most_tokens=most_tokens)
    again = TextsFile(file, tiny.VOCAB)
    assert again.numbers == texts.numbers
    return dict(zip(_numbers(file), (text.tokens.tolist() for text in again.texts), strict=True))


def _numbers(file: Path) -> list[int]:
    return [json.loads(line)["number"] for line in file.read_text().splitlines()]


def test_texts_do_not_depend_on_how_many_are_made_at_once(tiny_model: Path, tmp_path: Path) -> None:
    alone = answers(tiny_model, tmp_path / "alone", 1)
    assert sorted(alone) == list(range(2 * len(PROMPTS)))  # greedy, then sampled
    assert answers(tiny_model, tmp_path / "together", 3) == alone


def test_another_run_writes_only_what_is_missing(tiny_model: Path, tmp_path: Path) -> None:
    first = answers(tiny_model, tmp_path / "texts", 2, most_tokens=1)
    assert 0 < len(first) < 2 * len(PROMPTS)
    whole = answers(tiny_model, tmp_path / "texts", 2)
    assert sorted(whole) == list(range(2 * len(PROMPTS)))
    assert {number: whole[number] for number in first} == first


def test_prompts_that_are_longer_than_the_context_are_counted_and_left_out(
    tiny_model: Path, tmp_path: Path
) -> None:
    texts = TextsFile(tmp_path / "texts", tiny.VOCAB)
    with load(tiny_model, drafter="none", max_parallel=2) as engine:
        prompts = ["one", "too long " * 1000, "two"]
        num_too_long = target.write_answers(engine, prompts, texts, longest=4, limit_s=600.0, most_tokens=10_000)
    assert num_too_long == 1
    assert texts.numbers == {0, 2, 3, 5}


@pytest.mark.slow
def test_interruption_ends_the_answers_that_run_and_keeps_those_written(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, file = TextsFile(tmp_path / "texts", tiny.VOCAB), tmp_path / "texts"

    def interrupt(line: str) -> None:
        if texts.texts:
            raise KeyboardInterrupt

    monkeypatch.setattr(target, "show_progress", interrupt)
    with load(tiny_model, drafter="none", max_parallel=2) as engine, pytest.raises(KeyboardInterrupt):
        target.write_answers(engine, PROMPTS, texts, longest=10_000, limit_s=600.0, most_tokens=10_000)
    assert 1 <= len(TextsFile(file, tiny.VOCAB).texts) <= 2
