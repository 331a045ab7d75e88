"""Measures the least and the largest of the values that a static graph computes of texts."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from edgespec.manifest import Manifest
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.session import load_graph, translate_memory_errors
from edgespec.runtimes.static_pass import StaticCache, StaticPass, allocator
from edgespec.types import Range, TokenIds

_LOW, _HIGH = ".low", ".high"


def observe_ranges(graph: Path, manifest: Manifest, texts: Iterable[TokenIds]) -> dict[str, Range]:
    """Run a graph on the CPU, in passes of prefill_tokens; the rest of a text is left out.

    Args:
        graph: Takes and gives floats, and NAME.low and NAME.high of each value to observe.
        texts: Each begins at the first position.

    Raises MemoryExhausted: The weights or the workspace do not fit.
    """
    device, width = find_device("cpu"), manifest.prefill_tokens
    session, allocate = load_graph(graph, device), allocator(device)
    names = [value.name.removesuffix(_LOW) for value in session.get_outputs() if value.name.endswith(_LOW)]
    found: dict[str, list[Range]] = {name: [] for name in names}
    with translate_memory_errors("measuring ranges"):
        each = StaticPass(session, manifest, StaticCache(manifest, allocate, np.float32), allocate)
        for tokens in texts:
            for start in range(0, len(tokens) - width + 1, width):
                each.run(tokens[start : start + width], start, None)
                for name, ranges in found.items():
                    ranges.append(Range(float(each.outputs[name + _LOW]), float(each.outputs[name + _HIGH])))
    return {name: Range(min(r.low for r in ranges), max(r.high for r in ranges)) for name, ranges in found.items()}
