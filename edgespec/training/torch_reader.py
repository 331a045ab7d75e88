"""Hidden states of texts, which torch computes: many texts in a pass, as many as memory has room for."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from edgespec import MemoryExhausted, Report, TokenIds
from edgespec.training.stored_texts import LARGEST_HALF, Halves
from edgespec.training.torch_target import TorchTarget, is_out_of_memory

if TYPE_CHECKING:
    from torch import Tensor

MOST_ROWS = 32_768  # tokens that are read in a pass on a GPU
_CPU_ROWS, _FEWEST_ROWS = 4096, 512  # on a CPU; the number is halved where there is no memory for them

Item = TypeVar("Item")


class TorchReader:
    """Runs texts from their beginning through a target, and gives the states after some of its layers."""

    def __init__(self, target: TorchTarget, report: Report) -> None:
        self.target, self._report = target, report
        self._num_rows = _CPU_ROWS if target.device == "cpu" else MOST_ROWS

    def read(self, texts: Sequence[TokenIds], layers: Sequence[int]) -> list[Halves]:
        """States of all tokens of texts, [num_tokens, layers · hidden_size] each."""
        return [to_halves([states]) for states in self.states(texts, layers)]

    def states(self, texts: Sequence[TokenIds], layers: Sequence[int]) -> "list[Tensor]":
        """States of all tokens of texts, [num_tokens, layers · hidden_size] each, on the device of the target.

        Raises MemoryExhausted: There is no memory for a few of the texts.
        """
        while True:
            try:
                return self._states(texts, layers)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            if self._num_rows // 2 < _FEWEST_ROWS:
                raise MemoryExhausted(f"{self.target.device} has no memory to read texts; end other programs")
            self._num_rows //= 2
            self._report(f"{self.target.device} has no memory for a pass; going on with {self._num_rows} tokens")

    def _states(self, texts: Sequence[TokenIds], layers: Sequence[int]) -> "list[Tensor]":
        import torch

        found, device = dict[int, "Tensor"](), self.target.device
        for part in in_batches(range(len(texts)), lambda i: len(texts[i]), self._num_rows):
            with torch.no_grad():
                rows = torch.cat(self.target.read(padded([texts[i] for i in part], device), layers), -1)
            found |= {i: own[: len(texts[i])] for i, own in zip(part, rows, strict=True)}
        return [found[i] for i in range(len(texts))]


def to_halves(states: "Sequence[Tensor]") -> Halves:
    """States side by side, [..., layers · hidden_size]."""
    import torch

    halves: Halves = torch.cat([*states], -1).float().clamp(-LARGEST_HALF, LARGEST_HALF).half().cpu().numpy()
    return halves


def padded(texts: Sequence[TokenIds], device: "object") -> "Tensor":
    """The tokens of texts, [texts, longest], with zeros behind those of shorter ones."""
    import torch

    rows = np.zeros((len(texts), max(map(len, texts))), np.int64)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    return torch.from_numpy(rows).to(device)


def in_batches(items: Iterable[Item], length: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Items from the shortest on, padded to the longest of a batch no more than so many tokens, or one item."""
    batch: list[Item] = []
    for item in sorted(items, key=length):
        if batch and (len(batch) + 1) * length(item) > most:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch
