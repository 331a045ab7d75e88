"""Prompts to train on: a user's own, those that come with edgespec, and those that a target writes itself."""

import json
from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from edgespec import SamplingParams, TokenIds
from edgespec.system.printable import HALF
from edgespec.system.tables import read_table
from edgespec.system.text_files import explain_unreadable, read_text
from edgespec.system.typed_json import read_lines_as

_LARGEST_BYTES = 1 << 28
_KEYS = ("turns", "prompt", "text")
_TEMPERATURE, _TOP_P = 1.0, 0.98  # of prompts and passages, which are to be of many kinds
_LONGEST_PROMPT, _LONGEST_PASSAGE, _LONGEST_ANSWER = 96, 160, 128  # tokens
LONGEST_WRITTEN = _LONGEST_PASSAGE
_FEWEST, _MOST = 8, 600  # characters of a prompt
_BEGINNINGS = ("Write", "9", "é", "{")  # of turns, which no tokenizer joins with a template in the same way
_PASSAGE = "Write a factual paragraph about a topic of your choice."
_TABLE = read_table(__file__, "tasks.toml")
_TASKS: tuple[str, ...] = _TABLE["tasks"]
_TASK_BEGINNINGS: tuple[str, ...] = _TABLE["beginnings"]
_NUM_KINDS, _NUM_PLAIN = 8, 4  # of eight prompts four are plain, three are tasks, and one is a second turn

Turns = list[dict[str, str]]
Result = TypeVar("Result")


class Asked(NamedTuple):
    """Tokens that a target is to go on from, with so many tokens at most."""

    tokens: TokenIds
    longest: int
    sampling: SamplingParams


class Said(NamedTuple):
    """The tokens and the text that a target wrote, and True if it came to an end."""

    tokens: tuple[int, ...]
    text: str
    has_ended: bool


# What a target is asked one after the other, where each question may depend on the answers before it.
Dialogue = Generator[Asked, Said, Result]
# The number and the result of each of many.
Followed = Generator[tuple[int, Result], None, None]


class PromptWriter:
    """Has a target go on where a user's turn begins in its chat template: what it writes is what users ask it.

    Of eight prompts four are such turns, three are tasks over a passage that it writes, and one is a second turn
    behind its answer to a first one.
    """

    def __init__(self, encode: Callable[[Turns], Sequence[int] | TokenIds]) -> None:
        self._encode = encode
        self._begin = self._before_turn([])

    @property
    def can_write(self) -> bool:
        """False for a target whose chat template marks no turns, or that has none."""
        return len(self._begin) > 0 and len(self.middle) > 0

    def write(self, number: int) -> Dialogue[Turns | None]:
        """A conversation that ends with the user's turn; None where nothing of use was written."""
        kind, of_kind = number % _NUM_KINDS, number // _NUM_KINDS
        if kind in range(_NUM_PLAIN, _NUM_KINDS - 1):
            passage = (yield Asked(self._passage, _LONGEST_PASSAGE, _sampling(number))).text.strip()
            task = _TASKS[(of_kind * (_NUM_KINDS - 1 - _NUM_PLAIN) + kind) % len(_TASKS)]
            return [_turn("user", task.format(passage))] if passage else None
        first = yield from _write_turn(self._begin, number)
        turns = [_turn("user", first)]
        if not first or kind < _NUM_PLAIN:
            return turns if first else None
        tokens = np.array(self._encode(turns), np.int32)
        if not (answer := (yield Asked(tokens, _LONGEST_ANSWER, _sampling(None))).text.strip()):
            return None
        turns.append(_turn("assistant", answer))
        second = yield from _write_turn(self._before_turn(turns, beginnings=_BEGINNINGS[:2]), number)
        return [*turns, _turn("user", second)] if second else None

    @property
    def begins(self) -> list[TokenIds]:
        """Tokens at which the target can go on with a user's turn: half of them plain, half of them tasks."""
        tasks = [text for text in (*_TASK_BEGINNINGS, *(each.partition("{}")[0] for each in _TASKS)) if text]
        return [self._begin] * len(tasks) + [self._before_turn([], text) for text in tasks]

    @property
    def middle(self) -> TokenIds:
        """The tokens from the end of a user's turn to the beginning of the answer."""
        found = [[*self._encode([_turn("user", each)])][::-1] for each in _BEGINNINGS]
        return _same(found)[::-1]

    @cached_property
    def _passage(self) -> TokenIds:
        """The tokens of the task to write a passage."""
        return np.array(self._encode([_turn("user", _PASSAGE)]), np.int32)

    def _before_turn(self, turns: Turns, text: str = "", beginnings: Sequence[str] = _BEGINNINGS) -> TokenIds:
        """The tokens of a conversation up to where the text of the user's next turn begins, or goes on.

        beginnings: Of that text, which the result is found by; each costs a rendering of the chat template.
        """
        return _same([self._encode([*turns, _turn("user", text + each)]) for each in beginnings])


def _same(found: Sequence[Sequence[int] | TokenIds]) -> TokenIds:
    """The first tokens, as far as all have the same."""
    same = takewhile(lambda tokens: len({*tokens}) == 1, zip(*found, strict=False))
    return np.array([tokens[0] for tokens in same], np.int32)


def _write_turn(begin: TokenIds, number: int) -> Dialogue[str]:
    """The text of a turn; nothing where it does not end, or is too short or too long."""
    said = yield Asked(begin, _LONGEST_PROMPT, _sampling(number))
    text = said.text.strip()
    return text if said.has_ended and _FEWEST <= len(text) <= _MOST else ""


def _sampling(number: int | None) -> SamplingParams:
    """Greedy without a number."""
    if number is None:
        return SamplingParams()
    return SamplingParams(temperature=_TEMPERATURE, top_p=_TOP_P, seed=number)


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


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
        if broken := [prompt for prompt in prompts if HALF.search(prompt)]:
            raise ValueError(
                f"it has a prompt with half of a character ({broken[0][:40]!a}), which no tokenizer reads; remove "
                "it"
            )
        if not prompts:
            raise ValueError("it holds no prompts")
        return prompts


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
