"""Tells what a thinking model reasons, between <think> and </think>, from what it answers.

Reasoning stands at the beginning of an answer; the same marks later on are text. Knows nothing of models.
"""

from typing import NamedTuple

OPEN, CLOSE = "<think>", "</think>"


class AnswerPart(NamedTuple):
    """A piece of an answer's text, and whether it is part of the reasoning."""

    text: str
    is_reasoning: bool


class ReasoningStream:
    """Takes the text of an answer in pieces and gives its parts, without the marks and the space around them.

    is_open: The prompt has opened the reasoning already, as some chat templates do.
    """

    def __init__(self, *, is_open: bool = False) -> None:
        self.is_reasoning = is_open
        self._is_begun = is_open  # the answer or the reasoning has begun
        self._skips_space = True
        self._held = ""

    def push(self, text: str) -> list[AnswerPart]:
        """Return what is known by now; a mark that is not complete waits."""
        self._held += text
        if not self._is_begun:
            stripped = self._held.lstrip()
            if OPEN.startswith(stripped) and stripped != OPEN:  # also nothing at all
                return []
            self._is_begun = True
            if stripped.startswith(OPEN):
                self.is_reasoning, self._held = True, stripped.removeprefix(OPEN)
            else:
                self._skips_space = False
        if not self.is_reasoning:
            return self._take(self._held, is_reasoning=False)
        reasoning, mark, rest = self._held.partition(CLOSE)
        if mark:
            parts = self._take(reasoning.rstrip(), is_reasoning=True)
            self.is_reasoning, self._skips_space = False, True
            return parts + self._take(rest, is_reasoning=False)
        ready = self._held[: len(self._held) - _num_undecided(self._held)]
        return self._take(ready, is_reasoning=True)

    def end(self) -> list[AnswerPart]:
        """Return what was held back."""
        return self._take(self._held, is_reasoning=self.is_reasoning)

    def _take(self, text: str, *, is_reasoning: bool) -> list[AnswerPart]:
        self._held = self._held[len(text) :] if self._held.startswith(text) and is_reasoning else ""
        if self._skips_space:
            text = text.lstrip()
        if text:
            self._skips_space = False
        return [AnswerPart(text, is_reasoning)] if text else []


class ReasoningGate:
    """Takes the text of an answer in pieces, and tells what of it is reasoning, with its marks, as it is written.

    is_open: The prompt has opened the reasoning already.
    """

    def __init__(self, *, is_open: bool = False) -> None:
        self._is_inside = is_open
        self._is_over = False
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Reasoning that is known by now, and what comes after it; a mark that is not complete waits."""
        if self._is_over:
            return "", text
        self._held += text
        if not self._is_inside:
            begun = self._held.lstrip()
            if OPEN.startswith(begun) and begun != OPEN:
                return "", ""
            self._is_inside, self._is_over = begun.startswith(OPEN), not begun.startswith(OPEN)
        if self._is_over:
            return "", self._take(len(self._held))
        before, mark, _ = self._held.partition(CLOSE)
        if mark:
            self._is_over = True
            return self._take(len(before + mark)), self._take(len(self._held))
        num_begun = next(n for n in range(len(CLOSE) - 1, -1, -1) if self._held.endswith(CLOSE[:n]))
        return self._take(len(self._held) - num_begun), ""

    def end(self) -> tuple[str, str]:
        """The text that was held back, as push gives it."""
        held = self._take(len(self._held))
        return (held, "") if self._is_inside and not self._is_over else ("", held)

    def _take(self, num: int) -> str:
        taken, self._held = self._held[:num], self._held[num:]
        return taken


def split_reasoning(text: str, *, is_open: bool = False) -> tuple[str, str]:
    """The reasoning and the answer of a whole text; is_open as for ReasoningStream."""
    stream = ReasoningStream(is_open=is_open)
    parts = [*stream.push(text), *stream.end()]
    return (
        "".join(part.text for part in parts if part.is_reasoning).rstrip(),
        "".join(part.text for part in parts if not part.is_reasoning),
    )


def _num_undecided(text: str) -> int:
    """Characters at the end that the closing mark, or the space before it, may take."""
    for length in range(min(len(CLOSE) - 1, len(text)), 0, -1):
        if text.endswith(CLOSE[:length]):
            return length + len(text[:-length]) - len(text[:-length].rstrip())
    return len(text) - len(text.rstrip())
