from pathlib import Path
from typing import Any

import pytest
import tiny
from families import FAMILIES, weights_of

from edgespec.export.convert import export_model
from edgespec.manifest import Manifest
from edgespec.runtimes.devices import Device, find_device
from edgespec.runtimes.passes import Passes


@pytest.fixture(scope="session")
def convolved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with random weights, two layers of attention and three with short convolutions."""
    return _exported(tmp_path_factory.mktemp("convolved"), "lfm2")


@pytest.fixture(scope="session")
def recurrent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with random weights, two layers of attention and three with a Gated DeltaNet."""
    return _exported(tmp_path_factory.mktemp("recurrent"), "qwen3_5")


@pytest.fixture(scope="session")
def mamba_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with random weights, and a Mamba-2 layer beside attention in each of three layers."""
    return _exported(tmp_path_factory.mktemp("mamba"), "falcon_h1-normed")


@pytest.fixture(params=["recurrent_model", "mamba_model"])
def stateful_model(request: pytest.FixtureRequest) -> Path:
    """Each of the models that have a recurrent state."""
    return Path(request.getfixturevalue(request.param))


@pytest.fixture(scope="session")
def sharing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with random weights, whose last four of seven layers read keys and values of others."""
    return _exported(tmp_path_factory.mktemp("sharing"), "gemma4-shared")


def _exported(folder: Path, family: str) -> Path:
    config = {**FAMILIES[family]["config"], "max_position_embeddings": 1024}
    tiny.write_huggingface(folder / "hf", weights_of(family), config=config)
    export_model(folder / "hf", folder / "out", precision="fp32")
    return folder / "out"


@pytest.fixture
def computed_by_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU runs the passes of every device, so that a decoder for a GPU is opened and checked anywhere."""
    really = Passes.__init__

    def opened(self: Passes, graph: Path, manifest: Manifest, device: Device, **options: Any) -> None:
        really(self, graph, manifest, find_device("cpu"), **options)

    monkeypatch.setattr(Passes, "__init__", opened)
    for name in ("choose_shapes", "choose_same_shapes"):
        monkeypatch.setattr(f"edgespec.runtimes.device_trial.{name}", lambda *about: None)
