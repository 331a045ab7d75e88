"""Heads that draft a block in one pass (DFlash: arXiv:2602.06036; DSpark: arXiv:2607.05147).

The cache holds keys and values of the tokens before the newest one, made of the target's hidden states; a block
leaves nothing in it. After the text at which a draft begins the rows of all its tokens come from one pass. Where
the head has a step graph, the row of each token also depends on the token that was drafted before it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Unpack

import numpy as np

from edgespec.decoding.decoder import Cache, Can, reusable_prefix
from edgespec.decoding.hidden_states import States
from edgespec.errors import require_context
from edgespec.manifest import Manifest
from edgespec.runtimes.devices import Device, import_onnxruntime
from edgespec.runtimes.head_parts import HeadDecoder, HeadFolder, HeadGraph, place_in_draft
from edgespec.runtimes.kv_caches import SharedCache
from edgespec.runtimes.session import SessionOptions, new_run_options, translate_errors, translate_memory_errors
from edgespec.types import Array, Logits, TokenIds

_CHUNK_TOKENS = 256


class _Draft(NamedTuple):
    """The rows and states of a pass over a block.

    tokens: The text after which it drafts.
    logits: Of its first tokens, [num_logits, num_columns].
    states: Of all its tokens, [num_drafted, state_size].
    """

    tokens: TokenIds
    logits: Logits
    states: States


_NO_DRAFT = _Draft(np.zeros(0, np.int32), np.zeros((0, 0), np.float32), np.zeros((0, 0), np.float32))


class BlockHead(HeadDecoder, Cache):
    """A head that drafts blocks as a function from tokens to logits, which reads a target's hidden states.

    A draft begins after a text all of whose hidden states are known, but for the newest token's; it goes on
    after tokens of its own as far as the block reaches. Any other row is the first of a block after its text,
    where hidden states that are not known are zeros. In deterministic mode a row is equal to the bit however a
    text is cut into passes.
    """

    def __init__(self, folder: HeadFolder, **options: Unpack[SessionOptions]) -> None:
        """Load the graphs; raises as open_session does."""
        super().__init__(folder, **options)
        assert folder.head.mask_token_id is not None
        self._mask = folder.head.mask_token_id
        self._is_deterministic = options.get("deterministic", False)
        self._step = _open_step(folder, **options)
        self._passes = BlockPasses(folder.path / folder.manifest.graph, folder.manifest, folder.device, **options)
        self._held = np.zeros(0, np.int32)  # whose keys and values are in the cache, made of known hidden states
        self._draft = _NO_DRAFT
        self._num_wanted = self._passes.num_drafted
        self._memories: dict[bytes, States] = {}  # of a step graph, by the tokens before
        self._try_out(folder.device)

    @property
    def can(self) -> Can:
        return Can(tokens_per_pass=self._passes.num_drafted)

    @property
    def cache(self) -> Cache:
        return self

    def begin(self, tokens: TokenIds, num_tokens: int, max_unread: int | None = None) -> int:
        num_before = len(tokens) - 1
        if num_before < 1 or len(tokens) > self.context_length:
            return 0
        with self._lock:
            if self._features.num_known(tokens) >= num_before:
                if not np.array_equal(self._draft.tokens, tokens):
                    self._draft = _NO_DRAFT._replace(tokens=tokens)
                place = 0
            elif (found := self._place(tokens)) is not None:  # the draft goes on in the block of an earlier one
                place = found
            else:
                return 0
            self._num_wanted = place + num_tokens
            return min(num_tokens, self._passes.num_drafted - place)

    def _rows_after(self, tokens: TokenIds, num_last: int) -> Logits:
        self._passes.begin()
        return np.stack([self._row(tokens[: len(tokens) - num_last + 1 + i]) for i in range(num_last)])

    def interrupt(self) -> None:
        self._passes.interrupt()

    def pretend(self, tokens: TokenIds) -> None:
        require_context(len(tokens), self.context_length)
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
        return place_in_draft(self._draft.tokens, tokens, self._passes.num_drafted)

    def _row(self, tokens: TokenIds) -> Logits:
        """The row after tokens, [num_columns]."""
        place = self._place(tokens)
        if place is None:
            place, self._draft, self._num_wanted = 0, _NO_DRAFT._replace(tokens=tokens), 1
        if place >= len(self._draft.logits):
            num_logits = min(max(self._num_wanted, place + 1), self._passes.num_drafted)
            self._draft = self._run(self._draft.tokens, num_logits)
            self._memories.clear()
        return self._draft.logits[place] if self._step is None else self._run_step(tokens, place)

    def _run(self, tokens: TokenIds, num_logits: int) -> _Draft:
        """Run a block after tokens, and before it what the cache lacks of them."""
        num_before = len(tokens) - 1
        if not num_before:  # nothing precedes the block: nobody drafts there
            logits = np.zeros((num_logits, self._whole.num_columns), np.float32)
            return _Draft(tokens, logits, np.zeros((self._passes.num_drafted, self._head.state_size), np.float32))
        block = np.full(self._passes.num_block, self._mask, np.int32)
        block[0] = tokens[-1]
        start = min(reusable_prefix(self._held, tokens, 0), num_before - 1)
        while True:
            start, stop = self._cut(start, min(start + _CHUNK_TOKENS, num_before))
            hidden = self._features.read(tokens, start, stop - start)
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

    def _cut(self, start: int, stop: int) -> tuple[int, int]:
        """Where a pass begins and ends: in deterministic mode it runs an even number of rows (pass_shapes.py)."""
        is_odd = (stop - start + self._passes.num_block) % 2
        if not self._is_deterministic or not is_odd:
            return start, stop
        return (start - 1, stop) if start else (start, max(1, stop - 1))

    def _run_step(self, tokens: TokenIds, place: int) -> Logits:
        assert self._step is not None
        begun, (_, logits, states) = len(self._draft.tokens), self._draft
        inputs: dict[str, Array] = {
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
        found: Mapping[str, Array] = self._step(**inputs)
        if "memory" in found:
            self._memories[tokens[begun:].tobytes()] = found["memory"]
        if "confidence" in found:
            self._confidence = float(found["confidence"].ravel()[0])
        row: Logits = found["logits"][0, 0]
        return row


def _open_step(folder: HeadFolder, **options: Unpack[SessionOptions]) -> HeadGraph | None:
    """The step graph; None where rows of a block do not depend on the tokens drafted before."""
    head = folder.head
    if not head.step_graphs:
        return None
    step = HeadGraph(folder.path / head.step_graphs[0], folder.device, **options)
    has_memory = "memory_in" in step.inputs
    step.require(
        {"input_ids", "hidden", "logits_in", *(["memory_in"] if has_memory else [])},
        {"logits", *(["memory"] if has_memory else []), *(["confidence"] if head.has_confidence else [])},
    )
    return step


_INPUTS = ("input_ids", "hidden", "attention_mask", "num_logits_to_keep")


class BlockPasses:
    """The main graph with its cache, run by one thread at a time."""

    def __init__(self, graph: Path, manifest: Manifest, device: Device, **options: Unpack[SessionOptions]) -> None:
        """Load the graph; raises as open_session does."""
        found = HeadGraph(graph, device, **options)
        caches = manifest.cache_names
        found.require({*_INPUTS, *(past for past, _ in caches)}, {"logits", "state", *(new for _, new in caches)})
        self._session = found.session
        self.num_block = int(found.inputs["input_ids"][1])
        self.num_drafted, self._state_size = map(int, found.outputs["state"][1:])
        self._num_columns = int(found.outputs["logits"][2])
        self._binding = self._session.io_binding()
        ort = import_onnxruntime()
        self.cache = SharedCache(ort, self._session, self._binding, manifest, device)
        self._bound: dict[str, Array] = {}  # lives until its run is over: the binding knows addresses
        self._options = new_run_options()

    def run(self, block: TokenIds, num_past: int, hidden: States, num_logits: int) -> tuple[Logits, States]:
        """Run a block after the first num_past tokens of the cache and those of hidden, [num_new, state_size].

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
        with translate_errors("running a pass"):
            self._session.run_with_iobinding(self._binding, self._options)
        return logits[0], states[0]

    def begin(self) -> None:
        """Forget an interrupt of earlier runs."""
        self._options = new_run_options()

    def interrupt(self) -> None:
        """From another thread: end this run and the next ones until begin(); they raise errors."""
        self._options.terminate = True

    def _bind(self, **arrays: Array) -> None:
        for name, array in arrays.items():
            self._bound[name] = array
            self._binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
