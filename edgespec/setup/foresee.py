"""A model in forms that are not prepared, and its costs on a device, foreseen from its size and a probe.

Attention to a long text and the way of logits to the host are left out: a plan that rests on this tells which
placements are worth preparing and measuring, and no more.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from edgespec.draft.costs import PassCosts
from edgespec.manifest import Manifest
from edgespec.runtimes.device_names import Kind
from edgespec.runtimes.devices import Device
from edgespec.runtimes.probe import DeviceProbe
from edgespec.setup.open_model import ModelFolder, weights_bytes
from edgespec.setup.profile import DrafterProfile, Place, Profile, drafter_key

_NODES_A_LAYER = 11  # the exports of SmolLM2 have 333 nodes in 30 layers
_HELD = 128  # tokens before a pass, as where passes are measured
_WIDTHS = (1, 2, 4, 8, 16, 32)
# Two models on one device take turns; on two devices nothing is assumed.
_TAKE_TURNS, _APART = (2.0, 2.0), (1.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A model as it would be on a device. manifest: of one of its forms, or made up from its source."""

    manifest: Manifest
    file_bytes: int

    @property
    def num_nodes(self) -> int:
        return _NODES_A_LAYER * self.manifest.kv_cache.num_layers


def foresee_target(size: ModelSize, probe: DeviceProbe, form: str) -> Profile:
    """Costs of a target on the device of a probe, in the form that the device runs."""
    passes_s = _passes_s(size, probe, form)
    return Profile(passes_s={_HELD: passes_s}, prefill_s=passes_s[_WIDTHS[-1]] / _WIDTHS[-1])


def foresee_drafter(
    target: Profile, size: ModelSize, probe: DeviceProbe, form: str, place: Place, *, shares_device: bool
) -> Profile:
    """A target's profile with a drafter in a place; shares_device: they run on one device, and take turns."""
    passes_s = _passes_s(size, probe, form)
    drafter = DrafterProfile(
        step_s=passes_s[1],
        row_s=passes_s[_WIDTHS[-1]] / _WIDTHS[-1],
        branches={width: max(1.0, taken_s / passes_s[1]) for width, taken_s in passes_s.items()},
        slowed=_TAKE_TURNS if shares_device else _APART,
    )
    return Profile(
        passes_s=target.passes_s,
        prefill_s=target.prefill_s,
        transfer_s=target.transfer_s,
        drafters={**target.drafters, drafter_key(size.manifest.name, place): drafter},
    )


def _passes_s(size: ModelSize, probe: DeviceProbe, form: str) -> dict[int, float]:
    """Seconds of a pass by its width."""
    reading_s = size.file_bytes / probe.bytes_per_s
    beside_s = probe.start_s + size.num_nodes * probe.node_s
    if form == "npu":  # its graph takes one token at a time
        return {width: width * (reading_s + beside_s) for width in _WIDTHS}
    rows = PassCosts(dict(probe.rows))
    return {width: reading_s * rows.ratio(width) + beside_s for width in _WIDTHS}


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
        """True if the model is prepared for a device, or may be."""
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
    """The size of another form of a model, roughly."""
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
