"""Prompts to measure with, from a user's file or the few that come with edgespec. Knows nothing of models."""

from collections import Counter
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, NamedTuple

from msgspec import Meta

from edgespec import UsageError
from edgespec.system.text_files import explain_unreadable, read_text
from edgespec.system.typed_json import read_lines_as

_LARGEST_BYTES = 1 << 26


class BenchPrompt(NamedTuple):
    """A conversation to measure with: the messages of its user, one for each turn."""

    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class _PromptLine:
    category: str = "all"
    prompt: str | None = None
    turns: Annotated[tuple[str, ...], Meta(min_length=1)] | None = None

    def __post_init__(self) -> None:
        if self.prompt is None and self.turns is None:
            raise ValueError("it has neither prompt nor turns")
        if not all(text.strip() for text in self.texts):
            raise ValueError("a prompt is empty")
        if not self.category.isprintable():
            raise ValueError(f"category is {self.category!a}, wanted text on one line")

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.prompt,) if self.prompt is not None else self.turns or ()


def own_prompts(per_category: int | None = None) -> list[BenchPrompt]:
    """A dozen short prompts, two in each category."""
    text = resources.files("edgespec.evaluation").joinpath("prompts.jsonl").read_text(encoding="utf-8")
    return _read_lines(text, per_category)


def read_prompts(path: Path, per_category: int | None) -> list[BenchPrompt]:
    """Prompts from JSON Lines with category and turns, or prompt.

    Raises UsageError: The file cannot be read, or a line is no prompt.
    """
    with explain_unreadable(path, "a prompts file (JSON Lines with turns or prompt)"):
        found = _read_lines(read_text(path, _LARGEST_BYTES), per_category)
    if not found:
        raise UsageError(f"{path} holds no prompts")
    return found


def _read_lines(content: str, per_category: int | None) -> list[BenchPrompt]:
    """The first per_category prompts of each category, or all. Raises ValueError: A line is no prompt."""
    counts: Counter[str] = Counter()
    found = []
    for line in read_lines_as(_PromptLine, content):
        counts[line.category] += 1
        if per_category is None or counts[line.category] <= per_category:
            found.append(BenchPrompt(line.category, line.texts))
    return found
