"""Prompts to train on: a user's own, or those that come with edgespec. Knows nothing of models."""

import json
from importlib import resources
from pathlib import Path

from edgespec.system.text_files import explain_unreadable, read_text
from edgespec.system.typed_json import read_lines_as

_LARGEST_BYTES = 1 << 28
_KEYS = ("turns", "prompt", "text")


def own_prompts() -> list[str]:
    """Some four hundred prompts of thirteen kinds, in turns, so that the first ones are of all kinds."""
    text = resources.files("edgespec.training").joinpath("prompts.jsonl").read_text(encoding="utf-8")
    return _from_records(text)


def read_corpus(path: Path) -> list[str]:
    """Prompts from a file: a line each, or a JSON object a line with prompt, text or turns.

    Of turns the first counts. Equal prompts are given once.

    Raises UsageError: The file cannot be read, is binary, is too large, or holds no prompt or no text.
    """
    with explain_unreadable(path, "a corpus (a line, or a JSON object with prompt, text or turns, per prompt)"):
        text = read_text(path, _LARGEST_BYTES)
        if "\0" in text:
            raise ValueError("it is binary")
        is_json = text.lstrip().startswith("{")
        found = _from_records(text) if is_json else [line.strip() for line in text.split("\n")]
        prompts = [*dict.fromkeys(prompt for prompt in found if prompt)]
        if broken := [prompt for prompt in prompts if not _is_text(prompt)]:
            raise ValueError(
                f"it has a prompt with half of a character ({broken[0][:40]!a}), which no tokenizer reads; remove "
                "it"
            )
        if not prompts:
            raise ValueError("it holds no prompts")
        return prompts


def _is_text(prompt: str) -> bool:
    """True if it has no lone surrogate, which JSON can state and UTF-8 cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in prompt)


def _from_records(text: str) -> list[str]:
    """Raises ValueError: A line is no JSON object with a prompt."""
    return [_prompt_of(record, number) for number, record in enumerate(read_lines_as(dict[str, object], text), 1)]


def _prompt_of(record: dict[str, object], number: int) -> str:
    found = next((record[key] for key in _KEYS if key in record), None)
    if isinstance(found, list) and found:
        found = found[0]
    if not isinstance(found, str):
        raise ValueError(f"record {number} has no text: {json.dumps(record)[:60]}")
    return found.strip()
