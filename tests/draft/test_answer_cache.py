import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.draft.answer_cache import NUM_PROMPT_TOKENS, AnswerCache, AnswerDrafter, AnswerIndex
from edgespec.draft.drafter import DraftRequest
from edgespec.draft.suffix import follower_bucket
from edgespec.system.disk import hold_lock
from edgespec.types import TokenIds

GREEDY = GumbelSampler(SamplingParams())
TEXTS = st.lists(st.integers(0, 3), max_size=60)
ADD = (
    "import sys; import numpy as np; from pathlib import Path\n"
    "from edgespec.draft import answer_cache; from edgespec.draft.answer_cache import AnswerCache\n"
    "answer_cache._PATIENCE_S = 60.0  # with another one that is slow to write\n"
    "for i in range(20):\n"
    "    answers = AnswerCache(Path(sys.argv[1]), 'm', 'v', 500)\n"
    "    answers.add(np.zeros(0, np.int32), np.array([int(sys.argv[2]), i], np.int32)); answers.save()\n"
)


def ids(*tokens: int) -> TokenIds:
    return np.array(tokens, np.int32)


def cache(folder: Path, lines: list[str] | None = None, cap_bytes: int = 1 << 20, model: str = "m") -> AnswerCache:
    return AnswerCache(folder, model, "v", 500, [].append if lines is None else lines.append, cap_bytes)


def save(folder: Path, *answers: TokenIds, cap_bytes: int = 1 << 20) -> Path:
    held = cache(folder, cap_bytes=cap_bytes)
    for answer in answers:
        held.add(ids(), answer)
    held.save()
    return held.path


def wait_for_index(answers: AnswerCache) -> None:
    answers.index()
    assert answers._builder is not None
    answers._builder.join()


def longest(tokens: list[int], text: list[int]) -> tuple[int, list[int]]:
    """The longest suffix of tokens, up to 32, in text, and where it ends there, by a plain search."""
    for length in range(min(len(tokens), 32), 0, -1):
        ends = [
            end for end in range(length - 1, len(text)) if text[end + 1 - length : end + 1] == tokens[-length:]
        ]
        if ends:
            return length, ends
    return 0, []


@given(TEXTS, TEXTS)
def test_index_finds_what_a_plain_search_finds(text: list[int], tokens: list[int]) -> None:
    length, positions = AnswerIndex(ids(*text)).match(ids(*tokens))
    assert (length, sorted(position - 32 for position in positions)) == longest(tokens, text)


@given(TEXTS, TEXTS)
def test_first_guess_is_what_most_often_followed(text: list[int], tokens: list[int]) -> None:
    draft = AnswerIndex(ids(*text)).draft(ids(*tokens), 1, "answers")
    length, ends = longest(tokens, text)
    followed = [text[end + 1] for end in ends[-16:] if end + 1 < len(text)]
    assert len(draft.tokens) == min(1, len(followed))
    for token, bucket in zip(draft.tokens.tolist(), draft.buckets, strict=True):
        assert followed.count(token) == max(map(followed.count, followed))
        is_unanimous = len(set(followed)) == 1
        assert bucket == follower_bucket(length, followed.count(token), is_unanimous=is_unanimous)


def test_a_later_session_drafts_from_an_earlier_answer(tmp_path: Path) -> None:
    save(tmp_path, ids(1, 2, 3, 4, 5))
    later = cache(tmp_path)
    wait_for_index(later)
    draft = AnswerDrafter(later).draft(ids(9, 2, 3), DraftRequest(8), GREEDY)
    assert (draft.tokens.tolist(), draft.source) == ([4, 5], "answers")
    assert len(draft.buckets) == 2


def test_guesses_never_run_from_one_answer_into_the_next(tmp_path: Path) -> None:
    save(tmp_path, ids(1, 2), ids(3, 4))
    later = cache(tmp_path)
    wait_for_index(later)
    assert AnswerDrafter(later).draft(ids(1), DraftRequest(8), GREEDY).tokens.tolist() == [2]
    assert not len(AnswerDrafter(later).draft(ids(2), DraftRequest(8), GREEDY).tokens)


def test_without_a_file_there_is_no_guess_and_no_line(tmp_path: Path) -> None:
    lines: list[str] = []
    empty = cache(tmp_path / "none", lines)
    wait_for_index(empty)
    assert not len(AnswerDrafter(empty).draft(ids(1, 2), DraftRequest(8), GREEDY).tokens)
    assert (lines, (tmp_path / "none").exists()) == ([], False)


def test_only_the_end_of_a_prompt_is_stored(tmp_path: Path) -> None:
    answers = cache(tmp_path)
    answers.add(np.arange(500, dtype=np.int32), ids(7))
    answers.save()
    assert answers.read().tolist() == [*range(500 - NUM_PROMPT_TOKENS, 500), 7, -1]


def test_the_oldest_answers_go_where_the_file_is_full(tmp_path: Path) -> None:
    path = save(tmp_path, ids(1, 1, 1), ids(2, 2, 2), ids(3, 3, 3), cap_bytes=40)
    assert cache(tmp_path).read().tolist() == [2, 2, 2, -1, 3, 3, 3, -1]
    save(tmp_path, np.arange(100, dtype=np.int32), cap_bytes=40)
    assert cache(tmp_path).read().tolist() == [*range(91, 100), -1]
    assert path.stat().st_size < 40 + 200


def test_an_answer_given_again_is_held_once(tmp_path: Path) -> None:
    save(tmp_path, ids(1, 2), ids(3), ids(1, 2))
    assert cache(tmp_path).read().tolist() == [3, -1, 1, 2, -1]


def test_each_model_has_its_own_file(tmp_path: Path) -> None:
    save(tmp_path, ids(1, 2))
    assert not len(cache(tmp_path, model="another").read())


@pytest.mark.skipif(sys.platform == "win32", reason="needs file modes, which Windows lacks")
def test_no_other_user_may_read_the_file(tmp_path: Path) -> None:
    path = save(tmp_path / "answers", ids(1, 2))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("token", [-2, 500, 2**31 - 1])
def test_tokens_that_the_model_lacks_are_not_read(tmp_path: Path, token: int) -> None:
    save(tmp_path, ids(1, token, 3))
    lines: list[str] = []
    assert not len(cache(tmp_path, lines).read())
    assert "a new file" in lines[0]


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "foreign", "odd"])
def test_a_damaged_file_is_reported_once_and_replaced(tmp_path: Path, damage: str) -> None:
    path = save(tmp_path, ids(1, 2, 3))
    content = path.read_bytes()
    path.write_bytes(
        {
            "cut": content[:-4],
            "flip": content[:-5] + bytes([content[-5] ^ 1]) + content[-4:],
            "empty": b"",
            "foreign": content.replace(b"\nv\n", b"\nw\n"),
            "odd": content + b"x",
        }[damage]
    )
    lines: list[str] = []
    damaged = cache(tmp_path, lines)
    wait_for_index(damaged)
    assert len(lines) == 1
    assert not len(AnswerDrafter(damaged).draft(ids(1), DraftRequest(8), GREEDY).tokens)
    damaged.add(ids(), ids(4, 5))
    damaged.save()
    assert cache(tmp_path).read().tolist() == [4, 5, -1]
    assert len(lines) == 1


def test_a_folder_that_cannot_be_made_is_reported_and_harms_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    lines: list[str] = []
    answers = cache(tmp_path / "file", lines)
    answers.add(ids(), ids(1))
    answers.save()
    assert len(lines) == 1
    assert lines[0].startswith("these answers cannot help to draft later ones: cannot write ")


def test_what_a_killed_writer_left_is_cleared_away(tmp_path: Path) -> None:
    path = cache(tmp_path).path
    path.with_suffix(".new").write_bytes(b"half")
    save(tmp_path, ids(1))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_two_processes_lose_no_answer(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", ADD, str(tmp_path), str(who)]) for who in (1, 2)]
    assert [writer.wait() for writer in writers] == [0, 0]
    tokens = cache(tmp_path).read().reshape(-1, 3)[:, :2].tolist()
    assert sorted(tokens) == [[who, i] for who in (1, 2) for i in range(20)]


def test_a_file_that_another_holds_is_waited_for_a_while_and_written_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.draft.answer_cache._PATIENCE_S", 0.03)
    save(tmp_path, ids(1, 2))
    lines: list[str] = []
    answers = cache(tmp_path, lines)
    answers.add(ids(), ids(3))
    with hold_lock(answers.path.with_suffix(".lock")):
        answers.save()
    assert len(lines) == 1
    assert lines[0].startswith("1 answer is not saved in ")
    assert f"held by process {os.getpid()} (waited 0.03 s)" in lines[0]
    assert answers.read().tolist() == [1, 2, -1]
    answers.add(ids(), ids(4))
    answers.save()
    assert cache(tmp_path).read().tolist() == [1, 2, -1, 3, -1, 4, -1]
    assert len(lines) == 1


@pytest.mark.parametrize("kind", ["pipe", "huge"])
def test_what_cannot_be_an_answer_cache_is_not_read(tmp_path: Path, kind: str) -> None:
    lines: list[str] = []
    answers = cache(tmp_path, lines)
    answers.path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(answers.path)
    else:
        answers.path.touch()
        os.truncate(answers.path, 1 << 40)  # a hole
    assert len(answers.read()) == 0
    assert "a new file" in lines[0]
    answers.add(ids(1, 2), ids(3, 4))
    answers.save()
    assert len(cache(tmp_path).read())
