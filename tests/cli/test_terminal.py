"""What somebody types who has read nothing, in a terminal: prompts without flags, near names, a broken file."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("pexpect", reason="needs a pseudo-terminal, which Windows lacks")
pytest.importorskip("termios", reason="needs a pseudo-terminal, which Windows lacks")

from terminal import Terminal

from edgespec.manifest import SuggestedSampling, read_manifest, write_manifest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*forkpty.*")]

SHORT = ("--max-tokens", 8, "--drafter", "none")


def run(home: Path, *arguments: object, **settings: str) -> tuple[int, str]:
    """The exit code of a command that ends by itself, and what it wrote, in one line."""
    (home / "config.toml").touch()
    settings = {"EDGESPEC_CONFIG": str(home / "config.toml"), "EDGESPEC_OFFLINE": "1", **settings}
    terminal = Terminal(*arguments, home=home, environment=settings)
    return terminal.exit_code(), " ".join(terminal.written.split())


def test_a_prompt_in_quotes_is_answered(tiny_model: Path, tmp_path: Path) -> None:
    def tokens(*words: object, **settings: str) -> list[str]:
        code, shown = run(tmp_path, "chat", *words, "--json", *SHORT, **settings)
        assert code == 0, shown
        return re.findall(r'"token_ids": (\[[^]]+\])', shown)

    wanted = tokens(tiny_model, "the in")
    assert len(wanted) == 1
    assert tokens("the in", "--model", tiny_model) == wanted
    assert tokens("-p", "the in", "-m", tiny_model) == wanted
    assert tokens("the in", EDGESPEC_MODEL=str(tiny_model)) == wanted


def test_no_command_shows_what_there_is(tmp_path: Path) -> None:
    code, shown = run(tmp_path)
    assert code == 0
    assert "talk to a model" in shown


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (["-p", "hello"], 2, "it is a flag of edgespec chat"),
        (["bench", "--model", "m"], 2, "the model needs no flag"),
        (["--verison"], 2, "did you mean --version?"),
        (["chat", "--promt", "why"], 2, "did you mean --prompt?"),
        (["chat", "MODEL", "--drafter", "sufix"], 3, "did you mean the drafter suffix?"),
    ],
)
def test_a_near_name_is_named(tiny_model: Path, tmp_path: Path, words: list[str], code: int, hint: str) -> None:
    given = [tiny_model if each == "MODEL" else each for each in words]
    found, shown = run(tmp_path, *given)
    assert (found, hint in shown) == (code, True), shown


def test_a_typo_in_the_file_of_settings_breaks_no_command_that_mends_it(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("threads = 3\nsead = 4\n")
    code, shown = run(tmp_path, "config")
    assert code == 2
    assert f"3 {path}:1" in shown
    assert "sead" in shown
    assert "config edit" in shown
    assert run(tmp_path, "config", "unset", "sead")[0] == 0
    assert path.read_text() == "threads = 3\n"
    path.write_text("threads = = 3\n")
    assert run(tmp_path, "config", "reset")[0] == 0
    assert run(tmp_path, "config")[0] == 0


def test_a_model_that_is_none_is_not_stored_and_an_error_names_the_file_that_has_it(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    code, shown = run(tmp_path, "config", "set", "model", "nope")
    assert (code, "nope" in shown, path.read_text()) == (3, True, "")
    path.write_text('seed = 1\nmodel = "gone"\n')
    code, shown = run(tmp_path, "chat", "--prompt", "hello")
    assert (code, f"model is set in {path}:2" in shown) == (3, True), shown


def test_a_chat_samples_as_its_model_suggests_and_goes_on_so(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    write_manifest(folder, replace(read_manifest(folder), sampling=SuggestedSampling(temperature=0.9, top_k=20)))
    terminal = Terminal("chat", folder, *SHORT, home=tmp_path)
    terminal.ready()
    terminal.ask("/set", "0.9")
    terminal.ask("/set temperature 0.4")
    terminal.ask("the in", "tokens/s")
    terminal.leave()
    terminal = Terminal("chat", "--continue", *SHORT, home=tmp_path)
    terminal.ready()
    at = terminal.position
    terminal.ask("/set", "0.4")
    shown = terminal.written[at:]
    assert re.search(r"top[-_]k\D+20\b", shown)
    terminal.leave()


def test_a_chat_that_goes_on_shows_what_was_said(tiny_model: Path, tmp_path: Path) -> None:
    terminal = Terminal("chat", tiny_model, *SHORT, home=tmp_path)
    terminal.ready()
    terminal.ask("the in", "tokens/s")
    terminal.leave()
    terminal = Terminal("chat", "--continue", *SHORT, home=tmp_path)
    terminal.ready()
    terminal.see("> the in")
    at = terminal.position
    terminal.ask("/history")
    assert "the in" in terminal.written[at : terminal.position]
    terminal.ask("/chats", "the in")
    terminal.leave()


def test_a_chat_goes_on_with_its_model_under_the_name_that_this_has_now(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "models" / "tiny")
    terminal = Terminal("chat", "tiny", *SHORT, home=tmp_path)
    terminal.ready()
    terminal.ask("the in", "tokens/s")
    terminal.leave()
    assert run(tmp_path, "models", "rename", "tiny", "small")[0] == 0
    terminal = Terminal("chat", "--continue", *SHORT, home=tmp_path)
    terminal.ready()
    terminal.ask("the in", "tokens/s")
    terminal.ask("/open 1", "messages")
    assert "Its model was" not in terminal.written
    terminal.leave()
    (chat,) = (tmp_path / "chats").glob("*.jsonl")
    assert json.loads(chat.read_text().splitlines()[0])["model"] == "small"


def test_a_log_of_passes_names_its_ratio_and_a_trace_explains_its_signs(tiny_model: Path, tmp_path: Path) -> None:
    rounds, trace = tmp_path / "rounds.jsonl", tmp_path / "trace.json"
    options = ("--log-rounds", rounds, "--trace", trace)
    terminal = Terminal("chat", tiny_model, "--prompt", "the in the in", *SHORT, *options, home=tmp_path)
    assert terminal.exit_code() == 0
    first = json.loads(rounds.read_text().splitlines()[0])
    assert first["expected"]["none"] == {"num_draft": 0, "speed_over_plain": 1.0}
    (lane,) = [line for line in terminal.written.splitlines() if line.startswith("target ")]
    assert set(lane.split(maxsplit=1)[1].strip()) <= {"█", "▒", "·"}
    for sign, meaning in {"█": "at work", "▒": "for a part of the time", "·": "waiting"}.items():
        assert f"{sign} {meaning}" in terminal.written
