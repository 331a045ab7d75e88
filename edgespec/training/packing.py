"""Texts packed into batches of equal rows. Knows nothing of torch or models."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec import TokenIds

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]


class Text(NamedTuple):
    """A prompt and the answer after it; its hidden states lie in the store from row `start` on.

    is_held_out: Its prompt is one of those that a user keeps aside, to compare with.
    """

    tokens: TokenIds  # [num_tokens]
    num_prompt: int
    start: int = 0
    is_held_out: bool = False

    @property
    def prompt(self) -> bytes:
        """The tokens of the prompt, by which texts of one prompt are known."""
        return self.tokens[: self.num_prompt].tobytes()


@dataclass(frozen=True)
class Batch:
    """Rows of several texts, [batch, rows]; row r of a text takes token r + 1 and the hidden state of token r.

    text: The number of the text that a row belongs to, -1 for padding.
    stored: The row of the store with the hidden state that is read; the one after it belongs to the token.
    starts: Rows at which a draft begins, those of an answer's tokens but the last, [batch, drafts]; -1 pads.
    """

    tokens: Ints
    positions: Ints
    text: Ints
    stored: Ints
    starts: Ints

    def rows(self, step: int) -> Ints:
        """The row of each draft's token at a step, [batch, drafts]; the last row where there is none."""
        return np.clip(self.starts + step, 0, self.tokens.shape[1] - 1)

    def has_next(self, step: int) -> Bools:
        """True where a text goes on after the step's token, so that its prediction can be compared."""
        same = self.at(self.text, step + 1) == self.at(self.text, 0)
        found: Bools = same & (self.starts >= 0) & (self.starts + step + 1 < self.tokens.shape[1])
        return found

    def at(self, values: Ints, step: int) -> Ints:
        """Values, [batch, rows], of each draft's token at a step."""
        return np.take_along_axis(values, self.rows(step), 1)


def num_shared(texts: Sequence[Text]) -> int:
    """The number of tokens with which all texts begin, of the shortest prompt at most."""
    num = min((text.num_prompt for text in texts), default=0)
    heads = np.stack([text.tokens[:num] for text in texts]) if texts else np.zeros((0, 0))
    return int(np.logical_and.accumulate((heads == heads[:1]).all(0)).sum())


def pack(
    texts: Sequence[Text], num_rows: int, batch_size: int, rng: np.random.Generator | None
) -> Iterator[Batch]:
    """Batches of all texts, in the order of rng; without it, in that of the texts.

    A text that is longer than num_rows loses the beginning of its prompt.
    """
    order = list(range(len(texts))) if rng is None else rng.permutation(len(texts)).tolist()
    bins: list[list[int]] = []
    filled = 0
    for index in order:
        length = min(len(texts[index].tokens) - 1, num_rows)
        if not bins or filled + length > num_rows:
            bins.append([])
            filled = 0
        bins[-1].append(index)
        filled += length
    for first in range(0, len(bins), batch_size):
        yield _batch(texts, bins[first : first + batch_size], num_rows)


def even_sample(texts: Sequence[Text], most_tokens: int) -> list[Text]:
    """Texts at even distances from the first to the last, with about so many tokens at most; one at least."""
    num_tokens = sum(len(text.tokens) for text in texts)
    num = min(len(texts), max(1, len(texts) * most_tokens // max(1, num_tokens)))
    return [texts[i * len(texts) // num] for i in range(num)]


def num_drafts(texts: Sequence[Text], num_rows: int) -> int:
    """How many drafts begin in all batches of the texts."""
    rows = [(text.num_prompt - 1, len(text.tokens) - 2) for text in texts]  # of the first, and behind the last
    return sum(max(0, stop - max(0, first, stop + 1 - num_rows)) for first, stop in rows)


def _batch(texts: Sequence[Text], bins: Sequence[Sequence[int]], num_rows: int) -> Batch:
    shape = (len(bins), num_rows)
    tokens, positions, stored = (np.zeros(shape, np.int64) for _ in range(3))
    text, is_answer = np.full(shape, -1, np.int64), np.zeros(shape, bool)
    for line, indices in enumerate(bins):
        place, stored[line] = 0, texts[indices[0]].start  # padding reads states that are read anyway
        for index in indices:
            own = texts[index]
            left_out = max(0, len(own.tokens) - 1 - num_rows)
            rows = np.arange(left_out, len(own.tokens) - 1)
            put = slice(place, place + len(rows))
            tokens[line, put] = own.tokens[rows + 1]
            positions[line, put] = rows - left_out
            stored[line, put] = own.start + rows
            text[line, put] = index
            is_answer[line, put] = rows + 1 >= own.num_prompt
            place += len(rows)
    goes_on = np.pad((text[:, 1:] == text[:, :-1]) & (text[:, 1:] >= 0), ((0, 0), (0, 1)))
    starts = [np.flatnonzero(line) for line in is_answer & goes_on]
    widest = max(1, *map(len, starts)) if starts else 1
    padded = np.stack([np.pad(own, (0, widest - len(own)), constant_values=-1) for own in starts])
    return Batch(tokens, positions, text, stored, padded)
