"""Commands as a person can type them: words quoted as the shell of the platform wants them."""

import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

_SAFE = re.compile(r"[\w@%+=:,./\\-]+", re.ASCII)  # in cmd and PowerShell


def quote(word: str | Path, platform: str = sys.platform) -> str:
    """A word of a command; ./ goes before a path that begins with a dash, which would be taken for an option.

    On Windows double quotes are used, which both cmd and PowerShell take.
    """
    text = f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else str(word)
    if platform != "win32":
        return shlex.quote(text)
    if _SAFE.fullmatch(text):
        return text
    # Backslashes count only before a double quote, as the one that ends the word.
    inner = re.sub(r'(\\*)"', r'\1\1\\"', text)
    return '"' + re.sub(r"(\\+)$", r"\1\1", inner) + '"'


def split_words(line: str, platform: str = sys.platform) -> list[str]:
    """The words of a command line; on Windows backslashes are parts of paths.

    Raises ValueError: A quote is not closed.
    """
    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    if platform == "win32":
        lexer.escape = ""
    return list(lexer)


def join_words(words: Iterable[str | Path], platform: str = sys.platform) -> str:
    """Words as one command line, each quoted where it has to be."""
    return " ".join(quote(word, platform) for word in words)
