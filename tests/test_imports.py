"""The import law of docs/structure.md."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PURE = {
    "acceptance",
    "bench_tally",
    "answering",
    "answers",
    "benchmark",
    "budget",
    "cache",
    "calibration",
    "cancel",
    "catalog",
    "chances",
    "chat_actions",
    "chat_commands",
    "chat_interrupt",
    "chat_plain",
    "chat_printer",
    "chat_session",
    "chat_status",
    "chat_template",
    "clipboard",
    "clock",
    "completion",
    "code_lines",
    "conversation",
    "config",
    "costs",
    "crash",
    "cross_vocabulary",
    "device_memory",
    "disk",
    "drafter_names",
    "drafters",
    "engine",
    "errors",
    "exactness",
    "experience",
    "footing",
    "forecast",
    "forks",
    "gate",
    "genai",
    "greedy_rows",
    "headroom",
    "hedges",
    "host",
    "interrupts",
    "json_file",
    "ladder",
    "lane_drafter",
    "lanes",
    "line_wrap",
    "lock",
    "lookahead",
    "machine",
    "manifest",
    "markdown_blocks",
    "markdown_inline",
    "memory",
    "noise",
    "nvml",
    "opener",
    "options",
    "piped",
    "paid",
    "pair",
    "pair_check",
    "parking",
    "parser",
    "parts",
    "peers",
    "peers_worker",
    "pipeline",
    "plan_document",
    "plan_words",
    "planner",
    "printable",
    "profile",
    "profiling",
    "prompt_encoder",
    "prompts",
    "recording",
    "rejection",
    "report",
    "report_png",
    "report_svg",
    "repository",
    "roster",
    "sampling",
    "sandbox",
    "scheduler",
    "scoring",
    "speculation",
    "stats",
    "stopping",
    "suffix",
    "supervisor",
    "talk",
    "template_process",
    "timeline",
    "tokenizer",
    "trace_file",
    "transcript",
    "trees",
    "truncation",
    "turns",
    "types",
    "vocab_subset",
    "worker",
}
JOINTS = {
    "__init__",
    "__main__",
    "arguments",
    "bench_command",
    "chat",
    "chat_command",
    "chat_input",
    "chat_words",
    "cli",
    "completion_command",
    "config_command",
    "device_choice",
    "devices_command",
    "diagnosis",
    "doctor_command",
    "download",
    "drafting",
    "export_command",
    "fetch",
    "home",
    "hub",
    "loading",
    "models",
    "models_command",
    "opening",
    "pairing",
    "plan_command",
    "placements",
    "planning",
    "score_command",
    "setting",
    "simulate_command",
    "simulation",
    "space",
}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(path: Path) -> frozenset[str]:
    names = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names.add(node.module or "")
    return frozenset(names)


def within(path: Path) -> set[str]:
    """Rooms and modules of edgespec that a file imports: engine, runtimes, export, …"""
    return {name.split(".")[1] for name in imported(path) if name.startswith("edgespec.")}


def test_every_module_is_pure_or_a_joint() -> None:
    assert {path.stem for path in (ROOT / "edgespec").glob("*.py")} == PURE | JOINTS


@pytest.mark.parametrize("name", sorted(PURE))
def test_pure_modules_import_only_pure_modules(name: str) -> None:
    assert within(ROOT / "edgespec" / f"{name}.py") <= PURE


def test_only_home_and_the_commands_call_export_and_only_loading_and_its_parts_the_runtimes() -> None:
    using = {path.stem: within(path) for path in (ROOT / "edgespec").glob("*.py")}
    assert {name for name, rooms in using.items() if "export" in rooms} == {"home", "pairing", "export_command"}
    assert {name for name, rooms in using.items() if "runtimes" in rooms} == {
        "device_choice", "devices_command", "diagnosis", "drafting", "loading", "opening", "planning", "setting",
        "simulation",
    }  # fmt: skip


@pytest.mark.parametrize("room", ["export", "runtimes"])
def test_rooms_import_pure_modules_and_their_own(room: str) -> None:
    for path in (ROOT / room).glob("*.py"):
        assert within(path) <= PURE | {room}, path


def test_scheduler_knows_no_drafter_and_no_runtime() -> None:
    assert within(ROOT / "edgespec" / "scheduler.py") == {"acceptance", "clock", "errors", "types"}


@pytest.mark.parametrize(
    ("package", "room"), [("onnxruntime", "runtimes"), ("onnx", "runtimes"), ("onnx_ir", "export")]
)
def test_heavy_packages_stay_in_their_room(package: str, room: str) -> None:
    for path in [
        *(ROOT / "edgespec").glob("*.py"),
        *(ROOT / "export").glob("*.py"),
        *(ROOT / "runtimes").glob("*.py"),
    ]:
        if package in {name.split(".")[0] for name in imported(path)}:
            assert path.parent.name == room, path


def test_pytorch_is_imported_within_functions_of_one_module() -> None:
    for path in [
        *(ROOT / "edgespec").glob("*.py"),
        *(ROOT / "runtimes").glob("*.py"),
        *(ROOT / "export").glob("*.py"),
    ]:
        heavy = {name for name in imported(path) if name.split(".")[0] in ("torch", "transformers", "optimum")}
        assert not heavy or path.relative_to(ROOT) == Path("export/optimum.py"), path
        top = [node for node in parsed(path).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = [alias.name for node in top if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in top if isinstance(node, ast.ImportFrom)]
        assert not heavy & set(names), path


def test_importing_edgespec_is_light() -> None:
    heavy = ["onnxruntime", "onnx", "onnx_ir", "torch", "transformers", "jinja2", "huggingface_hub", "gguf"]
    code = f"import sys, edgespec; print([name for name in {heavy} if name in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    )
