"""Models to check a device with: random weights in real shapes, or a GGUF file, in the forms that a GPU takes."""

from dataclasses import dataclass
from pathlib import Path

from random_model import SHAPES, drafter_of, write_model

from edgespec.manifest import read_manifest
from edgespec.runtimes.devices import Device, find_device
from edgespec.setup.open_model import ModelFolder, weights_bytes
from edgespec.system.disk import require_disk_space

# Bytes a weight: of the source, and of its exports at most.
_SOURCE_BYTES, _WEIGHT_BYTES = 0.6, {"source": 0.9, "int4": 0.9, "fp16": 2.2, "drafter": 0.0}
_RESERVE_BYTES = 2 << 30
_DRAFTER = "drafter"


class LeftOut(Exception):
    """What is not measured, and why."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A model that is checked on a device: the name of its shape, and the folder that its forms are made in.

    gguf: The file of a model, in place of random weights.
    """

    shape: str
    folder: Path
    device_name: str
    num_tokens: int
    gguf: Path | None

    @property
    def device(self) -> Device:
        return find_device(self.device_name)

    @property
    def drafter(self) -> Path:
        return self._made(_DRAFTER)

    def form(self, precision: str) -> ModelFolder:
        """Raises LeftOut: The form was not made."""
        folder = self._made(precision)
        return ModelFolder(folder, read_manifest(folder))

    def _made(self, name: str) -> Path:
        folder = self.folder / name
        if not folder.is_dir():
            raise LeftOut(f"{name} was not prepared")
        return folder

    def prepare(self, precision: str) -> str:
        """Export the model for a GPU, or as a drafter for the CPU; returns what it is."""
        from edgespec.export.convert import export_model  # takes a second, which other parts do without

        num_bytes = 0 if self.gguf else (_SOURCE_BYTES + _WEIGHT_BYTES[precision]) * SHAPES[self.shape].num_weights
        require_disk_space(self.folder, int(num_bytes), _RESERVE_BYTES)
        source = self.gguf or self._source(is_drafter=precision == _DRAFTER)
        if precision == _DRAFTER:
            bits = "int4" if self.gguf else "source"
            export_model(source, self.folder / _DRAFTER, name=_DRAFTER, precision=bits)
            return "its own weights in int4" if self.gguf else "its own first layers, as the others change little"
        export_model(source, self.folder / precision, name="target", precision=precision, form="gpu")
        return f"{weights_bytes(self.form(precision)) / 1e6:.0f} MB"

    def _source(self, *, is_drafter: bool) -> Path:
        shape = SHAPES[self.shape]
        path = self.folder / f"{'drafter' if is_drafter else 'target'}.gguf"
        if not path.exists():
            write_model(path, drafter_of(shape) if is_drafter else shape)
        return path
