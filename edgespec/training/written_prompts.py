"""Prompts that a target writes itself, so that a head can be trained without a corpus."""

from collections.abc import Callable
from itertools import takewhile
from typing import Any

import numpy as np

from edgespec import Engine, SamplingParams, TokenIds

_TEMPERATURE, _TOP_P = 1.0, 0.98  # of prompts and passages, which are to be of many kinds
_LONGEST_PROMPT, _LONGEST_PASSAGE, _LONGEST_ANSWER = 96, 160, 128  # tokens
_FEWEST, _MOST = 8, 600  # characters of a prompt
_BEGINNINGS = ("Write", "9", "é", "{")  # of turns, which no tokenizer joins with a template in the same way
_PASSAGE = "Write a factual paragraph about a topic of your choice."
_TASKS = (
    "Summarize the following text in two sentences.\n\n{}",
    "{}\n\nWrite three questions that this text answers, and answer them.",
    "Translate into German:\n\n{}",
    "List the facts in this text as bullet points.\n\n{}",
    "Rewrite this text for a child of ten years:\n\n{}",
    "{}\n\nCorrect the style of this text, and give the whole text again.",
)
_NUM_KINDS, _NUM_PLAIN = 8, 4  # of eight prompts four are plain, three are tasks, and one is a second turn

Turns = list[dict[str, str]]


class PromptWriter:
    """Has a target go on where a user's turn begins in its chat template: what it writes is what users ask it.

    Of eight prompts four are such turns, three are tasks over a passage that it writes, and one is a second turn
    behind its answer to a first one. A number is always the same prompt.
    """

    def __init__(self, engine: Engine, is_over: Callable[[], bool] = lambda: False) -> None:
        """is_over: Ends what is being written."""
        self._engine, self._is_over = engine, is_over
        self._begin = self._before_turn([])

    @property
    def can_write(self) -> bool:
        """False for a target without a chat template, which has no turns."""
        return len(self._begin) > 0

    def write(self, number: int) -> Turns | None:
        """A conversation that ends with the user's turn; None where nothing of use was written."""
        kind, of_kind = number % _NUM_KINDS, number // _NUM_KINDS
        if kind in range(_NUM_PLAIN, _NUM_KINDS - 1):
            passage = self._say([_turn("user", _PASSAGE)], _LONGEST_PASSAGE, number)
            task = _TASKS[(of_kind * (_NUM_KINDS - 1 - _NUM_PLAIN) + kind) % len(_TASKS)]
            return [_turn("user", task.format(passage))] if passage else None
        first = self._write_turn(self._begin, number)
        turns = [_turn("user", first)]
        if not first or kind < _NUM_PLAIN:
            return turns if first else None
        if not (answer := self._say(turns, _LONGEST_ANSWER, None)):
            return None
        turns.append(_turn("assistant", answer))
        second = self._write_turn(self._before_turn(turns), number)
        return [*turns, _turn("user", second)] if second else None

    def _before_turn(self, turns: Turns) -> TokenIds:
        """The tokens of a conversation up to where the text of the user's next turn begins."""
        found = [self._engine.encode([*turns, _turn("user", each)]) for each in _BEGINNINGS]
        same = takewhile(lambda tokens: len({*tokens}) == 1, zip(*found, strict=False))
        return np.array([tokens[0] for tokens in same], np.int32)

    def _write_turn(self, begin: TokenIds, number: int) -> str:
        """The text of a turn; nothing where it does not end, or is too short or too long."""
        text, has_ended = self._go_on(begin, _LONGEST_PROMPT, number)
        return text if has_ended and _FEWEST <= len(text) <= _MOST else ""

    def _say(self, turns: Turns, longest: int, number: int | None) -> str:
        return self._go_on(turns, longest, number)[0]

    def _go_on(self, prompt: Turns | TokenIds, longest: int, number: int | None) -> tuple[str, bool]:
        """The tokens that the target writes, greedily without a number, and True if it came to an end."""
        sampling = SamplingParams()
        if number is not None:
            sampling = SamplingParams(temperature=_TEMPERATURE, top_p=_TOP_P, seed=number)
        parts, reason = list[str](), None
        given: Any = prompt
        with self._engine.stream(given, sampling=sampling, max_tokens=longest) as chunks:
            for chunk in chunks:
                if self._is_over():
                    return "", False
                parts.append(chunk.text)
                reason = chunk.finish_reason
        return "".join(parts).strip(), reason == "stop"


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
