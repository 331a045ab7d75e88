"""Messages say options in the words of whoever reads them: arguments in Python, flags on the command line."""

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import edgespec
from edgespec import EdgeSpecError, load, models
from edgespec.chat.printer import print_line
from edgespec.cli import models as models_command
from edgespec.cli.chat import _print_aside
from edgespec.cli.main import main
from edgespec.config.options import LOAD_PARAMETERS
from edgespec.errors import PARAMETERS, in_flags, in_python
from edgespec.system.tables import read_table

HOUSE = Path(edgespec.__file__).parents[1]
FLAG = re.compile(r"--[a-z][a-z-]*")


@cache
def messages() -> list[str]:
    return [*spoken()]


def spoken() -> Iterator[str]:
    """All texts of the rooms below the wings, with a name in the place of what is put in."""
    rooms = ["setup", "engine", "draft", "decoding", "memory", "text", "tools", "grammar", "manifest"]
    folders = [HOUSE / "runtimes", HOUSE / "export", *(HOUSE / "edgespec" / room for room in rooms)]
    for text in (path.read_text("utf-8") for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(text)) if FLAG.search(text) else ():
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "/m" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "; " in node.value:
                yield node.value


def test_every_message_is_the_same_again_in_flags() -> None:
    found = [message for message in messages() if FLAG.search(message)]
    assert len(found) > 50
    changed = [message for message in found if in_python(message) != message]
    assert len(changed) > 40
    assert [message for message in found if in_flags(in_python(message)) != message] == []


def without_commands(message: str) -> str:
    return re.sub(r"\b(edgespec [a-z]|pip )('[^']*'|[^;,()])*", "", message)


def test_no_message_has_a_flag_of_an_argument_in_python() -> None:
    left = {flag for message in messages() for flag in FLAG.findall(without_commands(in_python(message)))}
    words = {f"--{name}" for name in PARAMETERS}
    assert left & words == set()


@pytest.mark.parametrize(
    ("flags", "python"),
    [
        ("give at least --memory 416M, or more", "give at least memory_limit='416M', or more"),
        ("use --threads 4 or --device cuda:1", "use num_threads=4 or device='cuda:1'"),
        ("--deterministic does not hold; --no-cuda-graph", "deterministic=True does not hold; cuda_graph=False"),
        ("name one with --drafter MODEL", "name one with drafter=MODEL"),
        ("this with --drafter '/a b/c' instead", "this with drafter='/a b/c' instead"),
        ("this with --drafter /a/b.gguf and", "this with drafter='/a/b.gguf' and"),
        ("use it with --drafter tiny", "use it with drafter='tiny'"),
        ("choose another --output", "choose another output="),
        ("no model 'x': edgespec models list has the names; or", "no model 'x': models.list() has the names; or"),
        ("see edgespec models list", "see models.list()"),
        ("fewer bits (edgespec export --precision int4)", "fewer bits (models.export(…, precision='int4'))"),
        ("run: edgespec export '/a b' --output DIR", "run: models.export('/a b', output=DIR)"),
        ("run: edgespec models pull x:w8a16 --device npu", "run: models.pull('x:w8a16', device='npu')"),
        ("to change it: edgespec models rename a-b NAME", "to change it: models.rename('a-b', NAME)"),
        ("edgespec models pull a b", "edgespec models pull a b"),
        ("edgespec export A --drafter B --output DIR", "edgespec export A --drafter B --output DIR"),
        ("or: edgespec preset rm mine", "or: edgespec preset rm mine"),
        ("run: edgespec pair check '/a (1)/p' --device cpu", "run: edgespec pair check '/a (1)/p' --device cpu"),
        ("the file a=b has device=", "the file a=b has device="),
    ],
)
def test_words_of_both(flags: str, python: str) -> None:
    assert in_python(flags) == python
    assert repr(EdgeSpecError(flags)) == f"EdgeSpecError({python!r})"  # as asyncio and logs show it
    assert in_flags(python) == flags or flags == python


def test_commands_that_are_functions_of_python_are_written_as_such() -> None:
    names = [*read_table(models_command.__file__, "models.toml")]
    spelled = {
        name for name in names if in_python(f"run: edgespec models {name} NAME") == f"run: models.{name}(NAME)"
    }
    assert spelled == {name for name in names if hasattr(models, name)}


def test_the_arguments_of_load_are_among_the_words() -> None:
    missing = LOAD_PARAMETERS.keys() - PARAMETERS.keys()
    assert missing == set()


def test_errors_that_python_raises_name_no_flags(tiny_model: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no model")
    calls: list[Callable[[], object]] = [
        lambda: load(tiny_model, memory_limit="1M"),
        lambda: load(tiny_model, device="nope"),
        lambda: load(tiny_model, device="coreml"),
        lambda: load(tiny_model, device="webgpu", drafter_device="npu"),
        lambda: load(tiny_model, drafter="self"),
        lambda: load(tiny_model, drafter="nope"),
        lambda: load(tiny_model, schedule="fast"),  # type: ignore[arg-type]
        lambda: load(tiny_model, context=3),
        lambda: load(tiny_model, draft_length=99),
        lambda: load(tiny_model, num_threads=-1),
        lambda: load("smollm2-135m", offline=True, home=tmp_path),
        lambda: load("org/name", offline=True, home=tmp_path),
        lambda: load("nope", home=tmp_path),
        lambda: models.show("nope", home=tmp_path),
        lambda: models.remove("nope", home=tmp_path),
        lambda: load(file, home=tmp_path),
        lambda: load(tiny_model, learn="mail", acceptance="rejection"),
        lambda: models.pull("smollm2-135m", offline=True, home=tmp_path),
        lambda: models.pull(f"{tiny_gguf}:w8a16", device="npu", home=tmp_path),
        lambda: models.export(tiny_gguf, output=tmp_path, check=False),
        lambda: models.export(tiny_gguf, name="a", precision="int3", check=False, home=tmp_path),
        lambda: models.export(tiny_gguf, name="a", precision="w8a16", check=False, home=tmp_path),
        lambda: models.export(tiny_gguf, name="a", adapter=file, check=False, home=tmp_path),
        lambda: models.export(tiny_gguf, name="a", context_length=10**9, check=False, home=tmp_path),
        lambda: models.export(tiny_gguf, name="a", revision="main", check=False, home=tmp_path),
    ]
    said = []
    for call in calls:
        with pytest.raises(EdgeSpecError) as raised:
            call()
        said.append(str(raised.value))
    assert [message for message in said if FLAG.search(without_commands(message))] == []
    assert [message for message in said if "edgespec models" in message or "edgespec export -" in message] == []
    assert sum("=" in message for message in said) > 5


def test_reported_lines_are_in_the_words_of_python(tiny_model: Path) -> None:
    lines: list[str] = []
    load(tiny_model, drafter="none", schedule="pipelined", report=lines.append).close()
    assert any(line.startswith("schedule='pipelined' has no effect: ") for line in lines)


def test_the_command_line_says_the_same_in_flags(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EdgeSpecError) as raised:
        load(tiny_model, memory_limit="1M")
    assert "give at least memory_limit='" in str(raised.value)
    assert main(["score", str(tiny_model), "--file", __file__, "--device", "coreml"]) == 4
    assert "use --device cpu" in capsys.readouterr().err
    assert main(["chat", str(tiny_model), "-p", "hi", "--memory", "1M"]) == 5
    assert "give at least --memory " in capsys.readouterr().err


def test_lines_of_a_chat_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    for show in (print_line, _print_aside):
        show("the model calls f(context=5)")
    assert capsys.readouterr().err == "the model calls f(context=5)\n" * 2
