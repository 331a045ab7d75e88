"""Texts of a target, prompts and answers as tokens, in a file that grows by a line for each."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta

from edgespec.errors import ModelError
from edgespec.system.typed_json import read_as
from edgespec.training.packing import Text

_Token = Annotated[int, Meta(ge=0, le=1 << 24)]


@dataclass(frozen=True)
class _Line:
    number: Annotated[int, Meta(ge=0)]
    num_prompt: Annotated[int, Meta(ge=0)]
    tokens: Annotated[tuple[_Token, ...], Meta(min_length=1)]


class TextsFile:
    """Numbered texts in JSON Lines; a number is that of a prompt, so that work which was interrupted can go on.

    A last line that was cut short by a power cut is dropped.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        """Read what is there. Raises ModelError: It is damaged, or has tokens outside of the vocabulary."""
        self.path = path
        self.numbers: set[int] = set()
        self.texts: list[Text] = []
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) != len(content):
            with path.open("r+b") as file:
                file.truncate(len(whole))
        for place, line in enumerate(whole.splitlines(), 1):
            try:
                found = read_as(_Line, json.loads(line))
                _require_possible(found, vocab_size)
            except (ValueError, RecursionError) as error:
                raise ModelError(
                    f"{path} is damaged in line {place} ({error}); remove that line, or the file, and train again"
                ) from None
            self._hold(found.number, np.array(found.tokens, np.int32), found.num_prompt)

    def add(
        self, number: int, prompt: "np.ndarray[tuple[int], np.dtype[np.int32]]", answer: tuple[int, ...]
    ) -> None:
        tokens = np.append(prompt, np.array(answer, np.int32)).astype(np.int32)
        line = {"number": number, "num_prompt": len(prompt), "tokens": tokens.tolist()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._hold(number, tokens, len(prompt))

    @property
    def num_tokens(self) -> int:
        return sum(len(text.tokens) for text in self.texts)

    @property
    def num_answer_tokens(self) -> int:
        return self.num_tokens - sum(text.num_prompt for text in self.texts)

    def _hold(self, number: int, tokens: "np.ndarray[tuple[int], np.dtype[np.int32]]", num_prompt: int) -> None:
        self.numbers.add(number)
        self.texts.append(Text(tokens, num_prompt, self.num_tokens))


def _require_possible(line: _Line, vocab_size: int) -> None:
    """Raises ValueError: No target with this vocabulary has written the text."""
    if (largest := max(line.tokens)) >= vocab_size:
        raise ValueError(f"token {largest}, where the target has {vocab_size}")
    if line.num_prompt > len(line.tokens):
        raise ValueError(f"a prompt of {line.num_prompt} tokens in a text of {len(line.tokens)}")
