"""Answers split into text and code: by the window's module, and by the web page's own function, run in node."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from code_fences import CodeFences

PAGE = Path(__file__).parents[2] / "edgespec" / "server" / "page.html"
CASES = [
    (
        "See:\n```python\nx = 1\n\ny = `2`\n```\nDone.",
        [("See:\n", False), ("x = 1\n\ny = `2`\n", True), ("Done.", False)],
    ),
    ("~~~\na\n```\nb\n~~~\n", [("a\n```\nb\n", True)]),
    ("````md\n```\n````\nend", [("```\n", True), ("end", False)]),
    ("a `code` and ```three``` b\n", [("a `code` and ```three``` b\n", False)]),
    ("  ```sh\nls", [("ls", True)]),
    ("no code", [("no code", False)]),
    ("```\nopen", [("open", True)]),
    ("", []),
]


def joined(pieces: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    found: list[tuple[str, bool]] = []
    for text, is_code in pieces:
        if found and found[-1][1] == is_code:
            text = found.pop()[0] + text
        found.append((text, is_code))
    return found


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(("text", "wanted"), CASES)
def test_code_is_told_from_text_whatever_pieces_it_comes_in(
    text: str, wanted: list[tuple[str, bool]], size: int
) -> None:
    fences = CodeFences()
    pieces = [each for i in range(0, len(text), size) for each in fences.push(text[i : i + size])]
    assert joined([*pieces, *fences.end()]) == wanted


def test_words_do_not_wait() -> None:
    fences = CodeFences()
    assert fences.push("The sky") == [("The sky", False)]
    assert fences.push(" is\n``") == [(" is\n", False)]
    assert fences.push("`py\nx") == [("x", True)]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node on the PATH (Debian: nodejs)")
def test_the_page_splits_answers_in_the_same_way() -> None:
    source = PAGE.read_text(encoding="utf-8")
    (function,) = re.findall(r"^function segments\(.*?^}$", source, re.M | re.S)
    texts = [text for text, _ in CASES]
    script = f"""{function}
const texts = {json.dumps(texts)};
const cut = (text, grows) => segments(text, grows).map(s => [text.slice(s.begin, s.end), s.isCode]);
console.log(JSON.stringify([texts.map(text => cut(text, false)), cut("a\\n``", true), cut("a\\n``", false)]));"""
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    found, growing, ended = json.loads(done.stdout)
    assert [[(text, is_code) for text, is_code in each] for each in found] == [wanted for _, wanted in CASES]
    assert (growing, ended) == ([["a\n", False]], [["a\n``", False]])
