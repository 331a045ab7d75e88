"""Prompts, texts and hidden states that a head is trained on, and how they are packed."""

import errno
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from hashlib import sha256
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny

from edgespec.draft.answer_cache import AnswerCache
from edgespec.errors import DiskFull, ModelError, UsageError
from edgespec.evaluation.prompts import own_prompts as bench_prompts
from edgespec.export.sources import read_source
from edgespec.system import disk
from edgespec.training.packing import Text, num_drafts, pack
from edgespec.training.prompts import own_prompts, read_corpus
from edgespec.training.stored_texts import StatesFile, TextsFile
from edgespec.training.torch_writer import open_encoder
from edgespec.training.work_folder import TrainingOptions, WorkFolder


def made_texts(*lengths: tuple[int, int]) -> list[Text]:
    """Texts with tokens 0, 1, 2 … over all of them, by numbers of tokens of prompt and answer."""
    texts, start = [], 0
    for num_prompt, num_answer in lengths:
        stop = start + num_prompt + num_answer
        texts.append(Text(np.arange(start, stop, dtype=np.int32), num_prompt, start))
        start = stop
    return texts


def test_own_prompts_are_of_thirteen_kinds_and_none_is_measured_with() -> None:
    file = resources.files("edgespec.training").joinpath("prompts.jsonl").read_text(encoding="utf-8")
    kinds = Counter(json.loads(line)["category"] for line in file.splitlines())
    prompts = own_prompts()
    assert len(kinds) == 13
    assert min(kinds.values()) >= 28
    assert len(set(prompts)) == len(prompts) == kinds.total()
    assert not {*prompts} & {turn for prompt in bench_prompts() for turn in prompt.turns}


@pytest.mark.parametrize(
    "content",
    [
        "first\n\n  second \nfirst\n",
        '{"prompt": "first"}\n{"text": "second"}\n',
        '{"turns": ["first", "later"]}\n\n{"category": "x", "prompt": "second"}',
    ],
)
def test_a_corpus_has_a_line_or_a_record_for_each_prompt(tmp_path: Path, content: str) -> None:
    path = tmp_path / "corpus"
    path.write_text(content)
    assert read_corpus(path) == ["first", "second"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no prompts"),
        (b"\n \n", "holds no prompts"),
        (b"\xffa", "not text in UTF-8"),
        (b"a\0b", "is binary"),
        (b'{"prompt": 3}', "record 1 has no text"),
        (b'{"prompt": "a"}\n{"turns": []}', "record 2 has no text"),
        (b'{"prompt": "a"', "line 1 is not JSON"),
        (rb'{"prompt": "ab \ud800"}', r"half of a character \('ab \\ud800'\)"),
    ],
)
def test_a_corpus_without_prompts_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "corpus"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_corpus(path)
    with pytest.raises(UsageError, match=r"cannot read .* wanted a corpus"):
        read_corpus(tmp_path / "none")


def test_texts_that_were_written_are_there_again_without_one_that_was_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    first = TextsFile(path, 50)
    first.add(0, np.array([1, 2], np.int32), (3, 4, 5))
    first.add(7, np.array([6], np.int32), (8,))
    with path.open("a") as file:
        file.write('{"number": 9, "num_pr')
    again = TextsFile(path, 50)
    assert again.numbers == {0, 7}
    assert [(text.tokens.tolist(), text.num_prompt, text.start) for text in again.texts] == [
        ([1, 2, 3, 4, 5], 2, 0),
        ([6, 8], 1, 5),
    ]
    assert (again.num_tokens, again.num_answer_tokens) == (7, 4)
    again.add(8, np.array([1], np.int32), (1,))
    assert len(TextsFile(path, 50).texts) == 3


def test_a_full_disk_ends_the_writing_of_texts_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = TextsFile(tmp_path / "texts.jsonl", 50)
    texts.add(0, np.array([1], np.int32), (3,))

    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        with pytest.raises(DiskFull):
            texts.add(1, np.array([2], np.int32), (4,))
    assert texts.numbers == TextsFile(tmp_path / "texts.jsonl", 50).numbers == {0}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"number": "a"}, "number"),
        ({"number": 1, "num_prompt": 1, "tokens": [1, 50]}, "token 50, where the target has 50"),
        ({"number": 1, "num_prompt": 1, "tokens": [1, -2]}, "-2"),
        ({"number": 1, "num_prompt": 3, "tokens": [1, 2]}, "a prompt of 3 tokens in a text of 2"),
    ],
)
def test_a_damaged_line_of_the_texts_is_named_with_what_to_do(
    tmp_path: Path, line: dict[str, object], problem: str
) -> None:
    path = tmp_path / "texts.jsonl"
    TextsFile(path, 50).add(0, np.array([1, 2], np.int32), (3, 49))
    path.write_text(path.read_text() + json.dumps(line) + "\n")
    with pytest.raises(ModelError) as error:
        TextsFile(path, 50)
    assert f"{path} is damaged in line 2 (" in str(error.value)
    assert problem in str(error.value)
    assert str(error.value).endswith("; remove that line, or the file, and train again")


def states_of(texts: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [np.stack([tokens, tokens * 1e6], axis=1).astype(np.float32) for tokens in texts]


def test_states_are_stored_once_in_order_and_in_bounded_space(tmp_path: Path) -> None:
    texts = made_texts((2, 3), (1, 4), (3, 3))
    states = StatesFile(tmp_path / "states", 2)
    assert states.fitting(texts, 10 * states.row_bytes) == texts[:2]
    states.fill(texts[:1], states_of)
    with states.path.open("ab") as file:
        file.write(b"\1" * (2 * states.row_bytes + 1))  # a part of the second text
    assert states.missing(texts) == texts[1:]
    read = []
    states.fill(texts, lambda each: (read.extend(tokens[0] for tokens in each), states_of(each))[1])
    assert read == [5, 10]
    assert states.missing(texts) == []
    assert np.array_equal(states.rows()[:, 0], np.arange(16))
    assert states.rows()[1:, 1].tolist() == [65504.0] * 15


def test_states_of_texts_that_were_changed_or_lost_are_made_again(tmp_path: Path) -> None:
    texts = made_texts((2, 3), (1, 4), (3, 3), (2, 2))
    states = StatesFile(tmp_path / "states", 2)
    states.fill(texts, states_of)
    assert (states.missing(texts), states.num_foreign(texts)) == ([], 0)
    assert states.num_foreign(texts[:2]) == 0  # less room is no change
    changed = [texts[0], texts[1]._replace(tokens=texts[1].tokens + 100), *texts[2:]]
    assert (states.missing(changed), states.num_foreign(changed)) == (changed[1:], 3)
    states.fill(changed, states_of)
    assert states.rows()[:, 0].tolist() == np.concatenate([text.tokens for text in changed]).tolist()
    lost = [*changed[:2], changed[3]._replace(start=10)]
    assert (states.missing(lost), states.num_foreign(lost)) == (lost[2:], 1)
    states.fill(lost, states_of)
    assert states.rows()[10:, 0].tolist() == texts[3].tokens.tolist()
    assert (states.missing(lost), states.num_foreign(lost)) == ([], 0)


def test_answers_to_held_out_prompts_that_come_later_leave_all_states_in_their_places(tmp_path: Path) -> None:
    texts, states = TextsFile(tmp_path / "texts.jsonl", 50), StatesFile(tmp_path / "states", 2)
    for number in (-2, 0, 1):
        texts.add(number, np.array([number + 5], np.int32), (3, 4))
    states.fill(texts.texts, states_of)
    texts.add(-1, np.array([9], np.int32), (8,))
    again = TextsFile(tmp_path / "texts.jsonl", 50).texts
    assert [text.is_held_out for text in again] == [True, False, False, True]
    assert (states.missing(again), states.num_foreign(again)) == (again[3:], 0)


def folder_of(path: Path, monkeypatch: pytest.MonkeyPatch, *middle: int) -> tuple[WorkFolder, TextsFile]:
    """A folder for texts of 500 tokens, and these; middle: The chat template's, from a turn to the answer."""
    loaded: Any = SimpleNamespace(config=SimpleNamespace(vocab_size=500))
    monkeypatch.setattr(WorkFolder, "middle", np.array(middle, np.int32))
    return WorkFolder(path, loaded, TrainingOptions()), TextsFile(path / "texts.jsonl", 500)


@pytest.mark.parametrize("aside", [None, [7, 20, 2, 9], [7, *range(100, 190), 2, 9]])
def test_stored_answers_to_a_prompt_that_is_held_out_are_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aside: list[int] | None
) -> None:
    """A prompt ends with the user's turn, token 2, and the template's 9; 20 other prompts begin with 7 too."""
    folder, texts = folder_of(tmp_path, monkeypatch, 2, 9)
    cache = AnswerCache(tmp_path, "tiny", "0" * 64, 500)
    prompts = [[7, first, 2, 9] for first in range(20, 40)] + [[7, *range(100, 190), 2, 9]]
    for prompt in prompts:
        for answer in (range(200, 205), range(300, 400)):
            cache.add(np.array(prompt, np.int32), np.array(answer, np.int32))
    cache.save()
    for number, (prompt, answer) in enumerate(cache.texts()):
        texts.add(number, prompt, tuple(answer.tolist()))
    if aside:
        texts.add(-1, np.array(aside, np.int32), (450, 451))
    held_out, trained = folder.split(texts.texts)
    if aside:
        assert [text.tokens[-1] for text in held_out] == [451]
        assert len(trained) == 40
    else:
        assert len(held_out) + len(trained) == 42
        assert 2 <= len(held_out) < 20
        assert not {text.tokens[1] for text in held_out} & {text.tokens[1] for text in trained}


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("others", [[], [[5, 6, 8, 100, 7, 70, 9]], [[*range(80, 142), 1, 9]]])
def test_a_token_that_begins_the_users_turn_marks_no_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: list[list[int]], *, is_exact: bool
) -> None:
    """Prompts that differ behind an end token of the model, which begins the user's turn, are told apart.

    The tokens are in the place of GLM-4's: 7 is that end token, and 9 begins the answer. Among the texts may be
    one with a system message, or with a prompt longer than what is stored of it.
    """
    folder, texts = folder_of(tmp_path, monkeypatch, 9)
    prompts = [[5, 6, 7, first, 9] for first in range(20, 60)]
    for number, prompt in enumerate(prompts + others):
        answers = [range(200, 205), range(200, 230)]
        for turn, answer in enumerate(answers):
            tokens = [*prompt, *answer]
            cut = len(prompt) if is_exact else len(tokens) // 2
            texts.add(2 * number + turn, np.array(tokens[:cut], np.int32), tuple(tokens[cut:]))
    held_out, trained = folder.split(texts.texts)
    assert len(held_out) + len(trained) == 2 * len(prompts + others)
    assert 2 <= len(held_out) < 20
    assert not {text.tokens[3] for text in held_out} & {text.tokens[3] for text in trained}
    texts.add(-1, np.array([5, 6, 7, 20, 9], np.int32), (450, 451))
    held_out, trained = folder.split(texts.texts)
    assert [text.tokens[-1] for text in held_out] == [451]
    assert len(trained) == 2 * len(prompts + others) - 2


@pytest.mark.parametrize("template", [tiny.TEMPLATE, "{{ messages[0].content }}", "{{ raise_exception('no') }}"])
def test_where_an_answer_begins_is_asked_of_the_chat_template(tmp_path: Path, template: str) -> None:
    override = {"tokenizer.chat_template": template}
    tiny.write_gguf(tmp_path / "tiny.gguf", tiny.random_weights(), override=override)
    folder = WorkFolder(tmp_path, loaded := read_source(tmp_path / "tiny.gguf"), TrainingOptions())
    if template != tiny.TEMPLATE:
        assert len(folder.middle) == 0
        return
    with closing(open_encoder(loaded, tmp_path)) as encoder:
        tokens = np.array(encoder.encode([{"role": "user", "content": "the in"}]))
    size = len(folder.middle)
    assert 0 < size < len(tokens)
    assert np.array_equal(tokens[-size:], folder.middle)


def test_prompts_that_are_known_exactly_have_their_places_by_all_of_their_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So they had before stored texts were told apart, and a training that was begun then goes on as it was."""
    folder, texts = folder_of(tmp_path, monkeypatch, 2)
    for first in range(20, 60):
        texts.add(first, np.array([7, first, 2, 9], np.int32), (3, 4, 5, 6, 7, 8))
    places = [sha256(np.array([7, first, 2, 9], np.int32)).digest()[:4] for first in range(20, 60)]
    held_out, _ = folder.split(texts.texts)
    assert [text.tokens[1] - 20 for text in held_out] == [
        number for number, place in enumerate(places) if int.from_bytes(place) / 2**32 <= 1 / 12
    ]


def test_states_for_which_there_is_no_room_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = disk.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(DiskFull):
        StatesFile(tmp_path / "states", 2).fill(made_texts((2, 3)), states_of)


def test_padding_reads_states_of_a_text_of_its_own_line() -> None:
    _, *texts = made_texts((50, 9), (2, 5), (4, 9), (1, 2), (3, 1))
    (batch,) = pack(texts, 15, 4, None)
    for line, stored in zip(batch.text, batch.stored, strict=True):
        own = [texts[number] for number in {*line.tolist()} - {-1}]
        assert {*stored.tolist()} <= {text.start + row for text in own for row in range(len(text.tokens))}


@pytest.mark.parametrize("seed", [None, 1])
def test_each_token_of_an_answer_but_the_last_begins_a_draft_in_its_own_text(seed: int | None) -> None:
    texts = made_texts((2, 5), (4, 9), (1, 2), (0, 3), (3, 1))
    rng = None if seed is None else np.random.default_rng(seed)
    begun = []
    for batch in pack(texts, 12, 2, rng):
        for step in range(3):
            goes_on = batch.has_next(step)
            token = batch.at(batch.tokens, step)[goes_on]
            text = batch.at(batch.text, 0)[goes_on]
            assert np.array_equal(batch.at(batch.tokens, step + 1)[goes_on], token + 1)
            ends = np.array([own.tokens[-1] for own in texts])
            assert np.all(token < ends[text])
        starts = batch.starts >= 0
        begun += batch.at(batch.tokens, 0)[starts].tolist()
        assert np.array_equal(batch.at(batch.stored, 0)[starts] + 1, batch.at(batch.tokens, 0)[starts])
    wanted = [token for own in texts for token in own.tokens[max(1, own.num_prompt) : -1].tolist()]
    assert sorted(begun) == wanted
    assert num_drafts(texts, 12) == len(wanted)


def test_drafts_of_a_text_longer_than_a_line_are_counted_as_far_as_they_fit() -> None:
    texts = made_texts((9, 11), (2, 30), (3, 9), (1, 1), (0, 1))
    for num_rows in (6, 12, 16, 40):
        begun = sum(int((batch.starts >= 0).sum()) for batch in pack(texts, num_rows, 2, None))
        assert num_drafts(texts, num_rows) == begun


def test_a_text_of_one_token_in_front_of_others_begins_no_draft() -> None:
    texts = made_texts((1, 0), (2, 5))
    (batch,) = pack(texts, 12, 2, None)
    assert batch.at(batch.tokens, 0)[batch.starts >= 0].tolist() == [3, 4, 5, 6]
