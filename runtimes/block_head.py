"""Heads that draft a block in one pass (DFlash: arXiv:2602.06036; DSpark: arXiv:2607.05147).

The cache holds keys and values of the tokens before the newest one, made of the target's hidden states; a block
leaves nothing in it. Behind the text at which a draft begins the rows of all its tokens come from one pass. Where
the head has a step graph, the row of each token also depends on the token that was drafted before it.
"""

from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from edgespec.decoding.cached_prefix import reusable_prefix
from edgespec.decoding.hidden_states import HiddenStates, States
from edgespec.errors import ContextOverflow
from edgespec.manifest import Head, Manifest
from edgespec.runtimes.devices import Device, import_onnxruntime
from edgespec.runtimes.head import Features, HeadGraph, WholeRows
from edgespec.runtimes.node_placement import read_node_placement, require_placement
from edgespec.runtimes.session import (
    SessionOptions,
    load_graph,
    refuse_device,
    require_same,
    translate_error,
    translate_memory_errors,
)
from edgespec.runtimes.shared_cache import SharedCache
from edgespec.types import Logits, TokenIds

_CHUNK_TOKENS = 256
_INPUTS = ("input_ids", "hidden", "attention_mask", "num_logits_to_keep")


class BlockPasses:
    """The main graph with its cache, run by one thread at a time."""

    def __init__(self, graph: Path, manifest: Manifest, device: Device, **options: Unpack[SessionOptions]) -> None:
        """Load the graph; raises as open_session does."""
        self._session = load_graph(graph, device, **options)
        require_placement(read_node_placement(self._session), device, str(graph))
        inputs = {value.name: value.shape for value in self._session.get_inputs()}
        outputs = {value.name: value.shape for value in self._session.get_outputs()}
        caches = manifest.signature.caches(manifest.kv_cache.num_layers)
        wanted = ({*_INPUTS, *(past for past, _ in caches)}, {"logits", "state", *(new for _, new in caches)})
        differences = [
            f"{name} is missing or not expected"
            for found, names in zip((set(inputs), set(outputs)), wanted, strict=True)
            for name in sorted(found ^ names)
        ]
        require_same(graph, differences)
        self.num_block = int(inputs["input_ids"][1])
        self.num_drafted, self._state_size = map(int, outputs["state"][1:])
        self._num_columns = int(outputs["logits"][2])
        self._binding = self._session.io_binding()
        self.cache = SharedCache(self._session, self._binding, manifest, device)
        self._bound: dict[str, npt.NDArray[Any]] = {}  # lives until its run is over: the binding knows addresses
        self._new_options = import_onnxruntime().RunOptions
        self._options = self._new_options()

    def run(self, block: TokenIds, num_past: int, hidden: States, num_logits: int) -> tuple[Logits, States]:
        """Run a block behind the first num_past tokens of the cache and those of hidden, [num_new, state_size].

        Returns logits of the first num_logits tokens of the draft, and states of all.

        Raises MemoryExhausted: The cache or the workspace does not fit.
        """
        total = num_past + len(hidden)
        logits = np.empty((1, num_logits, self._num_columns), np.float32)
        states = np.empty((1, self.num_drafted, self._state_size), np.float32)
        with translate_memory_errors("making room for a pass"):
            self.cache.prepare(num_past, len(hidden))
            self._bind(
                input_ids=block[None].astype(np.int64),
                hidden=np.ascontiguousarray(hidden[None]),
                attention_mask=np.ones((1, total), np.int64),
                num_logits_to_keep=np.array([num_logits], np.int64),
            )
            for name, array in (("logits", logits), ("state", states)):
                self._binding.bind_output(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
        try:
            self._session.run_with_iobinding(self._binding, self._options)
        except Exception as error:  # ONNX Runtime has no common base of its own
            raise translate_error(error, "running a pass") from error
        return logits[0], states[0]

    def begin(self) -> None:
        """Forget an interrupt of earlier runs."""
        self._options = self._new_options()

    def interrupt(self) -> None:
        """From another thread: end this run and the next ones until begin(); they raise errors."""
        self._options.terminate = True

    def _bind(self, **arrays: npt.NDArray[Any]) -> None:
        for name, array in arrays.items():
            self._bound[name] = array
            self._binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


class _Draft(NamedTuple):
    """What a pass over a block has given.

    tokens: The text behind which it drafts.
    logits: Of its first tokens, [num_logits, num_columns].
    states: Of all its tokens, [num_drafted, state_size].
    """

    tokens: TokenIds
    logits: Logits
    states: States


_NO_DRAFT = _Draft(np.zeros(0, np.int32), np.zeros((0, 0), np.float32), np.zeros((0, 0), np.float32))


class BlockHead:
    """A head that drafts blocks as a function from tokens to logits, which reads a target's hidden states.

    A draft begins behind a text all of whose hidden states are known, but for the newest token's; it goes on
    behind tokens of its own as far as the block reaches. Any other row is the first of a block behind its text,
    where hidden states that are not known are zeros.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        device: Device,
        hidden_states: HiddenStates,
        subset: TokenIds | None = None,
        **options: Unpack[SessionOptions],
    ) -> None:
        """Load the graphs; raises as open_session does.

        Args:
            hidden_states: Those that the target's decoder keeps.
            subset: The token of each row of logits of a trimmed head, ascending; None where each token has one.
        """
        assert manifest.head is not None
        assert manifest.head.mask_token_id is not None
        self.vocab_size, self.context_length, self.num_fed = manifest.vocab_size, manifest.context_length, 0
        self._whole = WholeRows(subset, manifest.vocab_size)
        self._head, self._mask = manifest.head, manifest.head.mask_token_id
        self._features = Features(folder, manifest.head, device, hidden_states, **options)
        self._step = _open_step(folder, manifest.head, device, **options)
        self._passes = BlockPasses(folder / manifest.graph, manifest, device, **options)
        self._held = np.zeros(0, np.int32)  # whose keys and values are in the cache, made of known hidden states
        self._draft = _NO_DRAFT
        self._num_wanted = self._passes.num_drafted
        self._num_given = 0  # tokens behind the text of the block with which the draft begins
        self._memories: dict[bytes, npt.NDArray[np.float32]] = {}  # of a step graph, by the tokens before
        self._confidence: float | None = None
        self._lock = Lock()
        if device.memory != "cpu":
            with refuse_device(device):  # what a graph needs of a device shows only in a run
                self.logits(np.zeros(2, np.int32), 1)
            self.forget()
            self.num_fed = 0

    @property
    def max_draft_tokens(self) -> int:
        return self._passes.num_drafted - self._num_given

    @property
    def tokens_per_pass(self) -> int:
        """How many tokens it drafts for the price of one pass."""
        return self._passes.num_drafted

    @property
    def confidence(self) -> float | None:
        return self._confidence

    def begin(self, tokens: TokenIds, num_tokens: int | None = None) -> bool:
        num_before = len(tokens) - 1
        if num_before < 1 or len(tokens) > self.context_length:
            return False
        with self._lock:
            wanted = num_tokens or self._passes.num_drafted
            if self._features.num_known(tokens) >= num_before:
                if not np.array_equal(self._draft.tokens, tokens):
                    self._draft = _NO_DRAFT._replace(tokens=tokens)
                self._num_given, self._num_wanted = 0, wanted
                return True
            place = self._place(tokens)
            if place is None:
                return False
            self._num_given, self._num_wanted = place, place + wanted
            return True

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        if len(tokens) > self.context_length:
            raise ContextOverflow(len(tokens), self.context_length)
        assert 1 <= num_last <= len(tokens)
        with self._lock, translate_memory_errors("running a head"):
            self._passes.begin()
            rows = [self._row(tokens[: len(tokens) - num_last + 1 + i]) for i in range(num_last)]
            return self._whole(np.stack(rows))

    def interrupt(self) -> None:
        """End the pass that another thread runs: it raises an error, and the cache holds what it held before."""
        self._passes.interrupt()

    def pretend(self, tokens: TokenIds) -> None:
        if len(tokens) > self.context_length:
            raise ContextOverflow(len(tokens), self.context_length)
        with self._lock, translate_memory_errors("making room for a text"):
            self._hold(tokens[:0])
            self._passes.cache.pretend(len(tokens))
            self._hold(tokens)

    def forget(self) -> None:
        with self._lock:
            self._hold(self._held[:0])
            self._passes.cache.clear()

    def _hold(self, tokens: TokenIds) -> None:
        self._held, self._draft = tokens, _NO_DRAFT

    def _place(self, tokens: TokenIds) -> int | None:
        """Which token of the draft follows tokens; None where it does not reach there."""
        begun = self._draft.tokens
        place = len(tokens) - len(begun)
        is_in = len(begun) > 0 and 0 <= place < self._passes.num_drafted
        return place if is_in and np.array_equal(begun, tokens[: len(begun)]) else None

    def _row(self, tokens: TokenIds) -> Logits:
        """The row behind tokens, [num_columns]."""
        place = self._place(tokens)
        if place is None:
            place, self._draft, self._num_wanted = 0, _NO_DRAFT._replace(tokens=tokens), 1
        if place >= len(self._draft.logits):
            num_logits = min(max(self._num_wanted, place + 1), self._passes.num_drafted)
            self._draft = self._run(self._draft.tokens, num_logits)
            self._memories.clear()
        return self._draft.logits[place] if self._step is None else self._run_step(tokens, place)

    def _run(self, tokens: TokenIds, num_logits: int) -> _Draft:
        """Run a block behind tokens, and before it what the cache lacks of them."""
        num_before = len(tokens) - 1
        if not num_before:  # nothing precedes the block: nobody drafts there
            return self._run_behind_nothing(tokens, num_logits)
        block = np.full(self._passes.num_block, self._mask, np.int32)
        block[0] = tokens[-1]
        start = min(reusable_prefix(self._held, tokens, 0), num_before - 1)
        while True:
            stop = min(start + _CHUNK_TOKENS, num_before)
            hidden = self._features.read(tokens[:stop], start)
            is_known = len(hidden) == stop - start
            if not is_known:
                missing = stop - start - len(hidden)
                hidden = np.concatenate([hidden, np.zeros((missing, self._head.state_size), np.float32)])
            self._held = self._held[:start]
            logits, states = self._passes.run(block, start, hidden, num_logits if stop == num_before else 1)
            self.num_fed += len(hidden) + len(block)
            if is_known and len(self._held) == start:
                self._held = tokens[:stop]
            start = stop
            if stop == num_before:
                return _Draft(tokens, logits, states)

    def _run_behind_nothing(self, tokens: TokenIds, num_logits: int) -> _Draft:
        logits = np.zeros((num_logits, self._whole.num_columns), np.float32)
        return _Draft(tokens, logits, np.zeros((self._passes.num_drafted, self._head.state_size), np.float32))

    def _run_step(self, tokens: TokenIds, place: int) -> Logits:
        assert self._step is not None
        begun, (_, logits, states) = len(self._draft.tokens), self._draft
        inputs: dict[str, npt.NDArray[Any]] = {
            "input_ids": np.array([[tokens[-1]]], np.int64),
            "hidden": states[None, place : place + 1],
            "logits_in": logits[None, place : place + 1],
        }
        if "memory_in" in self._step.inputs:
            before = tokens[begun:-1].tobytes()
            if place and before not in self._memories:
                self._run_step(tokens[:-1], place - 1)
            none = np.zeros((1, 1, self._step.inputs["memory_in"][2]), np.float32)
            inputs["memory_in"] = self._memories[before] if place else none
        found: Mapping[str, npt.NDArray[Any]] = self._step(**inputs)
        if "memory" in found:
            self._memories[tokens[begun:].tobytes()] = found["memory"]
        if "confidence" in found:
            self._confidence = float(found["confidence"].ravel()[0])
        row: Logits = found["logits"][0, 0]
        return row


def _open_step(folder: Path, head: Head, device: Device, **options: Unpack[SessionOptions]) -> HeadGraph | None:
    """The step graph; None where rows of a block do not depend on the tokens drafted before."""
    if not head.step_graphs:
        return None
    step = HeadGraph(folder / head.step_graphs[0], device, **options)
    has_memory = "memory_in" in step.inputs
    step.require(
        {"input_ids", "hidden", "logits_in", *(["memory_in"] if has_memory else [])},
        {"logits", *(["memory"] if has_memory else []), *(["confidence"] if head.has_confidence else [])},
    )
    return step
