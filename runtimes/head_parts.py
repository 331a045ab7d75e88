"""Parts of drafting heads of all kinds: their folder, their graphs, and the hidden states that they read.

A head drafts after a text whose hidden states the target's decoder keeps. Where they are not known, as after
tokens that the target has not run yet, it goes on from states of its own.
"""

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Unpack

import numpy as np

from edgespec.decoding.decoder import Correct, Decoder, Pass, Rows
from edgespec.decoding.head_rows import WholeRows
from edgespec.decoding.hidden_states import HiddenStates, States
from edgespec.errors import require_context
from edgespec.manifest import Head, Manifest
from edgespec.runtimes.devices import Device
from edgespec.runtimes.node_placement import read_node_placement, require_placement
from edgespec.runtimes.session import (
    SessionOptions,
    load_graph,
    refuse_device,
    require_same,
    translate_errors,
    translate_memory_errors,
)
from edgespec.types import Array, Logits, TokenIds, append


@dataclass(frozen=True, kw_only=True)
class HeadFolder:
    """The folder of a head of any kind, and what it is opened with.

    hidden_states: Those that the target's decoder keeps.
    subset: The token of each row of logits of a trimmed vocabulary head, ascending; None where each token has one.
    """

    path: Path
    manifest: Manifest
    device: Device
    hidden_states: HiddenStates
    subset: TokenIds | None = None

    @property
    def head(self) -> Head:
        assert self.manifest.head is not None
        return self.manifest.head


def place_in_draft(begun: TokenIds, tokens: TokenIds, num_places: int) -> int | None:
    """Which token of a draft that was begun after a text follows tokens; None where it does not reach there."""
    place = len(tokens) - len(begun)
    is_in = len(begun) > 0 and 0 <= place < num_places
    return place if is_in and np.array_equal(begun, tokens[: len(begun)]) else None


class HeadDecoder(Decoder):
    """The parts that heads of all kinds have. Each kind gives rows over its own columns.

    correction: Of these rows, learned from use; None for none.
    """

    num_fed = 0

    def __init__(self, folder: HeadFolder, **options: Unpack[SessionOptions]) -> None:
        """Load the fuse graph, if there is one; raises as open_session does."""
        self.vocab_size, self.context_length = folder.manifest.vocab_size, folder.manifest.context_length
        self._head, self._store = folder.head, folder.hidden_states
        self._whole = WholeRows(folder.subset, self.vocab_size)
        self._features = Features(folder, **options)
        self._confidence: float | None = None  # in the last row, of heads that give it
        self.correction: Correct | None = None
        self._lock = Lock()
        self.expect_drafts(True)

    def run(self, given: Pass) -> Rows:
        tokens, num_last = given.tokens, given.num_rows
        require_context(len(tokens), self.context_length)
        assert 1 <= num_last <= len(tokens)
        with self._lock, translate_memory_errors("running a head"):
            return Rows(self._whole(self._rows_after(tokens, num_last)), confidence=self._confidence)

    @abstractmethod
    def _rows_after(self, tokens: TokenIds, num_last: int) -> Logits:
        """Rows after the last num_last tokens, [num_last, num_columns]."""

    def _try_out(self, device: Device) -> None:
        """Raises DeviceUnavailable: The device does not run the head; what a graph needs shows only in a run."""
        if device.memory != "cpu":
            with refuse_device(device):
                self.logits(np.zeros(2, np.int32), 1)
        self.forget()
        self.num_fed = 0

    def expect_drafts(self, is_expected: bool) -> bool:
        return self._store.want(self, is_expected)

    @abstractmethod
    def forget(self) -> None:
        """Hold no text."""

    @property
    def columns(self) -> TokenIds | None:
        return self._whole.columns

    @property
    def num_columns(self) -> int:
        return self._whole.num_columns


class Features:
    """States that a head reads with the tokens of a text, made of the hidden states of its target.

    skipped: Tokens that lie before each text that is asked for, and which the head does not read.
    """

    def __init__(self, folder: HeadFolder, **options: Unpack[SessionOptions]) -> None:
        """Load the fuse graph, if there is one; raises as open_session does."""
        self._head, self._store = folder.head, folder.hidden_states
        self.skipped: TokenIds = np.zeros(0, np.int32)
        self._is_even = options.get("deterministic", False)  # a single row has another kernel (pass_shapes.py)
        self._fuse = None
        if self._head.fuse_graph:
            self._fuse = HeadGraph(folder.path / self._head.fuse_graph, folder.device, **options)
            self._fuse.require({"features"}, {"hidden"})

    def num_known(self, tokens: TokenIds, *, is_last: bool = False) -> int:
        """How many of the first tokens have known hidden states.

        is_last: It is enough that the last of them has one.
        """
        if len(self.skipped) < self._store.first and not is_last:
            return 0
        return max(0, self._store.known(append(self.skipped, tokens)) - len(self.skipped))

    def read(self, tokens: TokenIds, start: int, num_rows: int | None = None) -> States:
        """States of tokens from `start` on, as far as they are known, [num_known - start, state_size].

        num_rows: Give no more rows than these.
        """
        whole, slot = append(self.skipped, tokens), len(self.skipped) + start
        rows = self._store.read(whole, slot, self._head.target_layers, num_rows)
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


class HeadGraph:
    """A graph whose inputs and outputs are as given by name, run by one thread at a time."""

    def __init__(self, graph: Path, device: Device, **options: Unpack[SessionOptions]) -> None:
        """Load the graph; raises as open_session does."""
        self._graph = graph
        self.session = load_graph(graph, device, **options)
        require_placement(read_node_placement(self.session), device, str(graph))
        self.inputs = {value.name: value.shape for value in self.session.get_inputs()}
        self.outputs = {value.name: value.shape for value in self.session.get_outputs()}

    def require(self, inputs: set[str], outputs: set[str]) -> None:
        """Raises ManifestError: The graph has other inputs or outputs."""
        found = (set(self.inputs), set(self.outputs))
        differences = [
            f"it has {kind} {', '.join(sorted(have)) or 'none'}, wanted {', '.join(sorted(want))}"
            for kind, have, want in zip(("inputs", "outputs"), found, (inputs, outputs), strict=True)
            if have != want
        ]
        require_same(self._graph, differences)

    def __call__(self, **inputs: Array) -> dict[str, Array]:
        """The outputs by name; raises MemoryExhausted where the run does not fit."""
        with translate_errors("running a head"):
            found = self.session.run(None, inputs)
        return dict(zip(self.outputs, found, strict=True))
