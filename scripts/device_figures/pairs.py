"""Targets and drafters to check a device with: SmolLM2, or models of random weights in real shapes."""

import shutil
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

from random_model import SHAPES, drafter_of, write_model

from device_figures.budget import LeftOut
from edgespec.config.options import DEFAULT_MODEL
from edgespec.errors import EdgeSpecError
from edgespec.export.convert import export_model
from edgespec.manifest import read_manifest
from edgespec.setup.catalog import CATALOG, CatalogFile
from edgespec.setup.fetch import fetch
from edgespec.setup.open_model import ModelFolder
from edgespec.system.console import print_stderr
from edgespec.system.disk import require_disk_space

REAL = "smollm2"
# Bytes a weight: of the source, in half floats, and of its exports at most.
_SOURCE_BYTES, EXPORT_BYTES = 2, {"int4": 0.9, "fp16": 2.2, "fp32": 4.2}
_RESERVE_BYTES = 2 << 30
_SMOLLM2_WEIGHTS = 135_000_000


class Pair(NamedTuple):
    """A target's and a drafter's folder, and why the drafter agrees with the target."""

    target: ModelFolder
    drafter: Path
    agreement: str


def num_weights(name: str) -> int:
    return _SMOLLM2_WEIGHTS if name == REAL else SHAPES[name].num_weights


def make_pair(name: str, precision: str, folder: Path, options: Namespace) -> Pair:
    """Export a model for the device, and its drafter for the CPU."""
    folder.mkdir(parents=True)
    target, drafter = folder / "target", folder / "drafter"
    if name == REAL:
        source = options.gguf or fetch_real(folder, offline=options.offline)
        export_model(source, target, precision=precision, form="gpu")
        export_model(source, drafter, precision="int4")
        return Pair(open_folder(target), drafter, "its own weights in int4 on the CPU")
    shape = SHAPES[name]
    num_bytes = (_SOURCE_BYTES + EXPORT_BYTES[precision]) * shape.num_weights
    require_disk_space(folder, int(num_bytes), _RESERVE_BYTES)
    for each, output, bits, form in (
        (shape, target, precision, "gpu"),
        (drafter_of(shape), drafter, "int4", "cpu"),
    ):
        write_model(folder / "source", each)
        export_model(folder / "source", output, name=output.name, precision=bits, form=form)
        shutil.rmtree(folder / "source")
    return Pair(open_folder(target), drafter, "its own first layers, as the others change almost nothing")


def fetch_real(folder: Path, *, offline: bool) -> Path:
    """SmolLM2's file; raises LeftOut: It cannot be had."""
    entry = CATALOG[DEFAULT_MODEL].source
    assert isinstance(entry, CatalogFile)
    try:
        return fetch(entry, folder, print_stderr, offline=offline)
    except EdgeSpecError as error:
        raise LeftOut(f"{error} (or name its file with --gguf)") from error


def open_folder(folder: Path) -> ModelFolder:
    return ModelFolder(folder, read_manifest(folder))
