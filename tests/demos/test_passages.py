"""Finding the passages of notes that a question is about."""

import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from passages import Index, Passage, read_folder, split_passages, words

NOTES = Path(__file__).parents[2] / "demos" / "notes"


@pytest.mark.parametrize(
    ("question", "place"),
    [
        ("When does the boat club meet?", "boat-club.md:3"),
        ("Where is the resin for the canoe?", "boat-club.md:10"),
        ("how long does the bread bake", "bread.md:3"),
        ("When do I prune the apple trees?", "garden.txt:1"),
        ("is the camera on the packing list for Tromsø?", "travel.md:7"),
    ],
)
def test_the_passage_that_answers_comes_first(question: str, place: str) -> None:
    assert Index(read_folder(NOTES)).best(question, 3)[0].place == place


def test_a_place_is_the_line_where_the_passage_begins() -> None:
    for passage in read_folder(NOTES):
        lines = (NOTES / passage.file).read_text(encoding="utf-8").splitlines()
        assert lines[passage.line - 1] == passage.text.splitlines()[0]


@given(st.text(alphabet="ab \n#", max_size=200))
def test_no_word_of_a_note_is_lost(text: str) -> None:
    held = " ".join(passage.text for passage in split_passages("a.md", text)).split()
    lines = text.splitlines()
    is_heading = [line.startswith("#") and (i == 0 or not lines[i - 1].strip()) for i, line in enumerate(lines)]
    assert held == " ".join(line for line, skip in zip(lines, is_heading, strict=True) if not skip).split()


@given(
    st.lists(st.lists(st.sampled_from("bcde"), min_size=1, max_size=9), min_size=1, max_size=6), st.text("bcdef ")
)
def test_scores_are_those_of_the_formula(contents: list[list[str]], question: str) -> None:
    passages = [Passage("x", 1, "", " ".join(content)) for content in contents]
    counts = [Counter(["x", *content]) for content in contents]
    average = sum(count.total() for count in counts) / len(counts)
    for found, count in zip(Index(passages).scores(question), counts, strict=True):
        wanted = 0.0
        for word in set(words(question)):
            holders = sum(word in each for each in counts)
            rarity = math.log(1 + (len(counts) - holders + 0.5) / (holders + 0.5))
            length = 1 - 0.75 + 0.75 * count.total() / average
            wanted += rarity * count[word] * 2.2 / (count[word] + 1.2 * length)
        assert found == pytest.approx(wanted)


def test_hidden_other_and_huge_files_are_not_notes(tmp_path: Path) -> None:
    for name in (".git/a.md", ".b.md", "c.py", "deep/d.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("word")
    (tmp_path / "huge.txt").write_text("word " * 300_000)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert [passage.file for passage in read_folder(tmp_path)] == ["deep/d.md", "latin.txt"]


def test_words_leave_out_case_and_plural() -> None:
    assert words("The Boats, classes & GLASS of straße 12") == [
        "the", "boat", "classe", "glass", "of", "strasse", "12",
    ]  # fmt: skip


def test_common_words_find_nothing() -> None:
    index = Index(read_folder(NOTES))
    assert index.best("what is it and where are they?", 3) == []
    assert [passage.place for passage in index.best("Where is the key of the shed?", 4)] == ["boat-club.md:3"]


def test_no_passage_and_no_shared_word_find_nothing() -> None:
    assert Index([]).best("anything", 3) == []
    assert Index([Passage("a", 1, "", "one two")]).best("three", 3) == []
