import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from edgespec.errors import UsageError
from edgespec.simulation.recording import RecordedRound, Recording, read_recording

ROUNDS = [
    RecordedRound(0, 0, 0.0, 90.0, 1, source="none"),  # reads the prompt
    RecordedRound(2, 2, 6.0, 11.0, 2),
    RecordedRound(3, 1, 15.0, 13.0, 3),
    RecordedRound(0, 0, 0.0, 10.0, 4, source="none"),
    RecordedRound(2, 0, 8.0, 15.0, 5),
]


def write(path: Path, *documents: object) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in documents))
    return path


def document(each: RecordedRound, **others: object) -> dict[str, object]:
    return {**asdict(each), **others}


def test_rounds_are_read_back(tmp_path: Path) -> None:
    path = write(tmp_path / "rounds", *(document(each, expected={}) for each in ROUNDS))
    assert read_recording(path) == Recording(ROUNDS)


def test_a_recording_says_where_its_drafter_was_right() -> None:
    recording = Recording(ROUNDS)
    assert recording.outcomes == [None, True, True, None, True, False, None, False]
    assert len(recording.outcomes) == recording.num_tokens
    assert recording.acceptance == 3 / 5
    assert recording.acceptance_by_position == [2 / 3, 1 / 2]


def test_a_recording_says_what_passes_and_drafts_take() -> None:
    recording = Recording(ROUNDS)
    assert recording.verify_ms == {0: 10.0, 2: 13.0, 3: 13.0}
    assert recording.draft_ms == 4.0


def test_what_was_drafted_ahead_does_not_tell_what_drafts_take() -> None:
    ahead = [replace(each, ahead=True, draft_ms=1.0) for each in ROUNDS]
    assert Recording([*ROUNDS, *ahead]).draft_ms == 4.0
    assert Recording(ahead).draft_ms is None


def test_a_recording_without_drafts_says_nothing_of_them() -> None:
    recording = Recording(ROUNDS[:1])
    assert (recording.acceptance, recording.draft_ms, recording.verify_ms) == (None, None, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no round"),
        ("round 1\n", "line 1 is not JSON"),
        ("[1]\n", "line 1: wanted an object"),
        ('{"num_draft": 1}\n', "num_accepted is missing"),
        ('{"num_draft": -1, "num_accepted": 0, "draft_ms": 0, "verify_ms": 1}\n', "num_draft is -1: wanted"),
        ('{"num_draft": 1.5, "num_accepted": 0, "draft_ms": 0, "verify_ms": 1}\n', "num_draft is 1.5: wanted"),
        (
            '{"num_draft": 1, "num_accepted": 2, "draft_ms": 0, "verify_ms": 1}\n',
            "num_accepted is 2, wanted",
        ),
        ('{"num_draft": 1, "num_accepted": 1, "draft_ms": NaN, "verify_ms": 1}\n', "draft_ms is nan: wanted"),
        (
            '{"num_draft": 1, "num_accepted": 1, "draft_ms": 1, "verify_ms": Infinity}\n',
            "verify_ms is inf: wanted",
        ),
        (
            '{"num_draft": 100000, "num_accepted": 1, "draft_ms": 1, "verify_ms": 1}\n',
            "num_draft is 100000: wanted a whole number <= 1024",
        ),
        ('{"num_draft": 1, "num_accepted": 1, "draft_ms": 1%s, "verify_ms": 1}\n' % ("0" * 400), "draft_ms is 10"),
        ("\x00\n", "line 1"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rounds"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_recording(path)


def test_a_missing_file_and_one_that_is_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name, said in (("none", "cannot read"), ("bytes", "it ends within a character of UTF-16")):
        with pytest.raises(UsageError, match=said):
            read_recording(tmp_path / name)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs the device /dev/zero")
def test_a_file_without_end_is_refused() -> None:
    with pytest.raises(UsageError, match="not a regular file"):
        read_recording(Path("/dev/zero"))


def test_drafts_of_several_sources_are_refused(tmp_path: Path) -> None:
    rounds = [document(ROUNDS[1]), document(ROUNDS[2], source="ngram")]
    with pytest.raises(UsageError, match="drafts of model, ngram; wanted drafts of one model"):
        read_recording(write(tmp_path / "rounds", *rounds))
