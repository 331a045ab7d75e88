"""A model in the forms that devices run: those that are prepared, and what another one would be."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from edgespec.loading.open_model import ModelFolder, weights_bytes
from edgespec.manifest import Manifest
from edgespec.planning.foresee import ModelSize
from edgespec.runtimes.device_names import Kind
from edgespec.runtimes.devices import Device

# Bytes that a weight takes in a file, scales and all; blocks of four bits with a head of eight.
_BYTES_A_WEIGHT = {"fp32": 4.0, "fp16": 2.0, "int8": 1.1, "w8a16": 1.1}
_BYTES_IN_BLOCKS = 0.65
_NPU_BYTES = 2.0  # half floats
_NPU_CONTEXT = 1024


@dataclass(frozen=True, kw_only=True)
class ModelForms:
    """A model by the device that is to run it.

    find: A prepared folder, None where there is none. prepare: Exports one; None where the folders are all that
    there is. foresee: The size of the model in a form, by its source.
    """

    name: str
    find: Callable[[Device], ModelFolder | None]
    prepare: Callable[[Device], ModelFolder] | None
    foresee: Callable[[Kind], ModelSize]

    def can_have(self, device: Device) -> bool:
        """Whether the model is prepared for a device, or may be."""
        return self.prepare is not None or self.find(device) is not None

    def get(self, device: Device) -> ModelFolder:
        """The folder for a device, prepared first if need be; raises as exports do."""
        found = self.find(device)
        if found is None:
            assert self.prepare is not None
            found = self.prepare(device)
        return found

    def size(self, device: Device, others: Iterable[Device] = ()) -> ModelSize:
        """The size of the model as a device runs it; foreseen from another form, or from its source."""
        for each in (device, *others):
            if found := self.find(each):
                size = ModelSize(manifest=found.manifest, file_bytes=weights_bytes(found))
                return size if each == device else in_form(size, device.form)
        return self.foresee(device.form)


def in_form(size: ModelSize, form: Kind) -> ModelSize:
    """What another form of a model would be, roughly."""
    manifest = size.manifest
    if form == manifest.form:
        return size
    dtype = "float32" if form == "cpu" else "float16"
    other = replace(manifest, form=form, kv_cache=replace(manifest.kv_cache, dtype=dtype))
    if form != "npu":
        return ModelSize(manifest=other, file_bytes=size.file_bytes)
    num_weights = size.file_bytes / _BYTES_A_WEIGHT.get(manifest.precision, _BYTES_IN_BLOCKS)
    context_length = min(manifest.context_length, _NPU_CONTEXT)
    return ModelSize(manifest=_static(other, context_length), file_bytes=int(_NPU_BYTES * num_weights))


def _static(manifest: Manifest, context_length: int) -> Manifest:
    kv_cache = replace(manifest.kv_cache, form="static")
    return replace(manifest, context_length=context_length, tree_graph=None, kv_cache=kv_cache)
