from pathlib import Path
from typing import Any

import pytest

from edgespec.manifest import Manifest
from edgespec.runtimes.devices import Device, find_device
from edgespec.runtimes.passes import Passes


@pytest.fixture
def computed_by_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU runs the passes of every device, so that a decoder for a GPU is opened and checked anywhere."""
    really = Passes.__init__

    def opened(self: Passes, graph: Path, manifest: Manifest, device: Device, **options: Any) -> None:
        really(self, graph, manifest, find_device("cpu"), **options)

    monkeypatch.setattr(Passes, "__init__", opened)
    monkeypatch.setattr("edgespec.runtimes.onnx.choose_shapes", lambda *about, **how: None)
