"""Texts of a target in files that grow: prompts and answers as tokens, and the hidden states of their tokens."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from edgespec import ModelError, TokenIds
from edgespec.system.console import show_progress
from edgespec.system.disk import explain_write_errors, replace_file, require_disk_space
from edgespec.system.typed_json import read_as
from edgespec.training.packing import Text

Halves = npt.NDArray[np.float16]
ReadStates = Callable[[Sequence[TokenIds]], Sequence[npt.NDArray[np.floating[Any]]]]
"""Hidden states of all tokens of texts, [num_tokens, width] each; half floats are finite."""
_Token = Annotated[int, Meta(ge=0, le=1 << 24)]
_RESERVE_BYTES = 256 << 20  # stays free on the disk
LARGEST_HALF = 65504.0  # of a half float; gemma's states exceed it at the first token alone


@dataclass(frozen=True)
class _TextLine:
    number: int
    num_prompt: Annotated[int, Meta(ge=0)]
    tokens: Annotated[tuple[_Token, ...], Meta(min_length=1)]


class TextsFile:
    """Numbered texts in JSON Lines; a number is that of a prompt, so that work which was interrupted can go on.

    Numbers below 0 are those of prompts that are held out. New texts come behind those that are there, so that the
    hidden states of these stay in their places. A last line that was cut short by a power cut is dropped.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        """Read what is there. Raises ModelError: It is damaged, or has tokens outside of the vocabulary."""
        self.path = path
        self.numbers: set[int] = set()
        self.texts: list[Text] = []
        self.num_tokens = self.num_answer_tokens = 0
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) != len(content):
            with path.open("r+b") as file:
                file.truncate(len(whole))
        for place, line in enumerate(whole.splitlines(), 1):
            try:
                found = read_as(_TextLine, json.loads(line))
                _require_possible(found, vocab_size)
            except (ValueError, RecursionError) as error:
                raise ModelError(
                    f"{path} is damaged in line {place} ({error}); remove that line, or the file, and train again"
                ) from None
            self._hold(found.number, np.array(found.tokens, np.int32), found.num_prompt)

    def add(self, number: int, prompt: TokenIds, answer: tuple[int, ...]) -> None:
        tokens = np.append(prompt, np.array(answer, np.int32)).astype(np.int32)
        line = {"number": number, "num_prompt": len(prompt), "tokens": tokens.tolist()}
        content = json.dumps(line) + "\n"
        with explain_write_errors(self.path.parent, len(content)), self.path.open("a", encoding="utf-8") as file:
            file.write(content)
        self._hold(number, tokens, len(prompt))

    def _hold(self, number: int, tokens: TokenIds, num_prompt: int) -> None:
        self.numbers.add(number)
        self.texts.append(Text(tokens, num_prompt, self.num_tokens, is_held_out=number < 0))
        self.num_tokens += len(tokens)
        self.num_answer_tokens += len(tokens) - num_prompt


def _require_possible(line: _TextLine, vocab_size: int) -> None:
    """Raises ValueError: No target with this vocabulary has written the text."""
    if (largest := max(line.tokens)) >= vocab_size:
        raise ValueError(f"token {largest}, where the target has {vocab_size}")
    if line.num_prompt > len(line.tokens):
        raise ValueError(f"a prompt of {line.num_prompt} tokens in a text of {len(line.tokens)}")


class StatesFile:
    """A row for each token of each text, in order, of `width` numbers.

    A file beside it has a line for each text, with a hash of its tokens: states of other texts count as missing.
    """

    def __init__(self, path: Path, width: int) -> None:
        self.path, self.width = path, width
        self._hashes = path.with_suffix(".texts")

    @property
    def row_bytes(self) -> int:
        return 2 * self.width

    @property
    def num_rows(self) -> int:
        return self.path.stat().st_size // self.row_bytes if self.path.exists() else 0

    def fitting(self, texts: Sequence[Text], most_bytes: int) -> list[Text]:
        """The first texts whose states take no more bytes than that."""
        return [text for text in texts if (text.start + len(text.tokens)) * self.row_bytes <= most_bytes]

    def missing(self, texts: Sequence[Text]) -> list[Text]:
        """The texts from the first one on whose states are not in the file, or only in part."""
        return list(texts[self._num_stored(texts) :])

    def num_foreign(self, texts: Sequence[Text]) -> int:
        """How many of these texts have others, which were there before, in their place in the file."""
        return len(self._read_hashes()[self._num_stored(texts) : len(texts)])

    def fill(self, texts: Sequence[Text], states_of: ReadStates, num_at_once: int = 1) -> None:
        """Append the states of missing texts, so many at once. Raises DiskFull: There is no room."""
        missing = self.missing(texts)
        if not missing:
            return
        needed = sum(len(text.tokens) for text in missing) * self.row_bytes
        require_disk_space(self.path.parent, needed, _RESERVE_BYTES)
        with explain_write_errors(self.path.parent, needed), self.path.open("ab") as file:
            self._write_hashes(texts[: len(texts) - len(missing)])
            file.truncate(missing[0].start * self.row_bytes)
            for start in range(0, len(missing), num_at_once):
                show_progress(f"storing hidden states: {start} of {len(missing)} texts")
                part = missing[start : start + num_at_once]
                for text, rows in zip(part, states_of([text.tokens for text in part]), strict=True):
                    assert rows.shape == (len(text.tokens), self.width)
                    halves = rows if rows.dtype == np.float16 else np.clip(rows, -LARGEST_HALF, LARGEST_HALF)
                    file.write(np.ascontiguousarray(halves.astype("<f2", copy=False)).data)
                file.flush()
                with self._hashes.open("ab") as hashes:  # after the rows, which nobody trusts without it
                    hashes.write(b"".join(_hash(text) + b"\n" for text in part))

    def rows(self) -> Halves:
        """All rows, mapped, [num_rows, width]."""
        return np.memmap(self.path, "<f2", "r", shape=(self.num_rows, self.width))

    def _num_stored(self, texts: Sequence[Text]) -> int:
        """How many of the first texts have all their states in the file."""
        num_rows = self.num_rows
        pairs = zip(texts, self._read_hashes(), strict=False)
        known = takewhile(
            lambda pair: _hash(pair[0]) == pair[1] and pair[0].start + len(pair[0].tokens) <= num_rows, pairs
        )
        return sum(1 for _ in known)

    def _read_hashes(self) -> list[bytes]:
        return self._hashes.read_bytes().splitlines() if self._hashes.exists() else []

    def _write_hashes(self, texts: Sequence[Text]) -> None:
        replace_file(self._hashes, b"".join(_hash(text) + b"\n" for text in texts))


def _hash(text: Text) -> bytes:
    return sha256(text.tokens.astype("<i4").tobytes()).hexdigest()[:16].encode()


def read_tokens(path: Path, vocab_size: int) -> TokenIds:
    """The tokens of a file of whole numbers, ascending; raises ModelError: It is damaged."""
    content = path.read_bytes()
    tokens: TokenIds = np.frombuffer(content[: len(content) // 4 * 4], "<i4").astype(np.int32)
    is_whole = 4 * len(tokens) == len(content) > 0 and tokens[0] >= 0 and tokens[-1] < vocab_size
    if not is_whole or np.any(np.diff(tokens) <= 0):
        raise ModelError(f"{path} is damaged; remove {path.parent} and train again")
    return tokens
