"""Text that comes in pieces, read by a parser that may go back. Knows nothing of what is read.

Methods that may have to wait are generators: they yield where more text is needed.
"""

from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]


class EndOfText(Exception):
    """There is no more text."""


class TextReader:
    """A place in a text that is still coming."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.mark: int | None = None  # where a parser may go back to
        self.is_over = False

    def add(self, text: str) -> None:
        """Take more text; unless a place is marked, what was read is dropped."""
        if self.mark is None:
            self.text, self.at = self.text[self.at :], 0
        self.text += text

    def keep(self) -> None:
        """Never go back behind here."""
        self.mark = self.at

    def peek(self) -> Reading[str]:
        """The next character. Raises EndOfText."""
        while self.at == len(self.text):
            if self.is_over:
                raise EndOfText
            yield
        return self.text[self.at]

    def next(self) -> Reading[str]:
        """Take the next character. Raises EndOfText."""
        character = yield from self.peek()
        self.at += 1
        return character

    def skip_space(self) -> Reading[None]:
        """Go to the next character that is no white space. Raises EndOfText."""
        while (yield from self.peek()).isspace():
            self.at += 1

    def take(self, literal: str) -> Reading[bool]:
        """Take a text if it comes next."""
        while len(self.text) - self.at < len(literal):
            if self.is_over or not literal.startswith(self.text[self.at :]):
                return False
            yield
        if not self.text.startswith(literal, self.at):
            return False
        self.at += len(literal)
        return True

    def take_while(self, belongs: Callable[[str], bool]) -> Reading[str]:
        """Take the characters for which something holds, up to the first other one. Raises EndOfText."""
        found = ""
        while belongs((yield from self.peek())):
            found += self.text[self.at]
            self.at += 1
        return found

    def take_until(self, literal: str, on_text: Callable[[str], None]) -> Reading[None]:
        """Take what is before a text, in pieces as it comes, and the text itself.

        Raises EndOfText: It does not come; what there is has been taken.
        """
        while True:
            found = self.text.find(literal, self.at)
            end = found if found >= 0 else len(self.text) - (0 if self.is_over else self.num_begun([literal]))
            if end > self.at:
                on_text(self.text[self.at : end])
            self.at = end
            if found >= 0:
                self.at += len(literal)
                return
            if self.is_over:
                raise EndOfText
            yield

    def num_begun(self, literals: list[str]) -> int:
        """Length of the longest end of the text that begins one of several texts."""
        longest = max(map(len, literals), default=1) - 1
        for size in range(min(longest, len(self.text) - self.at), 0, -1):
            end = self.text[-size:]
            if any(len(literal) > size and literal.startswith(end) for literal in literals):
                return size
        return 0
