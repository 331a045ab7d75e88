"""The values that a static graph computes of a text: the least and the largest of each that it tells of."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.cancel import Cancel
from edgespec.manifest import Manifest
from edgespec.runtimes.devices import find_device, physical_cores
from edgespec.runtimes.session import load_graph, telling_of_memory
from edgespec.runtimes.static import pass_inputs
from edgespec.types import Range, TokenIds

_LOW, _HIGH = ".low", ".high"


def observed_ranges(graph: Path, manifest: Manifest, texts: Iterable[TokenIds]) -> dict[str, Range]:
    """Run a graph on the CPU, in passes of prefill_tokens; what is left of a text is left out.

    Args:
        graph: Takes and gives floats, and NAME.low and NAME.high of each value that it tells of.
        manifest: Of the folder that is made of it.
        texts: Each begins at the first position.

    Raises:
        MemoryExhausted: The weights or the workspace do not fit.
    """
    session = load_graph(graph, find_device("cpu"), physical_cores(), False, Cancel())
    kv, width = manifest.kv_cache, manifest.prefill_tokens
    names = [value.name for value in session.get_outputs()]
    found: dict[str, list[Range]] = {name.removesuffix(_LOW): [] for name in names if name.endswith(_LOW)}
    with telling_of_memory("measuring ranges"):
        for tokens in texts:
            shape = (kv.num_kv_heads, manifest.context_length, kv.head_dim)
            caches: dict[str, Any] = {
                past: np.zeros(shape, np.float32) for past, _ in manifest.signature.caches(kv.num_layers)
            }
            for start in range(0, len(tokens) - width + 1, width):
                feeds = pass_inputs(session, manifest, tokens[start : start + width], start)
                outputs = dict(zip(names, session.run(names, {**feeds, **caches}), strict=True))
                for past, present in manifest.signature.caches(kv.num_layers):
                    caches[past][:, start : start + width] = outputs[present]
                for name, ranges in found.items():
                    ranges.append(Range(float(outputs[name + _LOW]), float(outputs[name + _HIGH])))
    return {name: Range(min(r.low for r in ranges), max(r.high for r in ranges)) for name, ranges in found.items()}
