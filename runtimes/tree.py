"""A decoder that runs trees of drafts, over the graph that takes positions and a mask.

The nodes of a tree fill slots of the cache behind the committed tokens. The next call finds the branch that its
tokens run through and moves what that branch left into place: keys are rotated by position, so a slot is only a
place to be.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np

from edgespec import trees
from edgespec.cancel import Cancel
from edgespec.errors import ContextOverflow, DeviceUnavailable, ManifestError
from edgespec.manifest import Manifest
from edgespec.runtimes.devices import Device
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.passes import Places
from edgespec.types import Logits, TokenIds

_DEVICE = "cpu"  # where the cache is memory that numpy can move


class _Tree(NamedTuple):
    """Nodes that fill the slots behind the tokens held."""

    nodes: TokenIds
    parents: tuple[int, ...]


_NO_TREE = _Tree(np.zeros(0, np.int32), ())


class OnnxTreeDecoder:
    """The model of a folder, as a function from tokens, and from trees behind them, to logits.

    Chains run through the same session. In deterministic mode each branch of a tree is a chain of its own, since
    sums over the cache depend on the slots that their parts lie in (docs/log.md).
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        device: Device,
        *,
        num_threads: int | None = None,
        deterministic: bool = False,
        shares_cores: bool = False,
        cancel: Cancel | None = None,
    ) -> None:
        """Load the tree graph.

        Raises:
            Cancelled: It was given up.
            ManifestError: There is none, it does not load, or it is not what the manifest says.
            DeviceUnavailable: The device cannot run it.
            MemoryExhausted: The weights do not fit.
        """
        self._deterministic = deterministic
        self._chain = OnnxDecoder(
            folder,
            tree_manifest(manifest, device),
            device,
            num_threads=num_threads,
            deterministic=deterministic,
            shares_cores=shares_cores,
            cancel=cancel,
        )
        self._tree = _NO_TREE
        self._lock = Lock()

    @property
    def vocab_size(self) -> int:
        return self._chain.vocab_size

    @property
    def context_length(self) -> int:
        return self._chain.context_length

    @property
    def num_fed(self) -> int:
        return self._chain.num_fed

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        """As OnnxDecoder has it."""
        with self._lock:
            self._settle(tokens)
            return self._chain.logits(tokens, num_last)

    def pretend(self, tokens: TokenIds) -> None:
        """As OnnxDecoder has it."""
        with self._lock:
            self._tree = _NO_TREE
            self._chain.pretend(tokens)

    def forget(self) -> None:
        """As OnnxDecoder has it."""
        with self._lock:
            self._tree = _NO_TREE
            self._chain.forget()

    def interrupt(self) -> None:
        """As OnnxDecoder has it."""
        self._chain.interrupt()

    def tree_logits(
        self, tokens: TokenIds, nodes: TokenIds, parents: Sequence[int], num_last: int | None = None
    ) -> Logits:
        """Logits behind the last of tokens and behind each node, [num_nodes + 1, vocab_size], or as num_last says.

        Raises:
            ContextOverflow: A branch is more than fits behind tokens.
            MemoryExhausted: The cache or the workspace does not fit.
        """
        longest = len(tokens) + int(trees.depths(parents).max(initial=0))
        if longest > self.context_length:
            raise ContextOverflow(longest, self.context_length)
        with self._lock:
            has_slots = len(tokens) + len(nodes) <= self.context_length
            if self._deterministic or not has_slots or not len(nodes):
                self._settle(tokens)
                rows = trees.logits_by_branch(self._chain, tokens, nodes, parents)
            else:
                rows = self._rows(tokens, _Tree(nodes, tuple(parents)), num_last)
            return rows if num_last is None else rows[-num_last:]

    def _rows(self, tokens: TokenIds, tree: _Tree, num_last: int | None) -> Logits:
        """Logits behind all nodes, or behind those that do not lie in their slots yet and the last at least."""
        nodes, parents = tree
        num_held = 0
        if num_last is not None:
            held = trees.num_held(self._chain.held, self._tree, tokens, nodes, parents)
            num_held = min(held, len(nodes) - num_last)
        if num_held:
            self._tree = _Tree(nodes[:num_held], parents[:num_held])
        else:
            self._settle(tokens)
        places = Places(len(tokens) - 1 + np.append(0, trees.depths(parents)), trees.seen(parents))
        rows = self._chain.tree_rows(tokens, nodes, places, num_held)
        self._tree = tree
        return rows

    def _settle(self, tokens: TokenIds) -> None:
        """Move what the branch that tokens run through has left behind the tokens held."""
        tree, self._tree = self._tree, _NO_TREE
        held = self._chain.held
        if not np.array_equal(held, tokens[: len(held)]):
            return
        if path := trees.followed(tree.nodes, tree.parents, tokens[len(held) :]):
            self._chain.adopt(tree.nodes[path], [len(held) + node for node in path])


def can_run_trees(manifest: Manifest, device: Device) -> bool:
    return _has_trees(manifest) and device.name == _DEVICE


def _has_trees(manifest: Manifest) -> bool:
    return manifest.tree_graph is not None and manifest.kv_cache.form == "shared_buffer"


def tree_manifest(manifest: Manifest, device: Device) -> Manifest:
    """The tree graph of a folder as its manifest would have it alone.

    Raises:
        ManifestError: There is none.
        DeviceUnavailable: The device cannot run it.
    """
    if not _has_trees(manifest):
        raise ManifestError(
            f"{manifest.name} has no graph for trees of drafts; export it again, with edgespec export "
            "and without --form npu, or use another drafter"
        )
    if device.name != _DEVICE:
        raise DeviceUnavailable(
            f"trees of drafts run on the {_DEVICE} alone, not on {device.name}; use another drafter or device"
        )
    assert manifest.tree_graph is not None
    signature = replace(
        manifest.signature,
        position_ids="position_ids",
        attention_bias="attention_bias",
        local_attention_bias="local_attention_bias",
        best=None,
    )
    return replace(manifest, graph=manifest.tree_graph, signature=signature)
