"""What drafting heads of all kinds share: graphs without a cache, and a target's hidden states as they read them.

A head drafts behind a text whose hidden states the target's decoder keeps. Where they are not known, as behind
tokens that the target has not run yet, it goes on from states of its own.
"""

from pathlib import Path
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from edgespec.decoding.hidden_states import HiddenStates, States
from edgespec.manifest import Head
from edgespec.runtimes.devices import Device
from edgespec.runtimes.node_placement import read_node_placement, require_placement
from edgespec.runtimes.session import (
    SessionOptions,
    load_graph,
    require_same,
    translate_error,
    translate_memory_errors,
)
from edgespec.types import Logits, TokenIds

# The logit of a token without a row; far from infinity, so that arithmetic with it raises no warning.
UNKNOWN = np.float32(-1e30)


class HeadGraph:
    """A graph of a head that has no cache, run by one thread at a time."""

    def __init__(self, graph: Path, device: Device, **options: Unpack[SessionOptions]) -> None:
        """Load the graph; raises as open_session does."""
        self._graph = graph
        self._session = load_graph(graph, device, **options)
        require_placement(read_node_placement(self._session), device, str(graph))
        self.inputs = {value.name: value.shape for value in self._session.get_inputs()}
        self.outputs = {value.name: value.shape for value in self._session.get_outputs()}

    def require(self, inputs: set[str], outputs: set[str]) -> None:
        """Raises ManifestError: The graph has other inputs or outputs."""
        found = (set(self.inputs), set(self.outputs))
        differences = [
            f"it has {kind} {', '.join(sorted(have)) or 'none'}, wanted {', '.join(sorted(want))}"
            for kind, have, want in zip(("inputs", "outputs"), found, (inputs, outputs), strict=True)
            if have != want
        ]
        require_same(self._graph, differences)

    def __call__(self, **inputs: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
        """The outputs by name; raises MemoryExhausted where the run does not fit."""
        with translate_memory_errors("running a head"):
            try:
                found = self._session.run(None, inputs)
            except Exception as error:  # ONNX Runtime has no common base of its own
                raise translate_error(error, "running a head") from error
        return dict(zip(self.outputs, found, strict=True))


class Features:
    """States that a head reads with the tokens of a text, made of the hidden states of its target."""

    def __init__(
        self, folder: Path, head: Head, device: Device, store: HiddenStates, **options: Unpack[SessionOptions]
    ) -> None:
        self._head, self._store = head, store
        self._is_even = options.get("deterministic", False)  # a single row has a kernel of its own (row_rule.py)
        self._fuse = None
        if head.fuse_graph:
            self._fuse = HeadGraph(folder / head.fuse_graph, device, **options)
            self._fuse.require({"features"}, {"hidden"})

    def num_known(self, tokens: TokenIds) -> int:
        """Of how many of the first tokens hidden states are known."""
        return self._store.known(tokens)

    def read(self, tokens: TokenIds, start: int, num_rows: int | None = None) -> States:
        """States of tokens from `start` on, as far as they are known, [num_known - start, state_size].

        Args:
            num_rows: Give no more rows than these.
        """
        rows = self._store.read(tokens, start, self._head.target_layers, num_rows)
        if self._fuse is None or not len(rows):
            return rows.reshape(len(rows), self._head.state_size) if len(rows) else self.none
        num_padded = len(rows) % 2 if self._is_even else 0
        padded = np.concatenate([rows, np.zeros((num_padded, rows.shape[1]), np.float32)])
        fused: States = self._fuse(features=padded[None])["hidden"][0, : len(rows)]
        return fused

    @property
    def none(self) -> States:
        """States of no tokens, [0, state_size]."""
        return np.zeros((0, self._head.state_size), np.float32)


class WholeRows:
    """Rows over the whole vocabulary, from rows of a head that was trimmed to some tokens.

    A call may overwrite what the one before it gave.
    """

    def __init__(self, subset: TokenIds | None, vocab_size: int) -> None:
        self._subset, self._vocab_size = subset, vocab_size
        self._rows: Logits = np.zeros((0, vocab_size), np.float32)

    @property
    def num_columns(self) -> int:
        """How many logits a row of the head has."""
        return self._vocab_size if self._subset is None else len(self._subset)

    def __call__(self, rows: Logits) -> Logits:
        if self._subset is None:
            return rows
        if len(self._rows) < len(rows):
            self._rows = np.full((len(rows), self._vocab_size), UNKNOWN, np.float32)
        self._rows[: len(rows), self._subset] = rows
        return self._rows[: len(rows)]


class OwnStates:
    """States that a head gave itself, of slots one behind the other."""

    def __init__(self, state_size: int) -> None:
        self._first = 0
        self._rows = np.zeros((0, state_size), np.float32)

    def has(self, slot: int) -> bool:
        return self._first <= slot < self._first + len(self._rows)

    def of(self, slots: list[int]) -> States:
        rows: States = self._rows[np.array(slots, np.intp) - self._first]
        return rows

    def reset(self, slot: int, rows: States) -> None:
        """Hold states of the slots from `slot` on alone."""
        self._first, self._rows = slot, rows

    def put(self, slot: int, rows: States) -> None:
        """Hold states of the slots from `slot` on behind those of the slots before, as far as these are held."""
        if not self._first <= slot <= self._first + len(self._rows):
            self.reset(slot, rows)
        else:
            self._rows = np.concatenate([self._rows[: slot - self._first], rows])

    def drop_before(self, slot: int) -> None:
        skipped = min(max(0, slot - self._first), len(self._rows))
        self._first, self._rows = self._first + skipped, self._rows[skipped:]

    def move(self, slots: list[int], start: int) -> None:
        """Hold states of `slots` in the slots from `start` on, and of those before."""
        self.put(start, self.of(slots))
