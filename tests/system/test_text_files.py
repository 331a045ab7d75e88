"""Text of files and pipes in the encodings of all systems."""

import io
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from edgespec import UsageError
from edgespec.cli.chat_prompt import read_schema
from edgespec.config.config_file import _read
from edgespec.errors import EdgeSpecError
from edgespec.evaluation.journal import _read_lines
from edgespec.evaluation.prompts import read_prompts
from edgespec.export import settings
from edgespec.grammar.vocabulary import GrammarVocabulary
from edgespec.system.text_files import decode_text, read_plain, read_stdin, read_text
from edgespec.system.typed_json import read_json
from edgespec.text.chat_template import read_template
from edgespec.training.prompts import read_corpus

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


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"caf\xe9 au lait", "is not text in UTF-8 .the byte 0xe9 at 3 is not.; save it as UTF-8, .*iconv"),
        (b"caf\xe9", "is not text in UTF-8"),
        ("世界".encode()[:-1], "ends within a character of UTF-8, so it was cut short"),
        ("é".encode() + b"\xc3", "ends within a character of UTF-8"),
        (b"\xff\xfea\0b", "ends within a character of UTF-16, so it was cut short"),
        ("𝒳".encode("utf-16")[:-2], "ends within a character of UTF-16"),
        (b"\0a\0b", "is UTF-16 without a byte order mark; convert it with: iconv -f UTF-16BE"),
    ],
)
def test_bytes_on_stdin_that_are_no_text_are_refused(
    monkeypatch: pytest.MonkeyPatch, data: bytes, words: str
) -> None:
    stdin_of(monkeypatch, data)
    with pytest.raises(UsageError, match=f"stdin {words}"):
        read_stdin()


def test_a_pipe_without_an_end_is_not_read_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.system.text_files._MOST_OF_STDIN", 4)
    stdin_of(monkeypatch, b"y\ny\ny\n")
    with pytest.raises(UsageError, match="stdin has more than 4 bytes; give a part of it"):
        read_stdin()


def test_utf_16_without_a_mark_is_no_text_with_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding in ("utf-16-le", "utf-16-be"):
        with pytest.raises(ValueError, match="UTF-16 without a byte order mark"):
            decode_text(TEXT.encode(encoding))
        stdin_of(monkeypatch, TEXT.encode(encoding))
        with pytest.raises(UsageError, match=r"UTF-16 without a byte order mark; .*iconv"):
            read_stdin()


def test_an_older_console_has_an_encoding_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin_of(monkeypatch, b"caf\xe9", "cp1252")
    assert read_stdin() == "café"


@pytest.mark.parametrize("encoding", ENCODINGS[1:])
@pytest.mark.parametrize(
    ("read", "text"),
    [
        (read_schema, '{"type": "string"}'),
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


@pytest.mark.parametrize(
    "read",
    [read_schema, lambda path: read_prompts(path, None), read_corpus],
    ids=["schema", "prompts", "corpus"],
)
def test_a_pointer_of_git_lfs_is_named_and_not_read(tmp_path: Path, read: Callable[[Path], object]) -> None:
    (tmp_path / "file").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    with pytest.raises(UsageError, match="is a pointer of Git LFS"):
        read(tmp_path / "file")


@pytest.mark.skipif(sys.platform == "win32", reason="needs named pipes, which Windows lacks")
@pytest.mark.parametrize(
    "read",
    [
        lambda path: read_plain(path, 10),
        lambda path: read_json(path, 10),
        read_template,
        lambda path: GrammarVocabulary(path, 300, [1]),
        settings.read_text,
        _read_lines,
    ],
    ids=["plain", "JSON", "template", "vocabulary", "settings", "journal"],
)
@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
def test_what_is_no_plain_file_is_refused_unread(
    tmp_path: Path, read: Callable[[Path], object], kind: str
) -> None:
    path = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(1 << 33)
    with pytest.raises((ValueError, EdgeSpecError), match=r"not a regular file|8589934592 bytes"):
        read(path)


@pytest.mark.skipif(sys.platform == "win32", reason="needs named pipes, which Windows lacks")
def test_a_pipe_is_read_to_its_end_unless_nobody_writes_to_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="nobody writes to"):
        read_text(pipe, 100)
    with pytest.raises(UsageError, match="nobody writes to"):
        read_schema(pipe)

    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # so that it can be opened to write
    writing = os.open(pipe, os.O_WRONLY)

    def write_late() -> None:
        for part in (b"a", b"\r\n", b"b"):
            sleep(0.02)
            os.write(writing, part)
        os.close(writing)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(write_late)
        assert read_text(pipe, 100) == "a\nb"
    os.close(reading)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a device and a Unix socket, which Windows lacks")
@pytest.mark.parametrize("path", ["/dev/zero", "folder", "socket"])
def test_what_is_no_file_of_text_is_refused_at_once(tmp_path: Path, path: str) -> None:
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "socket"))
        with pytest.raises(UsageError, match=r"wanted|is not a"):
            read_schema(tmp_path / path)
