"""The wheel alone: what is in it, and what people do with it in a folder that has nothing of the checkout."""

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.model  # builds in an environment of its own, which needs the package index

# Of a machine without a network: every address but its own is out of reach.
OFFLINE = """
import socket

connect = socket.socket.connect

def connect_here(self, address):
    if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1"):
        raise OSError("the network is unreachable")
    return connect(self, address)

def look_up_nothing(*arguments, **options):
    raise socket.gaierror("no network")

socket.socket.connect = connect_here
if __import__("sys").argv[1:2] != ["serve"]:
    socket.getaddrinfo = look_up_nothing
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--installer", "uv", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (found,) = folder.glob("*.whl")
    return found


class Installed:
    """Runs what the wheel installs, from an empty folder, with the packages of this environment."""

    def __init__(self, site: Path, folder: Path) -> None:
        self.folder = folder
        self._command = [sys.executable, str(site / "bin" / "edgespec")]
        named = {"PYTHONPATH": str(site), "EDGESPEC_HOME": str(folder / "home"), "HOME": str(folder)}
        self._environment = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ} | named

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._command, *map(str, arguments)],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: object, typed: str = "") -> str:
        """What a command that succeeds prints."""
        with self.start(*arguments) as process:
            out, err = process.communicate(typed, timeout=120)
        assert process.returncode == 0, err
        return out


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", "--quiet"]
    subprocess.run([*command, "--target", str(site), str(wheel)], check=True, capture_output=True)
    (site / "sitecustomize.py").write_text(OFFLINE)
    return Installed(site, tmp_path_factory.mktemp("empty"))


def test_wheel_holds_every_module_and_all_data(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("edgespec/")}
    rooms = {"edgespec": "", "export": "edgespec/", "runtimes": "edgespec/"}
    files = [
        (prefix, path) for room, prefix in rooms.items() for path in (ROOT / room).rglob("*") if path.is_file()
    ]
    assert held == {f"{prefix}{path.relative_to(ROOT)}" for prefix, path in files if path.suffix != ".pyc"}


def test_what_runs_is_the_wheel(installed: Installed) -> None:
    program = "import edgespec, edgespec.export, edgespec.runtimes; print(edgespec.export.__file__)"
    environment = {**installed._environment, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", program]
    place = subprocess.run(command, cwd=installed.folder, env=environment, capture_output=True, check=True).stdout
    assert place.decode().startswith(environment["PYTHONPATH"])
    assert installed.run("--version").startswith("edgespec ")


def test_a_file_on_the_disk_answers_a_piped_prompt_without_a_network(
    installed: Installed, tiny_gguf: Path
) -> None:
    found = json.loads(installed.run("chat", tiny_gguf, "--max-tokens", 4, "--json", typed="the in the\n"))
    assert found["text"]
    assert len(found["token_ids"]) == 4
    assert tiny_gguf.stem in installed.run("models", "list")


def test_a_server_has_its_page_and_answers(installed: Installed, tiny_gguf: Path) -> None:
    with installed.start("serve", tiny_gguf, "--port", 0, "--json") as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        try:
            asked = Request(url.removesuffix("/v1"), headers={"Accept": "text/html"})  # as a browser does
            with urlopen(asked, timeout=30) as page:
                assert b"<!doctype html>" in page.read(200)
            with urlopen(f"{url}/models", timeout=30) as models:
                assert json.load(models)["data"]
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
    assert process.returncode == 143


@pytest.mark.parametrize("installer", ["pipx", "uvx"])
def test_other_installers_take_the_wheel_with_all_that_it_needs(
    installer: str, wheel: Path, tiny_gguf: Path, tmp_path: Path
) -> None:
    program = shutil.which(installer, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip(f"needs {installer}, which the extra test brings along")
    own = {"PIPX_HOME": "pipx", "PIPX_BIN_DIR": "bin", "PIPX_MAN_DIR": "man", "EDGESPEC_HOME": "home"}
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {name: str(tmp_path / place) for name, place in own.items()}

    def run(*command: object) -> str:
        done = subprocess.run(
            [*map(str, command)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    asked = f"{wheel}[cpu,serve]"
    command: list[object] = [program, "--python", sys.executable, "--from", asked, "edgespec"]
    if installer == "pipx":
        run(program, "install", "--python", sys.executable, "--pip-args=--no-compile", asked)
        command = [tmp_path / "bin" / "edgespec"]
    answer = json.loads(run(*command, "chat", tiny_gguf, "--prompt", "the in", "--max-tokens", 4, "--json"))
    assert len(answer["token_ids"]) == 4


def test_a_model_is_exported_measured_and_simulated(installed: Installed, tiny_gguf: Path) -> None:
    installed.run("export", tiny_gguf, "--output", "model")
    page = installed.folder / "report.html"
    shown = installed.run(
        "bench",
        "model",
        "--max-tokens",
        8,
        "--rounds",
        1,
        "--per-category",
        1,
        "--html",
        page,
        "--drafter",
        "ngram",
    )
    verdicts = "drafting ", "nothing was drafted ", "not decided: "  # a busy machine decides nothing
    assert shown.startswith(verdicts)
    assert page.read_text().startswith("<!doctype html>")
    assert "tokens/s" in installed.run("simulate", "--machine", "strix-halo", "--replay")
