"""Decoders for greedy answers: one that copies no logits, and one that chooses as plain decoding does.

A target that finds the likeliest token on its own device gives one id for each row, 8 bytes; the row that is read
gives every other token no chance. So sampling, acceptance and learning need no second way.

Where rows depend on how a text is cut into passes, a token that leads by more than such a cut changes is chosen
from the row of any pass. Where the next one is nearer, all tokens that came from passes of several tokens are run
again one by one: their keys and values are then those of plain decoding, and so is the choice. To run the last one
alone would not do: keys and values that come from wide passes change a lead about as much as a wide pass itself
(docs/log/exactness.md).
"""

import logging
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec.decoding.decoder import BEST, Can, Decoder, ForwardingDecoder, Pass, Rows, empty_cache
from edgespec.decoding.sampling import GumbelSampler
from edgespec.types import Logits, Row, TokenIds


class _KnownRow(np.ndarray[Any, np.dtype[np.float32]]):
    """A row whose largest entry is known: to search one of 152,000 takes 9 to 30 µs."""

    largest: int

    def argmax(self, *arguments: Any, **options: Any) -> Any:
        return self.largest


class _KnownRows(Sequence[Any]):
    """Rows of −inf with a single 0 each, as an array of rows but without its memory.

    Each is a piece of one line, so that making them touches no row.
    """

    def __init__(self, line: _KnownRow, ids: npt.NDArray[np.int64]) -> None:
        """line has −inf for a vocabulary, 0, and −inf for a vocabulary; ids are where the rows have their 0."""
        self._line, self._ids, self._size = line, ids.tolist(), len(line) // 2

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: Any) -> Any:
        largest = self._ids[index]
        row: Any = self._line[self._size - largest : 2 * self._size - largest]
        row.largest = largest
        return row

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.stack([np.asarray(row) for row in self]).astype(dtype or np.float32)


class BestRows(ForwardingDecoder):
    """A decoder whose rows are −inf except for the likeliest token, which has 0.

    Where one holds a value that is not finite the decoder's own rows come instead, for the sampler to judge.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        self._line = np.full(2 * decoder.vocab_size + 1, -np.inf, np.float32).view(_KnownRow)
        self._line[decoder.vocab_size] = 0
        self._line.flags.writeable = False

    def run(self, given: Pass) -> Rows:
        rows = self._decoder.run(given._replace(wants=BEST))
        if rows.best is None:
            return rows
        if not all(rows.best.is_sound.tolist()):  # 0.3 µs for a few rows, the array's own all 2
            return self._decoder.run(given)
        known: Any = _KnownRows(self._line, rows.best.ids)  # serves as an array of rows
        return Rows(known, rows.best)


_log = logging.getLogger(__name__)


class Reruns(NamedTuple):
    """Near-ties that were decided as in plain decoding, and the passes of one token that this took."""

    num_tokens: int = 0
    num_passes: int = 0


class PlainChoices(ForwardingDecoder):
    """A decoder for one greedy answer whose rows give the tokens of plain decoding over an empty cache.

    It reads the prompt itself, alone and from its start: what the cache holds of it may come from other passes.
    """

    def __init__(
        self,
        decoder: Decoder,
        sampler: GumbelSampler,
        largest_change: float,
        times_given: Callable[[], int] = lambda: 1,
    ) -> None:
        """Reads nothing yet.

        Args:
            largest_change: The most by which the cut of a text into passes changes the lead of a token. A
                repetition penalty scales some logits and not others, so that what moves all alike moves a lead
                too. Every token is decided again then.
            times_given: How often the answer was given a cache, in which only the first time all is its own.
        """
        super().__init__(decoder)
        self._sampler = sampler
        self._largest_change = largest_change if sampler.params.repetition_penalty == 1.0 else inf
        self._num_plain = 0  # positions at the start of the cache that plain decoding would fill alike
        self._num_prompt = 0
        self._times_given, self._num_given = times_given, 0
        self.reruns = Reruns()

    @property
    def can(self) -> Can:
        return self._decoder.can._replace(trees=False)

    def run(self, given: Pass) -> Rows:
        """Rows of the last tokens, as far as these are accepted, [num_rows, vocab_size]."""
        tokens, num_rows = given.tokens, given.num_rows
        rows = self._run(given)
        num_prompt = len(tokens) - num_rows + 1
        for i in range(num_rows):
            prefix = tokens[: num_prompt + i]
            token, lead = self._sampler.lead(rows[i], prefix)
            if self._num_plain < len(prefix) and lead <= self._largest_change:
                rows = np.array(rows)  # the next pass may overwrite them
                rows[i] = self._run_again(prefix)
                token, _ = self._sampler.lead(rows[i], prefix)
            if i + 1 < num_rows and token != tokens[len(prefix)]:
                break
        return Rows(rows)

    def _run(self, given: Pass) -> Logits:
        if not self._num_prompt:
            return self._read_first(given)
        if self._num_given != self._times_given():
            self._read_prompt(given.tokens[: self._num_prompt])
        is_plain = given.num_rows == 1 and self._num_plain == len(given.tokens) - 1
        rows = self._decoder.run(given).logits
        if is_plain:
            self._num_plain = len(given.tokens)
        return rows

    def _read_prompt(self, prompt: TokenIds) -> Logits:
        empty_cache(self._decoder, prompt)
        self._num_given = self._times_given()
        row = self._decoder.logits(prompt, 1)
        self._num_plain = self._num_prompt = len(prompt)
        return row

    def _read_first(self, given: Pass) -> Logits:
        tokens, num_rows = given.tokens, given.num_rows
        first = self._read_prompt(tokens[: len(tokens) - num_rows + 1])
        if num_rows == 1:
            return first
        first = first.copy()  # the next pass may overwrite it
        return np.concatenate([first, self._decoder.run(given._replace(num_last=num_rows - 1)).logits])

    def _run_again(self, prefix: TokenIds) -> Row:
        """The row after prefix in plain decoding."""
        num_tokens, num_passes = self.reruns
        self.reruns = Reruns(num_tokens + 1, num_passes + len(prefix) - self._num_plain)
        for stop in range(self._num_plain + 1, len(prefix) + 1):
            row: Row = self._decoder.logits(prefix[:stop], 1)[0]
            self._num_plain = stop
            if stop < len(prefix):
                self._check(row, prefix[:stop], int(prefix[stop]))
        return row.copy()

    def _check(self, row: Row, prefix: TokenIds, token: int) -> None:
        best, lead = self._sampler.lead(row, prefix)
        if best != token:
            _log.warning(
                "a token of this answer is not that of plain decoding, where another one leads by %.3f; --exact "
                "counted on a change of at most %.3f: please report this",
                lead,
                self._largest_change,
            )
