"""A decoder that runs trees of drafts, over the graph that takes positions and a mask.

The nodes of a tree fill slots of the cache after the committed tokens. The next call moves the branch that its
tokens run through together: keys are rotated by position, so that the slot does not matter. On a GPU it keeps what
lies in place and runs the rest again.
"""

import logging
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Self, Unpack

import numpy as np

from edgespec.decoding import trees
from edgespec.decoding.decoder import Cache, Can, Forks, ForwardingDecoder, Pass, Rows
from edgespec.decoding.hidden_states import HiddenStates
from edgespec.decoding.pass_queue import Caller
from edgespec.decoding.tree import NO_DRAFT, Tree
from edgespec.errors import DeviceUnavailable, ManifestError, require_context
from edgespec.manifest import Manifest
from edgespec.runtimes.attention_bias import TreeLayout
from edgespec.runtimes.cuda import PROVIDER
from edgespec.runtimes.device_checks import DeviceChecks, are_close, probe_tokens
from edgespec.runtimes.devices import Device
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.session import SessionOptions, refuse_device
from edgespec.system.cancel import Cancel
from edgespec.types import TokenIds

# Whose attention takes a bias. CUDA's does since ONNX Runtime 1.29, by its slowest kernel (docs/log/devices.md).
_PROVIDERS = ("CPUExecutionProvider", "WebGpuExecutionProvider", PROVIDER)
_PROBE_TOKENS, _PROBE_PARENTS = 24, (-1, 0, -1, 2, 2, 0)
_log = logging.getLogger(__name__)


class OnnxTreeDecoder(ForwardingDecoder, Cache, Forks):
    """The model of a folder, as a function from tokens, and from trees after them, to logits.

    Chains run through the same session. Not for deterministic mode: sums over the cache depend on the slots that
    their parts lie in (docs/log/exactness.md).
    """

    def __init__(
        self, folder: Path, manifest: Manifest, device: Device, **options: Unpack[SessionOptions]
    ) -> None:
        """Load the tree graph; raises as OnnxDecoder and tree_manifest do."""
        manifest = tree_manifest(manifest, device)
        self._chain = OnnxDecoder(folder, manifest, device, **options)
        super().__init__(self._chain)
        self._tree = trees.HeldTree()
        self._lock = Lock()
        with self._chain.cancelled_by(options.get("cancel") or Cancel()):
            self._runs_trees = device.memory == "cpu" or self._check(
                device, DeviceChecks(folder, manifest, device)
            )

    def share(self, max_callers: int, may_join: Callable[[], bool]) -> None:
        self._chain.share(1, may_join)  # passes over trees do not run as one

    def fork(self) -> Self:
        """A decoder over the same weights with an empty cache of its own, which keeps no hidden states."""
        fork = copy(self)
        fork._chain = fork._decoder = self._chain.fork()
        fork._tree, fork._lock = trees.HeldTree(), Lock()
        return fork

    def serve(self, caller: Caller) -> None:
        self._chain.serve(caller)

    def copy_prefix(self, other: Self, tokens: TokenIds) -> bool:
        with self._lock:
            self._tree = trees.HeldTree()
            return self._chain.copy_prefix(other._chain, tokens)

    @property
    def can_exchange(self) -> bool:
        return self._chain.can_exchange

    def exchange(self, other: Self) -> None:
        with self._lock, other._lock:
            self._chain.exchange(other._chain)
            self._tree, other._tree = other._tree, self._tree

    @property
    def hidden_states(self) -> HiddenStates | None:
        return self._chain.hidden_states

    @property
    def can(self) -> Can:
        return Can(trees=True, best=self._chain.can.best)

    @property
    def cache(self) -> Cache:
        return self

    @property
    def forks(self) -> Forks:
        return self

    def run(self, given: Pass) -> Rows:
        with self._lock:
            if not given.is_tree:
                tokens = given.tokens
                self._settle(tokens)
                return self._chain.run(Pass(tokens, NO_DRAFT, given.num_rows, given.wants))
            if self._is_one_pass(given):
                return self._run_tree(given)
            self._settle(given.text)
            return Rows(trees.rows_by_branch(self._chain.logits, given))

    def pretend(self, tokens: TokenIds) -> None:
        with self._lock:
            self._tree = trees.HeldTree()
            self._chain.pretend(tokens)

    def imitate(self, tokens: TokenIds, num_run: int, seed: int) -> bool:
        with self._lock:
            self._tree = trees.HeldTree()
            return self._chain.imitate(tokens, num_run, seed)

    def forget(self) -> None:
        with self._lock:
            self._tree = trees.HeldTree()
            self._chain.forget()

    def _is_one_pass(self, given: Pass) -> bool:
        """True if a tree may run in one pass; raises ContextOverflow where a branch does not fit."""
        num_tokens, num_nodes = len(given.text), len(given.tree.tokens)
        require_context(num_tokens + int(trees.depths(given.parents).max(initial=0)), self.context_length)
        has_slots = num_tokens + num_nodes <= self.context_length
        return self._runs_trees and has_slots and num_nodes < self._chain.max_pass_tokens

    def _run_tree(self, given: Pass) -> Rows:
        tokens, nodes, parents, num_held = given.text, given.tree.tokens, given.parents, 0
        if given.num_last is not None:
            held = trees.num_held(self._chain.held_tokens, self._tree, tokens, nodes, parents)
            num_held = max(0, min(held, len(nodes) - given.num_last))
        if num_held:
            self._tree = trees.HeldTree(nodes[:num_held], parents[:num_held])
        else:
            self._settle(tokens)
        layout = TreeLayout(len(tokens) - 1 + np.append(0, trees.depths(parents)), trees.attention_mask(parents))
        rows = self._chain.run_tree(given, layout, num_held)
        self._tree = trees.HeldTree(nodes, parents)
        return rows.last(given.num_rows)

    def _settle(self, tokens: TokenIds) -> None:
        """Hold the branch of the last tree that tokens run through."""
        tree, self._tree = self._tree, trees.HeldTree()
        held = self._chain.held_tokens
        if not np.array_equal(held, tokens[: len(held)]):
            return
        if path := trees.matching_path(tree.nodes, tree.parents, tokens[len(held) :]):
            self._chain.adopt(tree.nodes[path], [len(held) + node for node in path])

    def _check(self, device: Device, checks: DeviceChecks) -> bool:
        """True if the device runs trees in one pass, as an earlier check has found or as it does now."""
        if (known := checks.read()) and known.runs_trees is not None:
            return known.runs_trees
        runs_trees = self._is_sound(device)
        self._chain.num_fed = 0
        checks.write_trees(runs_trees)
        return runs_trees

    def _is_sound(self, device: Device) -> bool:
        """True if the device gives the rows of a tree's branches in one pass."""
        tokens = probe_tokens(self.vocab_size, self.context_length)[: _PROBE_TOKENS + len(_PROBE_PARENTS)]
        tokens, nodes = tokens[: -len(_PROBE_PARENTS)], tokens[-len(_PROBE_PARENTS) :]
        given = Pass(tokens, Tree(nodes, parents=_PROBE_PARENTS))
        with refuse_device(device):
            expected = trees.rows_by_branch(self._chain.logits, given)
            rows = self._run_tree(given).logits
        is_sound = are_close(rows, expected)
        self.forget()
        if not is_sound:
            _log.warning(
                "'%s' computes trees of drafts wrongly, so each branch runs in a pass of its own; if an earlier "
                "edgespec exported the model, export it again",
                device.name,
            )
        return is_sound


class OnnxBranchDecoder(OnnxDecoder):
    """The model of a folder that runs each branch of a tree in a pass of its own, on the graph without trees.

    For deterministic mode, where the rows of a tree are those of chains to the bit.
    """

    @property
    def can(self) -> Can:
        return super().can._replace(trees=True)

    def run(self, given: Pass) -> Rows:
        return Rows(trees.rows_by_branch(self.logits, given)) if given.is_tree else super().run(given)


def can_run_trees(manifest: Manifest, device: Device) -> bool:
    """True if a model on a device runs trees: it has the graph, and the device takes it."""
    return _has_trees(manifest) and device.provider in _PROVIDERS


def _has_trees(manifest: Manifest) -> bool:
    return manifest.tree_graph is not None and manifest.kv_cache.form == "shared_buffer"


def tree_manifest(manifest: Manifest, device: Device) -> Manifest:
    """The manifest of a folder's tree graph alone.

    Raises:
        ManifestError: The folder has none.
        DeviceUnavailable: The device cannot run it.
    """
    if not _has_trees(manifest):
        raise ManifestError(
            f"{manifest.name} has no graph for trees of drafts; export it again, with edgespec export "
            "and without --form npu, or use another drafter"
        )
    if device.provider not in _PROVIDERS:
        raise DeviceUnavailable(
            f"trees of drafts run on the CPU, WebGPU and CUDA, not on '{device.name}'; use another drafter or "
            "another device"
        )
    assert manifest.tree_graph is not None
    signature = replace(
        manifest.signature,
        position_ids="position_ids",
        attention_bias="attention_bias",
        local_attention_bias="local_attention_bias",
        # Tokens are chosen in the graph where rows are not the host's.
        best=None if device.memory == "cpu" else manifest.signature.best,
    )
    return replace(manifest, graph=manifest.tree_graph, signature=signature)
