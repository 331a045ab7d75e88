"""The pages that people read: their links, their examples, and that they say what the code says."""

import ast
import inspect
import io
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from house_figures import parsed

import edgespec
from edgespec import Engine, PreparedModel, errors, load, models
from edgespec.cli.main import command_parser

ROOT = Path(__file__).parents[2]
API = ROOT / "docs" / "api.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WRITTEN = [page for page in PAGES if page.name != "structure.md"]
LOG = sorted((ROOT / "docs" / "log").glob("*.md"))
CODE = [path for room in ("edgespec", "export", "runtimes") for path in sorted((ROOT / room).rglob("*.py"))]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The fragments that a page's headings answer to, as hosts of repositories make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *LOG, *ROOT.glob("C*.md"), ROOT / "SECURITY.md"], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    broken = []
    for link in links:
        path, _, fragment = link.partition("#")
        if link.startswith(("http://", "https://")):
            continue
        goal = page.parent / path if path else page
        if not goal.is_file() or (fragment and fragment not in anchors(goal)):
            broken.append(link)
    assert broken == []
    assert links or page.name not in ("README.md", "quick-start.md", "troubleshooting.md")


def test_readme_leads_to_every_page() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    linked = [*(page.name for page in PAGES[1:]), "log/README.md"]
    assert [name for name in linked if f"](docs/{name})" not in text] == []


def log_entries(page: Path) -> list[str]:
    return [] if page.name == "README.md" else re.findall(r"^## (.+)$", page.read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("page", LOG, ids=name_of)
def test_log_entries_have_a_question_a_verdict_and_a_date(page: Path) -> None:
    form = re.compile(r"[^?]+\? [^?]+ \(\d{4}-\d\d-\d\d(, [^()]+)?\)")
    assert [entry for entry in log_entries(page) if not form.fullmatch(entry)] == []


def test_log_index_lists_every_page_and_entry_and_no_other() -> None:
    index = (ROOT / "docs" / "log" / "README.md").read_text("utf-8")
    pages = {page.name: page for page in LOG if page.name != "README.md"}
    sections = re.split(r"^## .*\]\((.+)\)$", index, flags=re.MULTILINE)[1:]
    listed = {
        name: re.findall(r"^- (.+)$", text, re.MULTILINE)
        for name, text in zip(sections[::2], sections[1::2], strict=True)
    }
    assert listed == {
        name: [entry.rpartition(" (")[0] for entry in log_entries(page)] for name, page in pages.items()
    }


def test_log_pages_that_the_code_names_are_there() -> None:
    folders = ("edgespec", "export", "runtimes", "bench", "scripts", "demos", "tests")
    named = {
        (str(path.relative_to(ROOT)), page)
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        for page in re.findall(r"\bdocs/log[\w./-]*\.md\b", path.read_text("utf-8"))
    }
    assert len(named) > 8
    assert [each for each in sorted(named) if not (ROOT / each[1]).is_file()] == []


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


PROGRAMS = ROOT / "docs" / "in-your-app.md"  # whose blocks are files, which tests/demos runs
EXAMPLES = [
    pytest.param(block, id=f"{page.stem} {i}")
    for page in WRITTEN
    if page != PROGRAMS
    for i, block in enumerate(python_blocks(page))
]


def test_programs_are_printed_as_they_are() -> None:
    files = {path.read_text("utf-8"): path.name for path in (ROOT / "demos").glob("*.py")}
    names = [files[block] for block in python_blocks(PROGRAMS)]
    tested = "".join(path.read_text("utf-8") for path in (ROOT / "tests" / "demos").glob("*.py"))
    assert names
    assert [name for name in names if f'"{name}"' not in tested] == []


def test_there_are_examples() -> None:
    assert len(EXAMPLES) > 8


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return load(tiny_model, drafter="none")


@pytest.mark.parametrize("block", EXAMPLES)
def test_examples_run(block: str, engine: Engine, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Word for word but for the model, which is a tiny one of random weights, loaded once for all."""

    def load_tiny(model: str, **options: Any) -> Engine:
        inspect.signature(load).bind(model, **options)
        return engine if model == "smollm2-135m" else load(model, **options)

    def pull_tiny(model: str, **options: Any) -> PreparedModel:
        inspect.signature(pull).bind(model, **options)
        return models.show(tiny_model)

    pull = models.pull
    monkeypatch.setattr(edgespec, "load", load_tiny)
    monkeypatch.setattr(models, "pull", pull_tiny)
    monkeypatch.setattr(Engine, "close", lambda self: None)
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(block, "example", "exec"), {"__name__": "__main__"})
    assert printed.getvalue() or "print(" not in block


def test_api_page_has_a_heading_for_each_public_name_and_no_other() -> None:
    headings = re.findall(r"^##+ (\S+)$", API.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(each for each in headings if "." not in each) == sorted(edgespec.__all__)
    methods = [each.split(".") for each in headings if "." in each]
    assert [f"{owner}.{name}" for owner, name in methods if not hasattr(getattr(edgespec, owner), name)] == []
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert kinds & {*re.findall(r"`(\w+)`", API.read_text(encoding="utf-8"))} <= {*edgespec.__all__}
    public = {name for name, value in vars(edgespec.Engine).items() if callable(value) and name[0] != "_"}
    assert public - {name for owner, name in methods if owner == "Engine"} == {"close", "plain"}


def test_exit_codes_are_those_of_the_errors() -> None:
    rows = re.findall(
        r"^\| (\d+) \|[^|]*\|([^|]*)\|$", (ROOT / "docs" / "troubleshooting.md").read_text("utf-8"), re.MULTILINE
    )
    stated = {name: int(code) for code, names in rows for name in re.findall(r"`(\w+)`", names)}
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    public = {name: kind.exit_code for name, kind in kinds.items() if name in edgespec.__all__}
    assert stated == public | {"KeyboardInterrupt": 130}


def spoken(path: Path) -> Iterator[str]:
    """Texts of a module, with … where values are put in."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    texts = "\0".join(text for path in CODE for text in spoken(path))
    rows = re.findall(
        r"^\| (`.*?) \| .* \|$", (ROOT / "docs" / "troubleshooting.md").read_text("utf-8"), re.MULTILINE
    )
    own = (row for row in rows if not row.endswith(("(of the shell)", "(of Python)")))
    quoted = [quote for row in own for quote in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) > 30

    def is_said(quote: str) -> bool:
        return bool(re.search("[^\0]*".join(re.escape(part) for part in quote.split("…")), texts))

    assert [quote for quote in quoted if not is_said(quote)] == []


def commands(page: Path) -> list[str]:
    """Lines of indented blocks that call edgespec, without what pipes into them."""
    lines = re.findall(r"^    (?:.*\| )?((?:\.venv/bin/)?edgespec .*)$", page.read_text("utf-8"), re.MULTILINE)
    return [line.split("    ")[0].split("   #")[0].split(" | ")[0] for line in lines]


@pytest.mark.parametrize("page", [page for page in WRITTEN if commands(page)], ids=name_of)
def test_commands_are_understood(page: Path) -> None:
    """Every line that calls edgespec has a command and options that there are."""
    parser = command_parser()
    for line in commands(page):
        options = parser.parse_args(shlex.split(line, comments=True)[1:])
        assert callable(options.run), line


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_programs_and_files_that_are_named_are_there(page: Path) -> None:
    named = re.findall(r"\b(?:demos|bench)/[\w/.]+", page.read_text("utf-8"))
    assert [path for path in named if not (ROOT / path).exists()] == []
    assert named or page.name != "README.md"


def test_whole_suite_is_run_alike_with_make_and_without() -> None:
    stated = [
        re.search(r'pytest (-m "[^"]*")', (ROOT / name).read_text("utf-8")) for name in ("README.md", "Makefile")
    ]
    assert stated[0] is not None
    assert stated[1] is not None
    assert stated[0][1] == stated[1][1]


def test_faults_are_all_there_and_so_are_their_tests() -> None:
    page = (ROOT / "docs" / "faults.md").read_text("utf-8")
    rows = re.findall(r"^\| ([FBS]\d+) \|.*\| (`.*`) \|$", page, re.MULTILINE)
    numbers = {kind: sorted(int(name[1:]) for name, _ in rows if name[0] == kind) for kind in "FBS"}
    assert numbers == {kind: list(range(1, len(found) + 1)) for kind, found in numbers.items()}
    assert len(numbers["F"]) >= 45
    assert len(numbers["B"]) >= 14
    assert len(numbers["S"]) == 14
    named = [test.split("::") for _, tests in rows for test in re.findall(r"`(.+?)`", tests)]
    functions = defaultdict[str, set[str]](set)  # two rooms may have modules of one name
    for path in (ROOT / "tests").rglob("test_*.py"):
        functions[path.name].update(re.findall(r"^ *(?:def|class) (\w+)", path.read_text("utf-8"), re.MULTILINE))
    assert [f"{module}::{name}" for module, name in named if name not in functions[module]] == []
