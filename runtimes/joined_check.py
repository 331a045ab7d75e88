"""Opens a session that runs passes of several texts as one, and compares its rows with those of passes alone."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgespec.errors import EdgeSpecError
from edgespec.manifest import Manifest
from edgespec.runtimes.devices import Device
from edgespec.runtimes.joined import JoinedSession
from edgespec.runtimes.joined_graph import join_graph
from edgespec.runtimes.session import SessionOptions, load_graph, translate_memory_errors
from edgespec.runtimes.soundness import are_close, probe_tokens
from edgespec.system.cancel import Cancel

if TYPE_CHECKING:
    from edgespec.runtimes.passes import Passes

# Two texts by the numbers of their tokens: the first goes on with a token where the second begins.
_COMPARED = (6, 8)


def open_joined(
    graph: Path,
    manifest: Manifest,
    device: Device,
    options: SessionOptions,
    alone: "Passes",
    num_parts: int,
    cancel: Cancel,
) -> JoinedSession:
    """A session for passes of several texts, whose rows were compared with those of passes alone.

    Raises EdgeSpecError: It was cancelled, the graph cannot be taken apart, the session does not fit, or its rows
    are wrong.
    """
    content = join_graph(graph, manifest.signature, manifest.kv_cache.num_layers, num_parts)
    own: SessionOptions = {**options, "cancel": cancel}
    session = load_graph(graph, device, content, **own)
    with translate_memory_errors("making room for passes of several texts"):
        is_exact = options.get("deterministic", False)
        joined = JoinedSession(session, manifest, num_parts, is_exact=is_exact)
        _compare(joined, alone, manifest, is_exact=is_exact)
    return joined


def _compare(joined: JoinedSession, alone: "Passes", manifest: Manifest, *, is_exact: bool) -> None:
    """Raises EdgeSpecError: A pass of two texts gives other rows than a pass of each."""
    tokens = probe_tokens(manifest.vocab_size, manifest.context_length)
    if len(tokens) < sum(_COMPARED) + 2:
        raise EdgeSpecError("the context is too short to compare passes of several texts")
    first, second, num_padded = tokens[: _COMPARED[0] + 1], tokens[-_COMPARED[1] :], int(is_exact)
    caches = [alone.fork(), alone.fork()]
    alone.run(first[:-1], 0, 2)
    wanted = alone.run(first[-1:], len(first) - 1, 1, num_padded=num_padded).copy(), alone.run(second, 0, 2).copy()
    caches[0].run(first[:-1], 0, 2)
    parts = [caches[0].part(first[-1:], len(first) - 1, 1, num_padded), caches[1].part(second, 0, 2)]
    for made, rows in zip(joined.run([part for part in parts if part]), wanted, strict=True):
        if isinstance(made, Exception):
            raise made
        is_right = np.array_equal(made.logits, rows) if is_exact else are_close(made.logits, rows)
        if not is_right:
            raise EdgeSpecError("passes of several answers give other logits than passes of one")
