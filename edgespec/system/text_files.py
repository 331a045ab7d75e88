"""Text of files and pipes, as programs of all systems write it, and what stands in the place of files."""

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from edgespec.errors import UsageError
from edgespec.system.context_managers import contextmanager
from edgespec.system.units import format_bytes

_NO_MARK = "UTF-16 without a byte order mark"
_ENDS = ("unexpected end of data", "truncated data")  # as Python's codecs say it
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_MOST_OF_STDIN = 1 << 26  # 64 MB, sixteen million tokens; yes and /dev/zero have no end
_POINTER = b"version https://git-lfs"
POINTER = (
    "is a pointer of Git LFS (large file storage), not the file itself; run git lfs pull in its folder, or "
    "download the file"
)


def is_pointer(path: Path) -> bool:
    """True if a file is what a clone without Git LFS has in the place of each large file."""
    with path.open("rb") as file:
        return file.read(len(_POINTER)) == _POINTER


def decode_text(data: bytes) -> str:
    """Text in UTF-8, or in UTF-16 that begins with a byte order mark; the mark is no part of it.

    Windows has such files: PowerShell 5 writes UTF-16 by > and UTF-8 with a mark by Out-File.

    Raises ValueError: It is neither, cut short, or UTF-16 without a mark, by the zeros at its beginning.
    """
    if [at for at, byte in enumerate(data[:4]) if not byte] in ([0, 2], [1, 3]):
        raise ValueError(f"it is {_NO_MARK}; convert it with: iconv -f UTF-16{'LE' if data[0] else 'BE'} -t UTF-8")
    encoding = "utf-16" if data.startswith(_UTF16_MARKS) else "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        rest, kind = error.object[error.start :], encoding.upper().removesuffix("-SIG")
        # One byte behind ASCII alone is rather the é of an older encoding.
        is_sure = kind == "UTF-16" or len(rest) > 1 or not error.object[: error.start].isascii()
        if error.reason in _ENDS and is_sure:
            raise ValueError(
                f"it ends within a character of {kind}, so it was cut short; save or fetch it again"
            ) from None
        raise ValueError(
            f"it is not text in {kind} (the byte 0x{rest[0]:02x} at {error.start} is not); save it as UTF-8, for "
            "example with: iconv -f WINDOWS-1252 -t UTF-8"
        ) from None


def read_plain(path: Path, most_bytes: int) -> bytes:
    """The content of what may be no plain file: of a pipe or a device, whose size is 0, no end may come.

    Raises:
        OSError: It cannot be read; FileNotFoundError where there is none.
        ValueError: It is no regular file, larger than most_bytes, or a pointer of Git LFS.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is not a regular file")
    if (size := found.st_size) > most_bytes:
        raise ValueError(f"it has {size} bytes ({format_bytes(size)}), more than {format_bytes(most_bytes)}")
    data = path.read_bytes()
    require_own_content(data)
    return data


def require_own_content(data: bytes) -> None:
    """Raises ValueError: This is no content, but a pointer of Git LFS to it."""
    if data.startswith(_POINTER):
        raise ValueError(f"it {POINTER}")


def read_text(path: Path, most_bytes: int) -> str:
    """The text of a file, or of a pipe, with the line ends of Unix.

    Raises:
        OSError: It cannot be read.
        ValueError: It is larger than most_bytes, a pointer of Git LFS, no text, or a pipe that nobody writes to.
    """
    if stat.S_ISFIFO(path.stat().st_mode):
        data = _read_pipe(path, most_bytes + 1)
    else:
        with path.open("rb") as file:  # which may be a device without an end
            data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"it has more than {format_bytes(most_bytes)}")
    require_own_content(data)
    return decode_text(data).replace("\r\n", "\n")


def _read_pipe(path: Path, most_bytes: int) -> bytes:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        try:
            begin = os.read(file.fileno(), 1)
            if not begin:  # the end, as there is no writer
                raise ValueError("it is a pipe that nobody writes to")
        except BlockingIOError:  # a writer has yet to write
            begin = b""
        os.set_blocking(file.fileno(), True)
        return begin + file.read(most_bytes)


@contextmanager
def explain_unreadable(path: Path, wanted: str) -> Iterator[None]:
    """Have errors that are met in reading a user's file say what was wanted, such as "a prompts file".

    Raises UsageError: It cannot be read, or a ValueError says that it holds something else.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}; wanted {wanted}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not {wanted}: {error}") from None


def read_stdin() -> str:
    """All of stdin as text, with the line ends of Unix. Raises UsageError: it is no text, or has no end."""
    buffer = getattr(sys.stdin, "buffer", None)
    if buffer is None:  # a stream of text that stands in for it
        return sys.stdin.read()
    data: bytes = buffer.read(_MOST_OF_STDIN + 1)
    if len(data) > _MOST_OF_STDIN:
        raise UsageError(f"stdin has more than {format_bytes(_MOST_OF_STDIN)}; give a part of it")
    try:
        text = decode_text(data)
    except ValueError as error:
        text = _decode_as_console(data, error)
    return text.replace("\r\n", "\n")


def _decode_as_console(data: bytes, error: ValueError) -> str:
    """Text in the encoding of the console, which is another one on older systems."""
    with suppress(UnicodeDecodeError):
        if _NO_MARK not in str(error):
            return data.decode(sys.stdin.encoding or "utf-8")
    raise UsageError(f"stdin {str(error).removeprefix('it ')}") from None
