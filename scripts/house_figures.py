"""How large the house is: modules, lines, arrows between rooms, and what a reader walks through.

    python scripts/house_figures.py            # from the sources alone
    python scripts/house_figures.py MODEL      # also what opening a prepared model and a greedy answer enter;
                                               # with --files each module, with --functions each function

An arrow is a room that imports from another one; each module on top of `edgespec/` counts as a room. A function
counts once, however often it is entered; comprehensions and lambdas count too, bodies of modules do not.
"""

import _thread
import ast
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDERS = {"edgespec": "edgespec", "export": "edgespec.export", "runtimes": "edgespec.runtimes"}


@cache
def modules() -> dict[str, Path]:
    """The product's modules by their full names."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *parts]).removesuffix(".__init__")] = path
    return found


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "face"


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The modules that statements import; of `from a import b` a.b, if that is one of the product."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for full in (f"{node.module}.{alias.name}" for alias in node.names):
                yield full if full in modules() else str(node.module)


@cache
def imported_anywhere(path: Path) -> frozenset[str]:
    return frozenset(imported(ast.walk(parsed(path))))


def arrows() -> set[tuple[str, str]]:
    """The rooms that import from another one, each with it."""
    found = {
        (room_of(name), room_of(other))
        for name, path in modules().items()
        for other in imported_anywhere(path)
        if other.split(".")[0] == "edgespec"
    }
    return {(here, there) for here, there in found if here != there}


def num_code(text: str, tree: ast.Module) -> int:
    """Lines without those that are empty, a comment or within a docstring."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = [node.body[0] for node in ast.walk(tree) if isinstance(node, documented) and ast.get_docstring(node)]
    inside = {number for doc in docs for number in range(doc.lineno, (doc.end_lineno or 0) + 1)}
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(bool(line) and not line.startswith("#") and number not in inside for number, line in lines)


def print_sources() -> None:
    known = modules()
    texts = {name: path.read_text(encoding="utf-8") for name, path in known.items()}
    trees = {name: parsed(path) for name, path in known.items()}
    classes = Counter(node.name for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef))
    public = [name for name, count in classes.items() if count > 1]
    asks = re.compile(r"isinstance\([^)]*(Decoder|Interruptible|CorrectableHead)\b")
    docs = [
        ast.get_docstring(node) or ""
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    ]
    print(f"lines                        {sum(text.count(chr(10)) for text in texts.values())}")
    print(f"lines of code                {sum(num_code(text, trees[name]) for name, text in texts.items())}")
    print(f"modules                      {len(known)}")
    print(f"rooms, arrows between them   {len({room_of(name) for name in known})}, {len(arrows())}")
    print(f"class names used twice       {len(public)} {' '.join(sorted(public))}")
    print(f"isinstance on a decoder      {sum(len(asks.findall(text)) for text in texts.values())}")
    print(f"type: ignore                 {sum(text.count('type: ignore') for text in texts.values())}")
    print(f'docstrings "What", "Whether" {sum(d.startswith("What ") for d in docs)}, '
          f"{sum(d.startswith('Whether ') for d in docs)}")  # fmt: skip


def entered(run: Callable[[], Any]) -> tuple[Any, set[CodeType]]:
    """What a call gives, and the product's functions that it enters, in any thread."""
    found: set[CodeType] = set()
    roots = tuple(str(ROOT / folder) for folder in FOLDERS)

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(roots) and code.co_name != "<module>":
            found.add(code)

    with threads_profiled(note):
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            return run(), set(found)  # threads that it has started go on
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


@contextmanager
def threads_profiled(note: Callable[..., None]) -> Iterator[None]:
    """Profile threads of _thread too, which threading does not see."""
    start = _thread.start_new_thread

    def start_profiled(work: Callable[..., Any], *arguments: Any) -> int:
        def profiled(*given: Any) -> None:
            sys.setprofile(note)
            work(*given)

        return start(profiled, *arguments)

    users = [each for name, each in sys.modules.items() if name.startswith("edgespec.")]
    users = [each for each in users if getattr(each, "start_new_thread", None) is start]
    for each in users:
        setattr(each, "start_new_thread", start_profiled)  # noqa: B010  # a name that its type does not have
    try:
        yield
    finally:
        for each in users:
            setattr(each, "start_new_thread", start)  # noqa: B010


def print_walk(name: str, codes: set[CodeType]) -> None:
    files = Counter(code.co_filename for code in codes)
    print(f"{name:28} {len(codes)} functions in {len(files)} modules")
    if "--files" not in sys.argv and "--functions" not in sys.argv:
        return
    for path, count in sorted(files.items()):
        print(f"    {count:4} {Path(path).relative_to(ROOT)}")
        if "--functions" in sys.argv:
            here = sorted((code.co_firstlineno, code.co_qualname) for code in codes if code.co_filename == path)
            print("".join(f"         {line:5} {name}\n" for line, name in here), end="")


def print_walks(model: str) -> None:
    from edgespec import load

    load(model).close()  # prepared, measured and proved from here on
    engine, opening = entered(lambda: load(model))
    with engine:
        for prompt in ("Name three rivers.", "Name three lakes."):  # of which the second opens a further cache
            engine.generate(prompt, max_tokens=24)
        _, answering = entered(lambda: engine.generate("Name three towns.", max_tokens=24))
    print_walk("opening a prepared model", opening)
    print_walk("an answer of 24 tokens", answering)


if __name__ == "__main__":
    print_sources()
    for each in sys.argv[1:2]:
        print_walks(each)
