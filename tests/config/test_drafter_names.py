from pathlib import Path

import pytest

from edgespec.config.drafter_names import Cascade, parse
from edgespec.errors import UsageError


@pytest.mark.parametrize(
    ("named", "simple", "cascades"),
    [
        ("none", set(), []),
        ("auto", {"auto"}, []),
        ("ngram+lookahead", {"ngram", "lookahead"}, []),
        ("org/name", set(), [(("org/name",), None)]),
        ("suffix+a,b,ngram+self", {"suffix"}, [(("a", "b"), "ngram"), (("self",), None)]),
    ],
)
def test_names_are_taken_apart(
    named: str, simple: set[str], cascades: list[tuple[tuple[str, ...], str | None]]
) -> None:
    assert parse(named) == (simple, tuple(Cascade(*each) for each in cascades))


def test_what_exists_is_one_model_whatever_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "a+b,suffix"
    folder.mkdir()
    assert parse(str(folder)).cascades == (Cascade((str(folder),), None),)
    assert parse(f"{tmp_path}/a,b+suffix").simple == {"suffix"}


@pytest.mark.parametrize("named", ["x" * 300, "x" * 5000, "a\0b", "~nobody/x"])
def test_what_no_file_can_be_called_is_the_name_of_a_model(named: str) -> None:
    assert parse(f"suffix+{named},ngram") == ({"suffix"}, (Cascade((named,), "ngram"),))


@pytest.mark.parametrize("named", ["+", "auto+", "a,,b", "suffix,ngram", "a,auto", "none+ngram", ",suffix"])
def test_what_is_no_drafter_is_refused(named: str) -> None:
    with pytest.raises(UsageError, match="in place of a model"):
        parse(named)


def test_no_name_at_all_is_refused() -> None:
    with pytest.raises(UsageError, match="the drafter is empty"):
        parse("")
