"""A graph of a drafting head: its session, and the names and shapes of its inputs and outputs."""

from pathlib import Path
from typing import Any, Unpack

import numpy.typing as npt

from edgespec.runtimes.devices import Device
from edgespec.runtimes.node_placement import read_node_placement, require_placement
from edgespec.runtimes.session import (
    SessionOptions,
    load_graph,
    require_same,
    translate_error,
    translate_memory_errors,
)


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

    def __call__(self, **inputs: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
        """The outputs by name; raises MemoryExhausted where the run does not fit."""
        with translate_memory_errors("running a head"):
            try:
                found = self.session.run(None, inputs)
            except Exception as error:  # ONNX Runtime has no common base of its own
                raise translate_error(error, "running a head") from error
        return dict(zip(self.outputs, found, strict=True))
