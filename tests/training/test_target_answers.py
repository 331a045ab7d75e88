"""The target answers several prompts at once, and another run goes on where one ended."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny

from edgespec import Engine, load
from edgespec.training import prompts as training_prompts
from edgespec.training import target
from edgespec.training.prompts import PromptWriter, Turns
from edgespec.training.stored_texts import TextsFile
from edgespec.training.target import EngineWriter

PROMPTS = ["one", "two two", "three three three", "four"]


def answers(
    model: Path, file: Path, at_once: int, *, most_tokens: int = 10_000, own_share: float = 0.0
) -> dict[int, list[int]]:
    texts = TextsFile(file, tiny.VOCAB)
    with load(model, drafter="none", deterministic=True, max_parallel=at_once) as engine:
        target.write_answers(
            EngineWriter(engine),
            PROMPTS,
            texts,
            longest=6,
            limit_s=600.0,
            most_tokens=most_tokens,
            own_share=own_share,
        )
    again = TextsFile(file, tiny.VOCAB)
    assert again.numbers == texts.numbers
    return dict(zip(_numbers(file), (text.tokens.tolist() for text in again.texts), strict=True))


def write(engine: Engine, writer: PromptWriter, *numbers: int) -> dict[int, Turns | None]:
    return dict(EngineWriter(engine).follow((number, writer.write(number)) for number in numbers))


def _numbers(file: Path) -> list[int]:
    return [json.loads(line)["number"] for line in file.read_text().splitlines()]


def test_texts_do_not_depend_on_how_many_are_made_at_once(tiny_model: Path, tmp_path: Path) -> None:
    alone = answers(tiny_model, tmp_path / "alone", 1)
    assert sorted(alone) == list(range(2 * len(PROMPTS)))  # greedy, then sampled
    assert answers(tiny_model, tmp_path / "together", 3) == alone


def test_a_writer_answers_one_list_after_another(tiny_model: Path, tmp_path: Path) -> None:
    """One writer answers held-out prompts, of which there may be none, and then those to train on."""
    with load(tiny_model, drafter="none", deterministic=True) as engine:
        writer, made = EngineWriter(engine), []
        for number, prompts in enumerate(([], PROMPTS, PROMPTS)):
            texts = TextsFile(tmp_path / f"{number}", tiny.VOCAB)
            target.write_answers(writer, prompts, texts, longest=6, limit_s=600.0, most_tokens=10_000)
            made.append(sorted(text.tokens.tolist() for text in texts.texts))
            assert texts.num_answer_tokens > 0 or not prompts
    assert made[1] == made[2]


def test_held_out_prompts_are_answered_once_in_the_same_file(tiny_model: Path, tmp_path: Path) -> None:
    texts, limits = TextsFile(tmp_path / "texts", tiny.VOCAB), {"longest": 6, "limit_s": 600.0}
    with load(tiny_model, drafter="none", deterministic=True) as engine:
        writer = EngineWriter(engine)
        target.write_answers(writer, PROMPTS[:2], texts, most_tokens=10_000, is_held_out=True, **limits)
        target.write_answers(writer, PROMPTS[2:], texts, most_tokens=10_000, **limits)
        first, second = (np.array(engine.encode(each), np.int32) for each in PROMPTS[:2])
    assert texts.numbers == {-2, -1, 0, 1, 2, 3}
    held_out = [text.tokens[: text.num_prompt].tolist() for text in texts.texts if text.is_held_out]
    assert sorted(held_out) == sorted([first.tolist(), second.tolist()])


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
        writer = EngineWriter(engine)
        num_too_long = target.write_answers(writer, prompts, texts, longest=4, limit_s=600.0, most_tokens=10_000)
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
    with load(tiny_model, drafter="none", max_parallel=2) as engine:
        writer = EngineWriter(engine)
        with pytest.raises(KeyboardInterrupt):
            target.write_answers(writer, PROMPTS, texts, longest=10_000, limit_s=600.0, most_tokens=10_000)
    assert 1 <= len(TextsFile(file, tiny.VOCAB).texts) <= 2


@pytest.mark.slow
def test_a_target_writes_turns_of_users_tasks_and_second_turns(tiny_model: Path) -> None:
    with load(tiny_model, drafter="none", deterministic=True) as engine:
        writer = PromptWriter(engine.encode)
        begin = writer._before_turn([])
        for text in ("Write", "9 lives", "hello"):
            ids = engine.encode(text)
            assert np.array_equal(ids[: len(begin)], begin)
            assert engine.tokenizer.decode(list(ids[len(begin) :])).startswith(text)
        written = write(engine, writer, *range(24))
        kinds = {number % 8: len(turns) for number, turns in written.items() if turns}
        assert {kinds[kind] for kind in kinds if kind < 7} == {1}
        assert kinds.get(7, 3) == 3
        tasks = [turns[0]["content"] for number, turns in written.items() if turns and number % 8 in (4, 5, 6)]
        assert len(tasks) >= 6
        ends = [task.split("{}") for task in training_prompts._TASKS]
        assert all(any(task.startswith(one) and task.endswith(two) for one, two in ends) for task in tasks)
        assert written[3] == write(engine, writer, 3)[3]
        contents = [str(turns) for turns in written.values() if turns]
        assert len({*contents}) == len(contents)


@pytest.mark.slow
def test_prompts_of_its_own_are_mixed_by_their_share_and_gone_on_with(tiny_model: Path, tmp_path: Path) -> None:
    first = answers(tiny_model, tmp_path / "texts", 2, most_tokens=700, own_share=0.5)
    own = [number for number in first if number >= 2 * len(PROMPTS)]
    assert 0 < len(own) < len(first)
    more = answers(tiny_model, tmp_path / "texts", 2, most_tokens=1200, own_share=0.5)
    assert {number: more[number] for number in first} == first
    assert len(more) > len(first)
    alone = answers(tiny_model, tmp_path / "own", 1, most_tokens=700, own_share=1.0)
    assert min(alone) >= 2 * len(PROMPTS)
    assert {number: more[number] for number in alone if number in more}
    assert all(more[number] == text for number, text in alone.items() if number in more)


@pytest.mark.parametrize(
    ("share", "num_stored", "expected"),
    [
        (0.0, 0, [0, 1, 2, 3]),
        (0.5, 0, [0, 100, 1, 101, 2, 102, 3, 103, 104, 105]),
        (0.25, 0, [0, 1, 2, 100, 3, 101, 102]),
        (1.0, 0, [100, 101, 102, 103]),
        (0.0, 8, [0, 1, 2, 3]),
    ],
)
def test_given_prompts_and_own_ones_take_turns(share: float, num_stored: int, expected: list[int]) -> None:
    found = target._mixed(range(4), iter(range(100, 200)), share, 0, num_stored)
    assert [number for number, _ in zip(found, expected, strict=False)] == expected


def test_beside_stored_texts_prompts_of_its_own_end_with_their_share() -> None:
    assert [*target._mixed((), iter(range(100, 200)), 0.25, 0, 6)] == [100, 101]
    assert [*target._mixed((), iter(range(100, 200)), 0.25, 2, 6)] == []


@pytest.mark.parametrize(("before", "behind"), [("", ""), ("<", ""), ("", ">")])
def test_a_target_without_turns_writes_no_prompts(before: str, behind: str) -> None:
    def encode(turns: Turns) -> list[int]:
        return [*f"{before}{turns[-1]['content']}{behind}".encode()]

    assert not PromptWriter(encode).can_write
