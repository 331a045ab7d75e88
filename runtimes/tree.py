"""A decoder that runs trees of drafts, over the graph that takes positions and a mask.

The nodes of a tree fill slots of the cache after the committed tokens. The next call moves the branch that its
tokens run through together: keys are rotated by position, so that the slot does not matter. On a GPU it keeps what
lies in place and runs the rest again.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Self, Unpack

import numpy as np

from edgespec.decoding.decoder import Can, Pass, Room, Rows, reusable_prefix, rows_by_branch
from edgespec.decoding.tree import NO_DRAFT, Tree, attention_mask
from edgespec.errors import DeviceUnavailable, ManifestError, require_context
from edgespec.manifest import Manifest
from edgespec.runtimes.attention_bias import TreeLayout
from edgespec.runtimes.cuda import PROVIDER
from edgespec.runtimes.device_checks import DeviceChecks, are_close, probe_tokens
from edgespec.runtimes.devices import Device
from edgespec.runtimes.kv_caches import SharedCache
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.session import SessionOptions, refuse_device, translate_memory_errors
from edgespec.types import Logits, TokenIds, append

# Whose attention takes a bias. CUDA's does since ONNX Runtime 1.29, by its slowest kernel (docs/log/devices.md).
_PROVIDERS = ("CPUExecutionProvider", "WebGpuExecutionProvider", PROVIDER)
_PROBE_TOKENS, _PROBE_PARENTS = 24, (-1, 0, -1, 2, 2, 0)
_log = logging.getLogger(__name__)


class OnnxBranchDecoder(OnnxDecoder):
    """The model of a folder that runs each branch of a tree in a pass of its own, on the graph without trees.

    For deterministic mode, where the rows of a tree are those of chains to the bit.
    """

    @property
    def can(self) -> Can:
        return super().can._replace(trees=True)

    def run(self, given: Pass) -> Rows:
        if not given.is_tree:
            return super().run(given)

        def run(tokens: TokenIds, num_last: int) -> Logits:
            return self.run(Pass(tokens, num_last=num_last, num_prompt=given.num_prompt)).logits

        return Rows(rows_by_branch(run, given))


class OnnxTreeDecoder(OnnxBranchDecoder):
    """The model of a folder, over the graph that runs a tree in one pass; chains run through the same session.

    Not for deterministic mode: sums over the cache depend on the slots that their parts lie in
    (docs/log/exactness.md).
    """

    _tree = NO_DRAFT  # its nodes fill the slots after the tokens that are held
    _runs_trees = True

    def __init__(
        self, folder: Path, manifest: Manifest, device: Device, **options: Unpack[SessionOptions]
    ) -> None:
        """Load the tree graph; raises as OnnxDecoder and tree_manifest do."""
        super().__init__(folder, tree_manifest(manifest, device), device, **options)

    def share(self, max_callers: int, may_join: Room) -> None:
        super().share(1, may_join)  # passes over trees do not run as one

    def fork(self) -> Self:
        fork = super().fork()
        fork._tree = NO_DRAFT
        return fork

    def exchange(self, other: Self) -> None:
        super().exchange(other)
        self._tree, other._tree = other._tree, self._tree

    @property
    def prefix_key(self) -> None:
        return None

    def run(self, given: Pass) -> Rows:
        if given.is_tree and self._is_one_pass(given):
            with self._lock, translate_memory_errors("running a tree"):
                self._begin()
                return self._run_tree(given)
        if not given.is_tree:
            with self._lock, translate_memory_errors("moving a branch"):
                self._settle(given.tokens)
        return super().run(given)

    def _is_one_pass(self, given: Pass) -> bool:
        """True if a tree may run in one pass; raises ContextOverflow where a branch does not fit."""
        num_tokens, num_nodes = len(given.text), len(given.tree.tokens)
        require_context(num_tokens + given.tree.depth, self.context_length)
        has_slots = num_tokens + num_nodes <= self.context_length
        return self._runs_trees and has_slots and num_nodes < self._most_tokens

    @property
    def _most_tokens(self) -> int:
        """How many tokens a pass over a tree may run: those of the widest that gives all its rows."""
        return self.shapes.rows[-1] if self.shapes else self.chunk_tokens

    def _num_padded(self, num_tokens: int) -> int:
        """How many tokens a pass is padded by."""
        widths = self.shapes.rows if self.shapes else ()
        return next((each for each in widths if each >= num_tokens), num_tokens) - num_tokens

    def _run_tree(self, given: Pass) -> Rows:
        """Leave the nodes in the slots after the text, which is held; those that lie there are not run again."""
        tokens, nodes, output = given.text, given.tree.tokens, self._output(given)
        depths, mask = np.array([0, *given.tree.depths]), attention_mask(given.tree.above)
        layout = TreeLayout(len(tokens) - 1 + depths, mask)
        num_held = given.num_held(self._held, self._tree)
        start, num_rows = len(tokens) + num_held, len(nodes) - num_held
        if num_held and start + num_rows + self._num_padded(num_rows) <= self.context_length:
            self.hold(tokens)
            self._tree = given.tree.cut(num_held)
            rows = self._run_nodes(nodes[num_held:], start, num_rows, layout, output)
            self._store(start, num_rows)
            self.num_fed += num_rows
        elif len(tokens) == 1:  # ONNX Runtime's CPU provider reads positions only of passes after a past
            first = self.rows(tokens, 1, output).copy()
            rows = np.concatenate([first, self._run_nodes(nodes, 1, len(nodes), layout, output)])
            self._store(1, len(nodes))
            self.num_fed += len(nodes)
        else:
            self._settle(tokens)
            start = reusable_prefix(self._held, tokens, 1)
            if start == 0 or len(tokens) - start + len(nodes) > self._most_tokens:
                start = len(tokens) - 1
                self.rows(tokens[:start], 1, output)
            num_run = len(tokens) - start + len(nodes)
            # At the end of the context tokens before it run again, and less is padded.
            start = min(start, self.context_length - num_run - self._num_padded(num_run))
            self.hold(tokens[:start])
            new = append(tokens[start:], nodes)
            rows = self._run_nodes(new, start, len(nodes) + 1, layout, output)
            self._store(start, len(new))
            self.num_fed += len(new)
        self.hold(tokens)
        self._tree = given.tree
        return self._made(given, rows).last(given.num_rows)

    def _run_nodes(self, tokens: TokenIds, start: int, num_rows: int, layout: TreeLayout, output: str) -> Logits:
        """Rows of a tree's last num_rows tokens, in a pass that is padded where passes are."""
        num_padded = self._num_padded(len(tokens))
        num_given = len(tokens) + num_padded if self.shapes else num_rows
        return self._passes.run(
            tokens, start, num_rows, layout, output, num_padded=num_padded, num_given=num_given
        )

    def hold(self, tokens: TokenIds) -> None:
        self._tree = NO_DRAFT
        super().hold(tokens)

    def _settle(self, tokens: TokenIds) -> None:
        """Hold the branch of the last tree that tokens run through.

        Where the cache is no memory of the host, tokens from the first one in another slot than its own are left
        out, and run again: on a GPU a row more costs less than a pass that moves them.
        """
        tree, held = self._tree, self._held
        self._tree = NO_DRAFT
        if path := tree.path_behind(held, tokens, can_move=self._is_on_host):
            if self._is_on_host:
                slots = [len(held) + node for node in path]
                assert isinstance(self._passes.cache, SharedCache)
                self._passes.cache.move(slots, len(held))
                if self._hidden:
                    self._hidden.move(slots, len(held))
            self.hold(append(held, tree.tokens[path]))

    def _check(self, device: Device, checks: DeviceChecks) -> None:
        """Find out too whether the device runs trees in one pass, or look up what an earlier check has found."""
        super()._check(device, checks)
        known = checks.read()
        if known and known.runs_trees is not None:
            self._runs_trees = known.runs_trees
            return
        self._runs_trees = self._is_sound(device, checks.tolerance)
        self.num_fed = 0
        if known:
            checks.write(replace(known, runs_trees=self._runs_trees))

    def _is_sound(self, device: Device, tolerance: float) -> bool:
        """True if the device gives the rows of a tree's branches in one pass."""
        tokens = probe_tokens(self.vocab_size, self.context_length)[: _PROBE_TOKENS + len(_PROBE_PARENTS)]
        tokens, nodes = tokens[: -len(_PROBE_PARENTS)], tokens[-len(_PROBE_PARENTS) :]
        given = Pass(tokens, Tree(nodes, parents=_PROBE_PARENTS))
        with refuse_device(device):
            expected = rows_by_branch(self.logits, given)
            rows = self._run_tree(given).logits
        is_sound = are_close(rows, expected, tolerance)
        self.forget()
        if not is_sound:
            _log.warning(
                "'%s' computes trees of drafts wrongly, so each branch runs in a pass of its own; if an earlier "
                "edgespec exported the model, export it again",
                device.name,
            )
        return is_sound


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
    if why := manifest.kv_cache.why_no_trees:
        raise ManifestError(f"{manifest.name} {why}; use another drafter, such as suffix")
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
