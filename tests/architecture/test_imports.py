"""The import law of docs/structure.md: a room imports from the rooms above it alone."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from house_figures import arrows, imported, imported_anywhere, parsed

ROOT = Path(__file__).parents[2]
ROOMS = [
    "system", "manifest", "config", "grammar", "tools", "text", "memory", "decoding", "draft", "runtimes",
    "export", "setup", "simulation", "engine", "evaluation", "training", "server", "chat/markdown", "chat",
    "cli",
]  # fmt: skip
# Wings import the face, the ground and their own room alone; the command line also imports the other wings.
WINGS: dict[str, set[str]] = {
    "evaluation": set(),
    "training": {"export"},
    "server": set(),
    "chat": set(),
    "cli": {"chat", "evaluation", "export", "server", "simulation", "training"},
}
GROUND = {"system", "config", "errors", "models", "types", "manifest"}
FLAT = ("runtimes", "export")  # folders beside edgespec/, sub-packages by pyproject.toml
MOST_ARROWS = 110  # between rooms, each module on top as one
HEAVY = {
    "onnxruntime": "runtimes",
    "onnx": "runtimes",
    "onnx_ir": "export",
    "uvicorn": "edgespec/server",
    "starlette": "edgespec/server",
    "pypdf": "edgespec/text/pdf_reader.py",
    "llguidance": "edgespec/grammar",
}


def modules(room: str) -> list[Path]:
    if room in FLAT:
        return sorted((ROOT / room).rglob("*.py"))
    return sorted((ROOT / "edgespec" / room).glob("*.py"))


def unguarded(body: Iterable[ast.stmt]) -> list[ast.stmt]:
    """Statements of a module but those that type checkers alone read."""
    return [each for each in body if not (isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING")]


def test_context_managers_of_generators_keep_nothing_alive() -> None:
    """Those of contextlib do in Python 3.12 and 3.13; system/context_managers.py has others."""
    wanted_by_uvicorn = ROOT / "edgespec/server/serving.py"
    paths = [path for room in ROOMS for path in modules(room) if path != wanted_by_uvicorn]
    assert [path for path in paths if "contextlib.contextmanager" in names_imported(path)] == []


def names_imported(path: Path) -> set[str]:
    """Names that a module imports from others, as module.name."""
    found = (node for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom))
    return {f"{node.module}.{alias.name}" for node in found for alias in node.names}


def packages(path: Path) -> set[str]:
    """Top-level packages that a module imports, anywhere in it."""
    return {name.split(".")[0] for name in imported_anywhere(path)}


def rooms_of(path: Path) -> set[str]:
    """Rooms that a module imports from."""
    parts = [name.split(".")[1:] for name in imported_anywhere(path) if name.startswith("edgespec.")]
    return {"/".join(each[:2]) if each[:2] == ["chat", "markdown"] else each[0] for each in parts} & {*ROOMS}


def using(names: set[str]) -> list[Path]:
    return [path for room in ROOMS for path in modules(room) if names & packages(path)]


# 60 ms of a start.
FOR_FEW = (
    "engine.drafter_chain", "engine.idle_learner", "setup.auto_devices", "setup.planner", "config.modelfile",
    "runtimes.heads", "runtimes.parallel", "runtimes.static", "draft.model_source", "draft.ahead_schedule",
)  # fmt: skip


def test_every_folder_is_a_room() -> None:
    folders = {str(init.parent.relative_to(ROOT / "edgespec")) for init in ROOT.glob("edgespec/*/**/__init__.py")}
    assert folders == {*ROOMS} - {*FLAT}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_from_those_above_them(room: str) -> None:
    allowed = {*ROOMS[: ROOMS.index(room) + 1]} - ({"runtimes"} if room == "export" else set())
    assert {path.name: rooms_of(path) for path in modules(room) if rooms_of(path) - allowed} == {}


def test_rooms_import_from_few_others() -> None:
    assert len(arrows()) <= MOST_ARROWS, sorted(arrows())


@pytest.mark.parametrize("wing", WINGS)
def test_wings_import_the_face_and_the_ground(wing: str) -> None:
    allowed = GROUND | {wing} | WINGS[wing]
    found = {
        path.name: {name.split(".")[1] for name in imported_anywhere(path) if name.startswith("edgespec.")}
        - allowed
        for path in (ROOT / "edgespec" / wing).rglob("*.py")
    }
    assert {name: rooms for name, rooms in found.items() if rooms} == {}


@pytest.mark.parametrize("name", ["errors", "types"])
def test_modules_on_top_know_system_alone(name: str) -> None:
    assert rooms_of(ROOT / "edgespec" / f"{name}.py") <= {"system"}


@pytest.mark.parametrize("package", HEAVY)
def test_heavy_packages_stay_in_their_room(package: str) -> None:
    folder = ROOT / HEAVY[package]
    assert [path for path in using({package}) if not path.is_relative_to(folder)] == []


def test_pytorch_is_imported_within_functions_of_training_and_one_module() -> None:
    heavy = {"torch", "transformers", "optimum"}
    assert {path.name for path in using(heavy) if path.parent.name != "training"} == {"traced.py"}
    for path in using(heavy):
        assert not heavy & {name.split(".")[0] for name in imported(unguarded(parsed(path).body))}


def test_importing_edgespec_is_light() -> None:
    heavy = ["onnxruntime", "onnx", "onnx_ir", "torch", "transformers", "jinja2", "huggingface_hub", "gguf"]
    code = f"import sys, edgespec; print([name for name in {heavy} if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "[]\n"


def test_a_prepared_model_is_opened_without_what_few_openings_need(tiny_model: Path) -> None:
    heavy = ["onnx", "onnx_ir", "torch", "transformers", "jinja2", "gguf"]
    heavy += [f"edgespec.{name}" for name in FOR_FEW]
    code = f"import sys, edgespec\nedgespec.load({str(tiny_model)!r}).generate('the in', max_tokens=1)\n"
    code += f"print([name for name in {heavy} if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "[]\n"


def test_map_names_the_rooms_in_their_order_and_files_that_are_there() -> None:
    page = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \*?`([\w/]+)/`\*? \|.*\| (.*) \|$", page, re.MULTILINE)
    assert [room for room, _ in rows] == [room for room in ROOMS if room != "chat/markdown"]
    named = [(room, name) for room, files in rows for name in re.findall(r"`(\w+\.py)`", files)]
    named += re.findall(r"`([a-z_]+)/(?:[a-z_]+/)*([a-z]\w+\.py)`", page)
    missing = [f"{room}/{name}" for room, name in named if name not in {path.name for path in modules(room)}]
    assert missing == []
    walked = re.findall(r"^ +(\w+/\w+) {2,}", page, re.MULTILINE)
    assert len(walked) > 5
    assert [path for path in walked if not (ROOT / "edgespec" / f"{path}.py").exists()] == []
