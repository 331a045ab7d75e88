"""The question for a better first model, in a real terminal and with a hub on this machine."""

import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pexpect", reason="needs a pseudo-terminal, which Windows lacks")
pytest.importorskip("termios", reason="needs a pseudo-terminal, which Windows lacks")

import tiny
from fake_hub import FakeHub
from terminal import CTRL_C, CTRL_D, Terminal

from edgespec.chat.first_model import CANDIDATES
from edgespec.config.options import DEFAULT_MODEL
from edgespec.setup.catalog import CATALOG, HubRepository

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*forkpty.*")]
QUESTION = "it for chats? [y/N]"
BETTER = CANDIDATES[0]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """A hub where the better model is as small as the default one of these tests."""
    hub = FakeHub()
    folder = tmp_path / "repository"
    tiny.write_huggingface(folder, tiny.random_weights())
    source = CATALOG[BETTER].source
    assert isinstance(source, HubRepository)
    hub.commits[source.repository][source.revision] = {path.name: path.read_bytes() for path in folder.iterdir()}
    yield hub
    hub.close()


@pytest.fixture
def home(tiny_model: Path, tmp_path: Path) -> Path:
    """A home with a default model, and no configuration beside it."""
    shutil.copytree(tiny_model, tmp_path / "home" / "models" / DEFAULT_MODEL)
    return tmp_path / "home"


def chat(home: Path, hub: FakeHub | None, *arguments: object) -> Terminal:
    settings = {
        "EDGESPEC_CONFIG": str(config_of(home)),
        "HF_ENDPOINT": hub.url if hub else "http://127.0.0.1:9",  # where nobody answers
        "HF_HUB_OFFLINE": "0",
    }
    config_of(home).touch()
    return Terminal("chat", *arguments, "--max-tokens", 3, home=home, environment=settings)


def config_of(home: Path) -> Path:
    return home.parent / "config.toml"


def settings_of(home: Path) -> object:
    return tomllib.loads(config_of(home).read_text())


def test_a_yes_downloads_the_model_and_is_remembered(home: Path, hub: FakeHub) -> None:
    terminal = chat(home, hub)
    terminal.wait_for(QUESTION)
    shown = terminal.settle()
    words = " ".join(shown.split())
    assert f"from {hub.url}/Qwen/Qwen2.5-1.5B-Instruct-GGUF, licence apache-2.0" in words
    assert "946 MB to download" in words
    assert hub.fetched() == []
    terminal.enter("perhaps")
    terminal.wait_for("please answer y or n")
    terminal.enter("y")
    terminal.wait_for(f"{BETTER} on cpu")
    terminal.ready()
    terminal.leave()
    assert "model.safetensors" in hub.fetched()
    assert settings_of(home) == {"model": BETTER}
    terminal = chat(home, None)
    terminal.wait_for(f"{BETTER} on cpu")
    terminal.ready()
    terminal.leave()
    assert "[y/N]" not in terminal.written


def test_a_no_is_remembered_and_nothing_is_fetched(home: Path, hub: FakeHub) -> None:
    terminal = chat(home, hub)
    terminal.wait_for(QUESTION)
    terminal.enter("")
    terminal.wait_for(f"{DEFAULT_MODEL} is used")
    terminal.wait_for("/help lists the commands")
    terminal.ready()
    terminal.leave()
    assert (settings_of(home), hub.fetched()) == ({"model": DEFAULT_MODEL}, [])
    num_asked = len(hub.requests)
    terminal = chat(home, hub)
    terminal.ready()
    terminal.leave()
    assert "[y/N]" not in terminal.written
    assert len(hub.requests) == num_asked


@pytest.mark.parametrize(("key", "code"), [(CTRL_C, 130), (CTRL_D, None)])
def test_no_answer_is_not_remembered(home: Path, hub: FakeHub, key: str, code: int | None) -> None:
    terminal = chat(home, hub)
    terminal.wait_for(QUESTION)
    terminal.settle()
    terminal.type(key)
    if code is None:
        terminal.ready()
        terminal.leave()
    else:
        assert terminal.exit_code() == code
    assert (settings_of(home), hub.fetched()) == ({}, [])


def test_a_download_that_fails_leaves_the_default_model(home: Path, hub: FakeHub) -> None:
    hub.faults["model.safetensors"] = [404] * 20
    terminal = chat(home, hub)
    terminal.wait_for(QUESTION)
    terminal.enter("y")
    terminal.wait_for(f"continuing with {DEFAULT_MODEL}")
    terminal.ready()
    terminal.leave()
    assert settings_of(home) == {}


def test_without_a_hub_there_is_one_line_and_not_at_each_chat(home: Path) -> None:
    notes = []
    for arguments in ((), ("--offline",)):
        terminal = chat(home, None, *arguments)
        terminal.ready()
        terminal.leave()
        notes.append(terminal.written.count("could run here, but the"))
    assert notes == [1, 0]
    assert settings_of(home) == {}
