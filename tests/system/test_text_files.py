"""Text of files and pipes in the encodings of all systems."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec import UsageError
from edgespec.cli.chat import _read_schema
from edgespec.config.config_file import _read
from edgespec.evaluation.prompts import read_prompts
from edgespec.system.text_files import decode_text, read_stdin
from edgespec.system.typed_json import read_json
from edgespec.training.corpus import read_corpus

ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-be"]
TEXT = 'Ein "Wörtchen" 😀\r\n'


def encoded(text: str, encoding: str) -> bytes:
    return (b"\xfe\xff" if encoding == "utf-16-be" else b"") + text.encode(encoding)


def stdin_of(monkeypatch: pytest.MonkeyPatch, data: bytes, encoding: str = "utf-8") -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding=encoding))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_mark_says_how_text_is_encoded_and_is_no_part_of_it(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    assert decode_text(encoded(TEXT, encoding)) == TEXT
    stdin_of(monkeypatch, encoded(TEXT, encoding))
    assert read_stdin() == TEXT.replace("\r\n", "\n")


@pytest.mark.parametrize("data", [b"caf\xe9 au lait", b"\xff\xfea"])
def test_bytes_on_stdin_that_are_no_text_are_refused(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    stdin_of(monkeypatch, data)
    with pytest.raises(UsageError, match=r"stdin is no text in UTF-8 .*iconv"):
        read_stdin()


def test_an_older_console_has_an_encoding_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin_of(monkeypatch, b"caf\xe9", "cp1252")
    assert read_stdin() == "café"


@pytest.mark.parametrize("encoding", ENCODINGS[1:])
@pytest.mark.parametrize(
    ("read", "text"),
    [
        (_read_schema, '{"type": "string"}'),
        (lambda path: read_json(path, 1 << 20), '{"é": [1]}'),
        (lambda path: read_prompts(path, None), '{"prompt": "é"}\r\n{"prompt": "b"}'),
        (lambda path: read_corpus(path), "é\r\nzwei"),
        (_read, 'device = "cpu"'),
    ],
    ids=["schema", "json", "prompts", "corpus", "configuration"],
)
def test_files_are_read_alike_in_all_of_them(
    tmp_path: Path, read: Callable[[Path], Any], text: str, encoding: str
) -> None:
    plain, other = tmp_path / "plain", tmp_path / "other"
    plain.write_bytes(text.encode())
    other.write_bytes(encoded(text, encoding))
    assert read(other) == read(plain)
