"""The question for a better first model: who is asked, what is offered, what an answer is."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.chat import first_model
from edgespec.chat.first_model import CANDIDATES, Offer, ask, disk_bytes, find_offer, format_question, load_first
from edgespec.config.options import DEFAULT_MODEL
from edgespec.errors import ModelError
from edgespec.setup.catalog import CATALOG, HubRepository
from edgespec.setup.foresee import memory_bytes
from edgespec.setup.home import ModelHome

LARGE, SMALL = CANDIDATES
AMPLE = 1 << 60


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Someone at a terminal, whose hub answers, and what is shown there."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    shown: list[str] = []
    monkeypatch.setattr(first_model, "_print", shown.append)
    monkeypatch.setattr(first_model, "can_fetch", lambda source, timeout_s: True)
    monkeypatch.setattr(first_model, "free_memory", lambda limit: SimpleNamespace(free_bytes=limit or AMPLE))
    monkeypatch.setattr(first_model, "_free_disk", lambda folder: AMPLE)
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EDGESPEC_CONFIG", str(tmp_path / "config.toml"))
    return shown


def options(**changed: Any) -> Any:
    plain = {
        "stated": {},
        "configured": set(),
        "continues": None,
        "transcript": None,
        "quiet": False,
        "offline": False,
    }
    parser = SimpleNamespace(get_default=lambda name: DEFAULT_MODEL)
    return SimpleNamespace(**{"model": DEFAULT_MODEL, "memory": None, "parser": parser, **plain, **changed})


def answer(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    left = iter(lines)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True, readline=lambda: next(left)))


def loaded(options: Any, load: Any = lambda options: options.model) -> Any:
    """What load_first gives to load as the model's name."""
    return load_first(options, load)


def test_the_largest_that_memory_and_disk_hold_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = ModelHome(tmp_path)
    monkeypatch.setattr(first_model, "_free_disk", lambda folder: AMPLE)
    assert find_offer(home, AMPLE) == Offer(LARGE, is_here=False)
    assert find_offer(home, memory_bytes(CATALOG[LARGE]) - 1) == Offer(SMALL, is_here=False)
    assert find_offer(home, memory_bytes(CATALOG[SMALL]) - 1) is None
    monkeypatch.setattr(first_model, "_free_disk", lambda folder: disk_bytes(CATALOG[LARGE]) - 1)
    assert find_offer(home, AMPLE) == Offer(SMALL, is_here=False)
    monkeypatch.setattr(first_model, "_free_disk", lambda folder: 0)
    assert find_offer(home, AMPLE) is None
    (tmp_path / "models" / LARGE).mkdir(parents=True)
    (tmp_path / "models" / LARGE / "edgespec.json").write_text("{}")
    assert find_offer(home, AMPLE) == Offer(LARGE, is_here=True)


@pytest.mark.parametrize("name", CANDIDATES)
def test_candidates_need_no_account_and_are_larger_than_the_default(name: str) -> None:
    entry = CATALOG[name]
    assert isinstance(entry.source, HubRepository)
    assert (entry.is_gated, entry.license) == (False, "apache-2.0")
    assert entry.num_parameters > 3 * CATALOG[DEFAULT_MODEL].num_parameters


@pytest.mark.parametrize("columns", ["80", "30"])
def test_the_question_says_what_is_downloaded_and_fits_the_window(
    columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    question = format_question(Offer(LARGE, is_here=False))
    words = " ".join(question.split())
    for part in (
        "Qwen2.5 1.5B Instruct (qwen2.5-1.5b)",
        "946 MB to download, then 1.3 GB on disk",
        "/Qwen/Qwen2.5-1.5B-Instruct-GGUF, licence apache-2.0",
        "2.0 GB of memory",
        "tested with edgespec: no; Qwen2.5-Coder 1.5B Instruct, which has the same shape: another file of it",
        "Download it and use it for chats? [y/N]",
    ):
        assert part in words
    assert all(len(line) < int(columns) for line in question.split("\n") if "https://" not in line)
    assert "on this machine already" in format_question(Offer(LARGE, is_here=True))


@pytest.mark.parametrize(
    ("lines", "is_yes"),
    [
        (["y\n"], True),
        (["YES\n"], True),
        (["\n"], False),
        (["no\n"], False),
        (["what?\n", "maybe\n", "y\n"], True),
        ([""], None),
        (["what?\n", ""], None),
    ],
)
def test_enter_is_no_and_anything_else_is_asked_again(lines: list[str], is_yes: bool | None) -> None:
    left, shown = iter(lines), []
    assert ask("Yes? ", lambda: next(left), shown.append) is is_yes
    assert shown == ["Yes? ", *["please answer y or n: "] * (len(lines) - 1)]


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "named"},
        {"stated": {"model": "--model"}},
        {"stated": {"drafter": "--drafter"}},
        {"configured": {"drafter"}},
        {"configured": {"model"}},
        {"continues": True},
        {"transcript": Path("talk")},
        {"quiet": True},
        {"memory": "900M"},
    ],
)
def test_who_has_chosen_or_has_no_room_is_not_asked(terminal: list[str], changed: dict[str, Any]) -> None:
    given = options(**changed)
    assert loaded(given) == given.model
    assert terminal == []


@pytest.mark.parametrize("stream", ["stdin", "stdout", "stderr"])
def test_scripts_are_not_asked(terminal: list[str], stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, stream, SimpleNamespace(isatty=lambda: False))
    assert loaded(options()) == DEFAULT_MODEL
    assert terminal == []


def test_a_yes_loads_the_better_model_and_is_remembered(
    terminal: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "y\n")
    assert loaded(options()) == LARGE
    assert f'model = "{LARGE}"' in Path(os.environ["EDGESPEC_CONFIG"]).read_text()


def test_a_no_is_remembered(terminal: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, "n\n")
    assert loaded(options()) == DEFAULT_MODEL
    assert f'model = "{DEFAULT_MODEL}"' in Path(os.environ["EDGESPEC_CONFIG"]).read_text()
    assert f"edgespec config set model {LARGE}" in terminal[-1]


def test_an_answer_that_cannot_be_remembered_is_said_and_holds(
    terminal: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(os.environ["EDGESPEC_CONFIG"]).mkdir()
    answer(monkeypatch, "y\n")
    assert loaded(options()) == LARGE
    assert "you will be asked again" in terminal[-1]


def test_a_model_that_does_not_load_leaves_the_default_and_no_answer(
    terminal: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(options: Any) -> str:
        if options.model == LARGE:
            raise ModelError("the hub is gone")
        return str(options.model)

    answer(monkeypatch, "y\n")
    assert loaded(options(), load) == DEFAULT_MODEL
    assert "the hub is gone" in terminal[-1]
    assert f"continuing with {DEFAULT_MODEL}" in terminal[-1]
    assert not Path(os.environ["EDGESPEC_CONFIG"]).exists()


def test_without_a_hub_there_is_a_note_now_and_then(terminal: list[str]) -> None:
    assert [loaded(options(offline=True)) for _ in range(2)] == [DEFAULT_MODEL] * 2
    (note,) = terminal
    assert f"edgespec chat {LARGE}" in note
    (place,) = Path(os.environ["EDGESPEC_HOME"]).iterdir()
    os.utime(place, (0, 0))  # long ago
    loaded(options(offline=True))
    assert terminal == [note, note]
