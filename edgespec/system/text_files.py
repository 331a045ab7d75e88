"""Text of files and pipes, as programs of all systems write it."""

import stat
import sys
from pathlib import Path

from edgespec.errors import UsageError

UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def decode_text(data: bytes) -> str:
    """Text in UTF-8, or in UTF-16 that begins with a byte order mark; the mark is no part of it.

    Windows has such files: PowerShell 5 writes UTF-16 by > and UTF-8 with a mark by Out-File.

    Raises UnicodeDecodeError: It is neither.
    """
    return data.decode("utf-16" if data.startswith(UTF16_MARKS) else "utf-8-sig")


def read_plain(path: Path, most_bytes: int) -> bytes:
    """The content of what may be no plain file: of a pipe or a device, whose size is 0, no end may come.

    Raises:
        OSError: It cannot be read; FileNotFoundError where there is none.
        ValueError: It is no regular file, or larger than most_bytes.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is no regular file")
    if (size := found.st_size) > most_bytes:
        raise ValueError(f"it has {size} bytes ({size >> 20} MiB), which is more than {most_bytes}")
    return path.read_bytes()


def read_stdin() -> str:
    """All of stdin as text, with the line ends of Unix. Raises UsageError: it is no text."""
    buffer = getattr(sys.stdin, "buffer", None)
    if buffer is None:  # a stream of text that stands in for it
        return sys.stdin.read()
    data: bytes = buffer.read()
    try:
        text = decode_text(data)
    except UnicodeDecodeError as error:
        text = _decode_as_console(data, error)
    return text.replace("\r\n", "\n")


def _decode_as_console(data: bytes, error: UnicodeDecodeError) -> str:
    """Text in the encoding of the console, which is another one on older systems."""
    try:
        return data.decode(sys.stdin.encoding or "utf-8")
    except UnicodeDecodeError:
        near = f"the byte 0x{data[error.start]:02x} at {error.start}" if error.start < len(data) else "its end"
        raise UsageError(
            f"stdin is no text in UTF-8 ({near} is not); convert it, for example with: "
            "iconv -f WINDOWS-1252 -t UTF-8"
        ) from None
