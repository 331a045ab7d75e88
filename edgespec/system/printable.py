"""Make text from elsewhere safe to display: characters that control a terminal or reorder a line are escaped."""

import re

HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair: JSON may state it, and no UTF-8 has it
# Unicode Standard Annex 9: these change the order of the characters around them.
_REORDERING = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}
_LINES = {0x2028, 0x2029}


def printable(text: str, keep: str = "\n\t") -> str:
    """Escape control characters that are not in keep: ESC becomes \\x1b, a right-to-left override \\u202e."""
    if text.isprintable():
        return text
    return "".join(each if each in keep or not _steers(ord(each)) else _escape(ord(each)) for each in text)


def one_line(text: str, most: int = 120) -> str:
    """Make text, such as a name or a title, one printable line of at most so many characters."""
    line = printable(" ".join(text.split()), keep="")
    return line if len(line) <= most else line[: most - 1] + "…"


def _steers(code: int) -> bool:
    is_control = code < 0x20 or 0x7F <= code < 0xA0
    return is_control or code in _REORDERING or code in _LINES or 0xD800 <= code < 0xE000


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
