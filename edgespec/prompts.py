"""Prompts to measure with: a user's file, or a few of our own. Knows nothing of models."""

import json
from collections import defaultdict
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.errors import UsageError

_LARGEST_BYTES = 1 << 26  # of a prompts file
_OWN = "prompts.jsonl"
_SHOWN_CHARACTERS = 60


class BenchPrompt(NamedTuple):
    category: str
    turns: tuple[str, ...]


class _Unsound(ValueError):
    """What is wrong with a line, in words."""


def own_prompts(per_category: int | None = None) -> list[BenchPrompt]:
    """A dozen short ones, two of each kind of work."""
    return _parsed(resources.files("edgespec").joinpath(_OWN).read_text(encoding="utf-8"), per_category)


def read_prompts(path: Path, per_category: int | None) -> list[BenchPrompt]:
    """Prompts from JSON Lines with category and turns, or prompt.

    Raises:
        UsageError: The file cannot be read, or a line is none of these.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_BYTES + 1)
        if len(content) > _LARGEST_BYTES:
            raise UsageError(f"{path} holds more than {_LARGEST_BYTES >> 20} MiB; give a shorter prompts file")
        found = _parsed(content.decode("utf-8-sig"), per_category)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no prompts file: it is no text in UTF-8") from None
    except _Unsound as error:
        raise UsageError(f"{path} is no prompts file: {error}; wanted JSON Lines with turns or prompt") from None
    if not found:
        raise UsageError(f"{path} holds no prompts")
    return found


def _parsed(content: str, per_category: int | None) -> list[BenchPrompt]:
    """The first per_category of each category."""
    counts: dict[str, int] = defaultdict(int)
    found = []
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            prompt = _prompt(json.loads(line))
        except _Unsound as error:
            raise _Unsound(f"line {number}: {error}") from None
        except RecursionError:
            raise _Unsound(f"line {number} is nested too deep") from None
        except ValueError as error:
            raise _Unsound(f"line {number} is no JSON ({error})") from None
        counts[prompt.category] += 1
        if per_category is None or counts[prompt.category] <= per_category:
            found.append(prompt)
    return found


def _prompt(stated: Any) -> BenchPrompt:
    """Raises _Unsound: It is none."""
    if not isinstance(stated, dict):
        raise _Unsound(f"it is no object but {_shortened(stated)}")
    if not stated.keys() & {"prompt", "turns"}:
        raise _Unsound("it has neither prompt nor turns")
    category = stated.get("category", "all")
    if not isinstance(category, str) or not category.isprintable():
        raise _Unsound(f"its category is {_shortened(category)}, wanted a text on one line")
    turns = [stated["prompt"]] if "prompt" in stated else stated["turns"]
    if not isinstance(turns, list) or not turns:
        raise _Unsound(f"its turns are {_shortened(turns)}, wanted a list of texts")
    for text in turns:
        if not isinstance(text, str):
            raise _Unsound(f"a prompt of it is {_shortened(text)}, wanted a text")
        if not text.strip():
            raise _Unsound("a prompt of it is empty")
    return BenchPrompt(category, tuple(turns))


def _shortened(value: object) -> str:
    return json.dumps(value)[:_SHOWN_CHARACTERS]
