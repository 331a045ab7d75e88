"""Hidden states of a target's texts in a file of half floats, which is mapped and not read whole."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec.system.console import show_progress
from edgespec.system.disk import explain_write_errors, require_disk_space
from edgespec.training.packing import Text
from edgespec.types import TokenIds

Halves = npt.NDArray[np.float16]
_RESERVE_BYTES = 256 << 20  # stays free on the disk
_LARGEST = 65504.0  # of a half float; gemma's states exceed it at the first token alone


class StatesFile:
    """A row for each token of each text, in order, of `width` numbers."""

    def __init__(self, path: Path, width: int) -> None:
        self.path, self.width = path, width

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
        """The texts whose states are not in the file; a text of which only a part is there counts as missing."""
        num_rows = self.num_rows
        return [text for text in texts if text.start + len(text.tokens) > num_rows]

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
            file.truncate(missing[0].start * self.row_bytes)
            for number, text in enumerate(missing):
                show_progress(f"storing hidden states: {number} of {len(missing)} texts")
                rows = states_of(text.tokens)
                assert rows.shape == (len(text.tokens), self.width)
                file.write(np.clip(rows, -_LARGEST, _LARGEST).astype("<f2").tobytes())
                file.flush()

    def rows(self) -> Halves:
        """All rows, mapped, [num_rows, width]."""
        return np.memmap(self.path, "<f2", "r", shape=(self.num_rows, self.width))
