"""The program whose model calls functions: with a decoder that asks for calls by rule, and as a process."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import agent_loop
import pytest
from scripted import scripted_engine

from edgespec import Engine, ToolCall, load

DEMOS = Path(__file__).parents[2] / "demos"
SUPPORT = Path(__file__).parents[1] / "support"
QUESTION = "When does the boat club meet?"
Rule = Callable[[str], str]


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMOS / "notes", tmp_path / "notes"))


@pytest.fixture
def engine_of(tiny_model: Path, tmp_path: Path) -> Callable[[Rule], Engine]:
    return lambda rule: scripted_engine(tiny_model, tmp_path / "engine", rule)


def call_of(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def remind(prompt: str) -> str:
    """Look up, write a reminder of what was found, and tell."""
    if "does not want" in prompt:
        return "As you like."
    if "second Tuesday" not in prompt:
        return call_of("find_lines", word="MEET")
    if "written" not in prompt:
        return call_of("add_reminder", text="boat club,\nsecond Tuesday at seven")
    return "On the second Tuesday; I wrote a reminder."


def test_calls_are_made_and_their_results_go_back(engine_of: Callable[[Rule], Engine], notes: Path) -> None:
    prompts, calls = list[str](), list[ToolCall]()

    def say_yes(call: ToolCall) -> bool:
        calls.append(call)
        return True

    def rule(prompt: str) -> str:
        prompts.append(prompt)
        return remind(prompt)

    with engine_of(rule) as engine:
        said = agent_loop.answer(engine, QUESTION, agent_loop.tools_for(notes), say_yes)
    assert said == "On the second Tuesday; I wrote a reminder."
    assert [call.name for call in calls] == ["find_lines", "add_reminder"]
    assert (notes / "reminders.md").read_text("utf-8") == "- boat club, second Tuesday at seven\n"
    assert "One word, in upper or lower case." in prompts[0]
    assert "boat-club.md: We meet on the second Tuesday" in prompts[-1]


def test_nothing_is_done_without_a_yes(engine_of: Callable[[Rule], Engine], notes: Path) -> None:
    def rule(prompt: str) -> str:
        return "As you like." if "does not want" in prompt else call_of("add_reminder", text="x")

    with engine_of(rule) as engine:
        assert (
            agent_loop.answer(engine, QUESTION, agent_loop.tools_for(notes), lambda call: False) == "As you like."
        )
    assert not (notes / "reminders.md").exists()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (call_of("find_lines", phrase="boat"), "error: ValueError: find_lines has no argument"),
        (call_of("find_lines", word=7), "error: ValueError: the argument"),
    ],
)
def test_a_wrong_call_is_told_to_the_model(
    engine_of: Callable[[Rule], Engine], notes: Path, wrong: str, told: str
) -> None:
    with engine_of(lambda prompt: "I give up." if told in prompt else wrong) as engine:
        assert agent_loop.answer(engine, QUESTION, agent_loop.tools_for(notes), lambda call: True) == "I give up."


def test_a_model_that_calls_without_end_is_stopped(
    engine_of: Callable[[Rule], Engine], notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_loop, "MAX_STEPS", 2)
    answers = iter([True, True])
    with engine_of(lambda prompt: call_of("find_lines", word="quux")) as engine:
        said = agent_loop.answer(engine, QUESTION, agent_loop.tools_for(notes), lambda call: next(answers))
    assert said == "(no answer yet; this program takes 2 steps at most)"
    assert not list(answers)


@pytest.mark.parametrize(
    ("typed", "is_made"), [("y", True), ("Yes", True), ("", False), ("n", False), ("yet", False)]
)
def test_only_a_yes_is_a_yes(typed: str, is_made: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = list[str]()

    def read(prompt: str) -> str:
        shown.append(prompt)
        return typed

    monkeypatch.setattr("builtins.input", read)
    call = ToolCall(id="1", name="find_lines", arguments='{"word": "\x1b[2J"}')
    assert agent_loop.ask_user(call) == is_made
    assert "\x1b" not in shown[0]


@pytest.mark.slow
@pytest.mark.parametrize(("typed", "status", "is_written"), [("y\ny\n", 0, True), ("y\n", 130, False)])
def test_the_program_runs_as_it_is_printed(
    tiny_model: Path, notes: Path, tmp_path: Path, typed: str, status: int, is_written: bool
) -> None:
    """With a decoder that asks for calls by rule in the place of the model, and what a user types."""
    rule = f"""
import runpy, sys
sys.path[:0] = [{str(SUPPORT)!r}, {str(Path(__file__).parent)!r}, {str(DEMOS)!r}]
from pathlib import Path
import edgespec, test_agent_loop
from scripted import scripted_engine

edgespec.load = lambda model: scripted_engine(Path(model), Path({str(tmp_path)!r}), test_agent_loop.remind)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    program = [str(DEMOS / "agent_loop.py"), str(notes), QUESTION, "--model", str(tiny_model)]
    ran = subprocess.run(
        [sys.executable, "-c", rule, *program], input=typed, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == status, ran.stderr
    assert ("I wrote a reminder." in ran.stdout) == is_written
    assert """find_lines '{"word": "MEET"}' - may it? [y/N]""" in ran.stdout
    assert (notes / "reminders.md").exists() == is_written


@pytest.mark.model
def test_a_real_model_is_told_of_the_tools_and_answers(smollm2: Path, notes: Path) -> None:
    with load(smollm2, drafter="none") as engine:
        assert engine.tool_format
        said = agent_loop.answer(engine, QUESTION, agent_loop.tools_for(notes), lambda call: False)
    assert said.strip()
