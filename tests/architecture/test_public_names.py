"""What an app may rely on: each name explains itself, and the examples that it gives run."""

import ast
import asyncio
import inspect
import io
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin

import pytest

import edgespec
from edgespec import Tool, load
from edgespec.config.options import OPTIONS
from edgespec.engine.request import OVERFLOWS
from edgespec.export.precision import PRECISIONS
from edgespec.text.chat_template import ROLES
from edgespec.tools.tool import CHOICES

ROOT = Path(__file__).parents[2]
FACE = Path(edgespec.__file__)
PUBLIC = {name: getattr(edgespec, name) for name in edgespec.__all__}
WORDS = {name: each for name, each in PUBLIC.items() if get_origin(each)}  # aliases of closed sets
NAMED = [each for name, each in PUBLIC.items() if name not in WORDS]
SECTIONS = ("Args:", "Raises:", "Returns:")


def own_functions(each: object) -> list[tuple[str, Any]]:
    """The functions and classes that a public module defines; none of what is no module."""
    if not inspect.ismodule(each):
        return []
    return [pair for pair in vars(each).items() if getattr(pair[1], "__module__", "") == each.__name__]


def explained() -> Iterator[tuple[str, str | None]]:
    """Names, and methods and properties of classes, with what they say of themselves."""
    yield "edgespec", edgespec.__doc__
    for each in NAMED:
        yield each.__name__, each.__doc__
        for name, member in vars(each).items() if inspect.isclass(each) else own_functions(each):
            if name[0] != "_" and (callable(member) or isinstance(member, (property, classmethod))):
                yield f"{each.__name__}.{name}", member.__doc__


def example_in(said: str) -> str:
    """What is indented in a text, behind an empty line, and is no section of it."""
    taken: list[str] = []
    is_code, before, heading = False, "", ""
    for line in inspect.cleandoc(said).splitlines():
        if line and not line.startswith(" "):
            is_code, heading = False, line
        elif line and not before and heading not in SECTIONS:
            is_code = True
        if is_code:
            taken.append(line)
        before = line
    return textwrap.dedent("\n".join(taken))


def test_every_public_name_explains_itself() -> None:
    # A dataclass or named tuple without a docstring has its signature for one.
    assert [
        name for name, said in explained() if not (said or "").strip() or (said or "").startswith(f"{name}(")
    ] == []


def test_tab_shows_what_is_public() -> None:
    for module in (edgespec, edgespec.models):
        assert {name for name in dir(module) if not name.startswith("__")} == set(module.__all__)
    assert {name for name, _ in own_functions(edgespec.models) if name[0] != "_"} == set(edgespec.models.__all__)
    assert edgespec.__doc__
    assert set(re.findall(r"(\w+)\(\)", edgespec.__doc__)) <= {*dir(edgespec), *dir(edgespec.Engine)}


EXAMPLES = {name: example for name, said in explained() if (example := example_in(said or ""))}


def test_the_ways_to_an_answer_have_examples() -> None:
    assert {
        "edgespec",
        "AnswerStream",
        "Conversation",
        "Engine.stream",
        "Engine.astream",
        "load",
    } <= EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Word for word, with a tiny model of random weights in the place of the one that is named."""

    def load_tiny(model: str, **options: Any) -> Any:
        return load(tiny_model, **{"drafter": "none"} | options)

    monkeypatch.setattr(edgespec, "load", load_tiny)
    example, printed = EXAMPLES[name], io.StringIO()
    with load_tiny("") as engine, redirect_stdout(printed):
        public = {each: getattr(edgespec, each) for each in edgespec.__all__}
        if name == "McpServers":  # no server is there to start
            tool = Tool(name="get_current_time", run=lambda call: "noon")
            public[name] = lambda *servers: nullcontext(SimpleNamespace(tools=[tool]))
        names = {**public, "load": load_tiny, "engine": engine, "asyncio": asyncio, "__name__": "example"}
        exec(compile(example, name, "exec"), names)
    assert printed.getvalue() or "print(" not in example


def test_every_public_name_is_listed() -> None:
    assert set(edgespec.__all__) <= set(dir(edgespec))


def test_names_of_modules_are_sorted_and_there() -> None:
    names = [*edgespec._HOMES]
    assert names == sorted(names, key=lambda name: (edgespec._HOMES[name], name))
    assert {*edgespec.__all__} <= {*names}
    block = next(each for each in ast.parse(FACE.read_text("utf-8")).body if isinstance(each, ast.If))
    stated = {alias.name: each.module for each in block.body for alias in each.names}
    assert {**stated, "models": "edgespec.models"} == {
        name: f"edgespec.{home}" for name, home in edgespec._HOMES.items()
    }
    assert [name for name in names if not hasattr(edgespec, name)] == []


def test_closed_sets_of_words_are_those_that_the_code_takes() -> None:
    stated = {name: {*get_args(each)} for name, each in WORDS.items() if get_origin(each) is Literal}
    assert {*PRECISIONS} == stated.pop("Precision")
    assert {*OPTIONS["schedule"].choices} == stated.pop("ScheduleChoice")
    assert {*OPTIONS["acceptance"].choices} == stated.pop("AcceptanceName")
    assert {*OPTIONS["overflow"].choices} == {*OVERFLOWS} == stated.pop("Overflow")
    assert {*ROLES} == stated.pop("Role")
    written = re.findall(r'"(\w+)"', " ".join(path.read_text("utf-8") for path in FACE.parent.glob("engine/*.py")))
    assert stated.pop("FinishReason") <= {*written}
    assert stated == {}
    assert {*CHOICES} == {*get_args(get_args(edgespec.ToolChoice)[0])}


WRONG = """\
from edgespec import Message, load, models
from edgespec import Enigne  # wrong

load("a", schedule="fast")  # wrong
load("a", acceptance="loose")  # wrong
engine = load("a", schedule="hedged")
engine.chat(overflow="dropp")  # wrong
engine.chat(overflow="drop-oldest").overflow = "error"
engine.generate("a", tool_choice=5)  # wrong
engine.generate("a", tool_choice="my_tool")
Message("usr", "x")  # wrong
models.export("a", name="b", precision="int3")  # wrong
if engine.generate("a").finish_reason == "lenght":  # wrong
    print()
"""


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What mypy --strict says of WRONG and of the code of the pages, beside an edgespec that is installed."""
    folder = tmp_path_factory.mktemp("checked")
    (folder / "wrong.py").write_text(WRONG)
    for i, block in enumerate(blocks_of_pages()):
        (folder / f"example_{i}.py").write_text(block)
    options = ["--strict", "--no-incremental", "--follow-imports=silent", "--ignore-missing-imports"]
    return subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(folder)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"MYPYPATH": f"{ROOT}:{ROOT / 'demos'}"},
    ).stdout


def blocks_of_pages() -> list[str]:
    return [
        block
        for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    ]


@pytest.mark.slow
def test_a_type_checker_finds_words_that_there_are_not(checked: str) -> None:
    found = {int(line) for line in re.findall(r"wrong\.py:(\d+): error", checked)}
    assert found == {i for i, line in enumerate(WRONG.splitlines(), 1) if line.endswith("# wrong")}, checked


@pytest.mark.slow
def test_examples_and_programs_pass_a_strict_type_checker(checked: str) -> None:
    """Code of the pages and the demos has no type error."""
    num_blocks = len(blocks_of_pages())
    assert num_blocks > 20
    others = [line for line in checked.splitlines() if not line.startswith("wrong.py:")]
    assert len(others) == 1, checked
    assert re.fullmatch(rf"Found \d+ errors in 1 file \(checked {num_blocks + 1} source files\)", others[0]), (
        checked
    )


# Objects that load makes, and what only the rest of edgespec calls.
INTERNAL = {
    "AnswerStream.__init__",
    "Conversation.restore",
    "Conversation.transcript",
    "Engine.__init__",
    "Engine.embedder",
    "Engine.speculation",
    "Engine.target",
    "Reply.__init__",
}


def annotated() -> Iterator[tuple[str, str]]:
    """Public functions, methods, properties and fields, with what their annotations say."""
    for each in NAMED:
        members = [("", each)]
        for name, member in vars(each).items() if inspect.isclass(each) else own_functions(each):
            if not name.startswith("_") or name in ("__init__", "__enter__", "__next__"):
                found = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
                members.append((f".{name}", found))
        for name, member in members:
            hints = inspect.get_annotations(member) if inspect.isclass(member) or callable(member) else {}
            for field, hint in hints.items():
                if not field.startswith("_"):
                    yield f"{each.__name__}{name}", f"{hint}"


def test_types_that_public_names_give_and_take_are_public() -> None:
    ours = {
        name
        for path in (Path(edgespec.__file__).parent).rglob("*.py")
        for name in re.findall(r"^class (\w+)", path.read_text("utf-8"), re.MULTILINE)
    }
    hidden = [
        f"{owner}: {name}"
        for owner, hint in annotated()
        for name in re.findall(r"\w+", hint)
        if owner not in INTERNAL and name in ours - set(edgespec.__all__)
    ]
    exempt = {"Settings", "ReplyOptions"}  # TypedDicts of keywords
    assert {each.partition(": ")[2] for each in hidden} == exempt


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(edgespec.__file__).parent / "py.typed").is_file()
