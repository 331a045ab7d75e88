"""Hidden states of a target's texts in a file of half floats, which is mapped and not read whole."""

from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import takewhile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec.system.console import show_progress
from edgespec.system.disk import explain_write_errors, replace_file, require_disk_space
from edgespec.training.packing import Text
from edgespec.types import TokenIds

Halves = npt.NDArray[np.float16]
_RESERVE_BYTES = 256 << 20  # stays free on the disk
_LARGEST = 65504.0  # of a half float; gemma's states exceed it at the first token alone


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

    def trust(self, texts: Sequence[Text]) -> None:
        """Take the rows of a file that has no hashes yet for those of these texts."""
        if self.num_rows and not self._hashes.exists():
            stored = [text for text in texts if text.start + len(text.tokens) <= self.num_rows]
            self._write_hashes(stored)

    def missing(self, texts: Sequence[Text]) -> list[Text]:
        """The texts from the first one on whose states are not in the file, or only in part."""
        return list(texts[self._num_stored(texts) :])

    def num_foreign(self, texts: Sequence[Text]) -> int:
        """How many of these texts have others, which were there before, in their place in the file."""
        num_stored = self._num_stored(texts)
        return len(self._read_hashes()[num_stored : len(texts)])

    def fill(self, texts: Sequence[Text], states_of: Callable[[TokenIds], npt.NDArray[np.float32]]) -> None:
        """Append the states of missing texts, which states_of gives, [num_tokens, width].

        Raises DiskFull: There is no room.
        """
        missing = self.missing(texts)
        if not missing:
            return
        needed = sum(len(text.tokens) for text in missing) * self.row_bytes
        require_disk_space(self.path.parent, needed, _RESERVE_BYTES)
        with explain_write_errors(self.path.parent, needed), self.path.open("ab") as file:
            self._write_hashes(texts[: len(texts) - len(missing)])
            file.truncate(missing[0].start * self.row_bytes)
            for number, text in enumerate(missing):
                show_progress(f"storing hidden states: {number} of {len(missing)} texts")
                rows = states_of(text.tokens)
                assert rows.shape == (len(text.tokens), self.width)
                file.write(np.clip(rows, -_LARGEST, _LARGEST).astype("<f2").tobytes())
                file.flush()
                with self._hashes.open("ab") as hashes:  # after the rows, which nobody trusts without it
                    hashes.write(_hash(text) + b"\n")

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
