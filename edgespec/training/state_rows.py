"""Rows of hidden states, a row for each token of all texts, as training asks for them by their places."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from edgespec.training.packing import Bools, Ints, Text, even_sample
from edgespec.training.stored_texts import Halves
from edgespec.training.torch_reader import TorchReader

if TYPE_CHECKING:
    from torch import Tensor

_MEMORY_SHARE = 0.6  # of a GPU's free memory, for stored states
_COPIED_BYTES = 1 << 28
_COMPUTED_TOKENS = 300_000  # of a sample: some seconds of a GPU
_MOST_AT_HAND = 32_768  # tokens whose computed states are held: 0.3 GB of a 1.5B target, and as much to join them


class StateRows(Protocol):
    """Hidden states of the tokens of texts."""

    def at(self, places: Ints) -> "Tensor":
        """Rows, [*places, width]; a text's rows begin at its `start`."""

    def sample(self, texts: Sequence[Text]) -> Sequence[Text]:
        """Texts whose rows are there in a short time."""


class StoredRows(StateRows):
    """Rows of a file; in the memory of a GPU if that has room for them, else where they lie."""

    def __init__(self, rows: Halves, device: str) -> None:
        """device: Of torch, where they are asked for."""
        import torch

        self._device, self._stored, self._copied = device, rows, None
        if device.startswith("cuda") and rows.nbytes <= _MEMORY_SHARE * torch.cuda.mem_get_info()[0]:
            self._copied = torch.empty(rows.shape, dtype=torch.float16, device=device)
            step = max(1, _COPIED_BYTES // (2 * rows.shape[1]))
            for start in range(0, len(rows), step):
                self._copied[start : start + step] = torch.from_numpy(np.array(rows[start : start + step]))

    def at(self, places: Ints) -> "Tensor":
        import torch

        if self._copied is not None:
            return self._copied[torch.from_numpy(places).to(self._device)]
        return torch.from_numpy(self._stored[places]).to(self._device)

    def sample(self, texts: Sequence[Text]) -> Sequence[Text]:
        return texts


class ComputedRows(StateRows):
    """Rows that the target computes anew each time that they are asked for, of whole texts, and nothing is stored.

    On a GPU the pass over a batch takes about as long as training on it, where the states of five million tokens
    of a 1.5B target would take 46 GB.
    """

    def __init__(self, reader: TorchReader, texts: Sequence[Text], layers: Sequence[int]) -> None:
        """texts: All texts, in the order of their rows."""
        self._reader, self._texts, self._layers = reader, texts, layers
        self._starts = np.array([text.start for text in texts], np.int64)
        self._offsets = np.full(len(texts), -1, np.int64)  # to a text's rows among those at hand; -1 for none
        self._at_hand: Tensor | None = None

    def at(self, places: Ints) -> "Tensor":
        import torch

        numbers = np.searchsorted(self._starts, places, side="right") - 1
        wanted = np.unique(numbers)
        if (self._offsets[wanted] < 0).any():
            if len(parts := self._split(wanted)) > 1:
                return self._join(places, [np.isin(numbers, part) for part in parts])
            self._compute(wanted)
        assert self._at_hand is not None
        found = self._offsets[numbers] + places - self._starts[numbers]
        return self._at_hand[torch.from_numpy(found).to(self._at_hand.device)]

    def sample(self, texts: Sequence[Text]) -> Sequence[Text]:
        return even_sample(texts, _COMPUTED_TOKENS)

    def _split(self, wanted: Ints) -> list[Ints]:
        """Texts in parts, by their numbers, as many as are held at once."""
        lengths = np.array([len(self._texts[number].tokens) for number in wanted])
        parts = (np.cumsum(lengths) - lengths) // _MOST_AT_HAND
        return np.split(wanted, np.flatnonzero(np.diff(parts)) + 1)

    def _join(self, places: Ints, parts: Sequence[Bools]) -> "Tensor":
        """Rows of places, [*places, width], one part of which is computed after the other."""
        import torch

        target = self._reader.target
        shape = *places.shape, len(self._layers) * target.config.hidden_size
        rows = torch.empty(shape, dtype=target.dtype, device=target.device)
        for part in parts:
            rows[torch.from_numpy(part).to(target.device)] = self.at(places[part])
        return rows

    def _compute(self, wanted: Ints) -> None:
        import torch

        self._at_hand = None  # its memory is free for what comes now
        self._offsets[:] = -1
        texts = [self._texts[number] for number in wanted]
        lengths = [len(text.tokens) for text in texts]
        with torch.autocast(self._reader.target.device.partition(":")[0], enabled=False):
            self._at_hand = torch.cat(self._reader.states([text.tokens for text in texts], self._layers))
        self._offsets[wanted] = np.cumsum([0, *lengths[:-1]])
