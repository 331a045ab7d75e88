import zipfile
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from made_rows import NUM_COLUMNS, made_rows

from edgespec.draft.learned_head import LearnedHead, ShadowCount, ShadowTrial
from edgespec.draft.verified_rows import train_correction
from edgespec.errors import UsageError
from edgespec.setup.learned_file import LearnedFile, require_domain
from edgespec.setup.pair import learned_files


@pytest.fixture
def head(tmp_path: Path) -> Path:
    (tmp_path / "edgespec.json").write_text("{}")
    return tmp_path


@pytest.fixture(scope="module")
def learned() -> LearnedHead:
    _, rows = made_rows(80, 0)
    steps = train_correction(rows, NUM_COLUMNS)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            correction = end.value
            break
    start = LearnedHead().with_rows(rows)
    return replace(
        start,
        active=correction,
        candidate=correction,
        trial=ShadowTrial(40, 3, 2),
        back=ShadowTrial(9, 1, 0),
        tally=ShadowCount(400, 100, 120),
        num_swaps=1,
        changed="2026-11-23T10:00:00+00:00",
    )


def same(one: object, other: object) -> bool:
    """Whether two values have equal arrays, and equal values otherwise."""
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if hasattr(one, "__dataclass_fields__"):
        return type(one) is type(other) and all(
            same(getattr(one, each.name), getattr(other, each.name))
            for each in fields(one)  # type: ignore[arg-type]
        )
    return one == other


def test_what_is_written_is_read_and_forgotten(head: Path, learned: LearnedHead) -> None:
    file = LearnedFile(head, "mail")
    assert file.read(pytest.fail) is None
    for each in (learned, LearnedHead()):
        file.write(each)
        assert same(file.read(pytest.fail), each)
    LearnedFile(head, "code").write(learned)
    assert [each.domain for each in learned_files(head)] == ["code", "mail"]
    for each in learned_files(head):
        each.forget()
    assert [path.name for path in head.iterdir()] == ["edgespec.json"]


def break_file(path: Path, how: str) -> None:
    if how == "empty":
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-200])
    elif how == "flipped":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 255
        path.write_bytes(data)
    elif how == "pickled":
        np.savez(path, document=np.array([{}], object))
    elif how == "other keys":
        np.savez(path, document=np.zeros(3))
    elif how in ("no array", "cut header"):
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        whole = members["rows.contexts.npy"]
        members["rows.contexts.npy"] = b"junk" if how == "no array" else whole.replace(b"}", b" ", 1)
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
    elif how == "foreign":
        (path.parents[1] / "edgespec.json").write_text("{ }")
    elif how == "folder":
        path.unlink()
        path.mkdir()
    else:  # an array of another form, or with numbers out of range
        name, value = {
            "shape": ("active.biases", np.zeros((2, 2), np.float32)),
            "not finite": ("rows.rest", np.full(80, np.nan, np.float32)),
            "range": ("active.places", np.arange(-5, 59, dtype=np.int64)),
            "rows": ("rows.contexts", np.zeros((3, 2), np.int64)),
            "kind": ("active.biases", np.array(["a"])),
        }[how]
        with np.load(path) as arrays:
            kept = {key: arrays[key] for key in arrays.files}
        np.savez(path, **{**kept, name: value})


KINDS = ("empty", "cut", "flipped", "pickled", "other keys", "no array", "cut header", "foreign", "folder")
FORMS = ("shape", "not finite", "range", "rows", "kind")


@pytest.mark.parametrize("how", [*KINDS, *FORMS])
def test_a_file_that_cannot_be_used_is_reported_and_ignored(head: Path, learned: LearnedHead, how: str) -> None:
    file, lines = LearnedFile(head, "mail"), list[str]()
    file.write(learned)
    break_file(file.path, how)
    assert file.read(lines.append) is None
    (line,) = lines
    assert f"{file.path} cannot be used (" in line
    assert line.endswith("; learning starts again from nothing")
    assert ("of another head" in line) == (how == "foreign")


@pytest.mark.slow
def test_an_archive_that_unpacks_to_more_than_memory_is_not_unpacked(head: Path) -> None:
    file, lines = LearnedFile(head, "mail"), list[str]()
    file.path.parent.mkdir()
    with zipfile.ZipFile(file.path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("a.npy", "w") as member:
        for _ in range(300):
            member.write(bytes(1 << 20))
    assert file.read(lines.append) is None
    assert len(lines) == 1


@pytest.mark.parametrize("domain", ["", "..", "a/b", ".hidden", "x" * 65, "a b", "é"])
def test_names_that_could_leave_the_folder_are_refused(domain: str) -> None:
    with pytest.raises(UsageError, match="cannot be a name to learn under"):
        require_domain(domain)
