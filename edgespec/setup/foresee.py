"""A model in forms that are not prepared: its shape, its memory, and its costs on a device by size and a probe.

Attention to a long text and the way of logits to the host are left out: a plan that rests on this tells which
placements are worth preparing and measuring, and no more.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from edgespec.draft.costs import PassCosts
from edgespec.manifest import Manifest, Source
from edgespec.manifest.caches import KVCache
from edgespec.memory.estimate import BYTES_PER_WEIGHT, SOURCE_GROWTH, estimate_memory
from edgespec.memory.free_memory import RESERVE_BYTES
from edgespec.runtimes.device_names import Kind
from edgespec.runtimes.devices import Device, nvidia_bytes
from edgespec.runtimes.probe import DeviceProbe
from edgespec.setup.catalog import CATALOG, CatalogEntry, CatalogFile, Shape
from edgespec.setup.foreseen_export import are_read_at_once, prefers_half_floats
from edgespec.setup.home import ModelHome
from edgespec.setup.open_model import ModelFolder, weights_bytes
from edgespec.setup.profile import DrafterProfile, Place, Profile, drafter_key
from edgespec.setup.source_names import split_precision

_NODES_A_LAYER = 11  # the exports of SmolLM2 have 333 nodes in 30 layers
_HELD = 128  # tokens before a pass, as where passes are measured
_WIDTHS = (1, 2, 4, 8, 16, 32)
# Two models on one device take turns; on two devices nothing is assumed.
_TAKE_TURNS, _APART = (2.0, 2.0), (1.0, 1.0)


class ModelSize(NamedTuple):
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
    reading_s = (size.file_bytes - size.manifest.gathered_bytes) / probe.bytes_per_s
    beside_s = probe.start_s + size.num_nodes * probe.node_s
    if form == "npu":  # its graph takes one token at a time
        return {width: width * (reading_s + beside_s) for width in _WIDTHS}
    rows = PassCosts(dict(probe.rows))
    return {width: reading_s * rows.ratio(width) + beside_s for width in _WIDTHS}


# Bytes that a weight takes in a file, scales and all; blocks of four bits with a head of eight.
_BYTES_A_WEIGHT = {"fp32": 4.0, "fp16": 2.0, "int8": 1.1, "w8a16": 1.1}
_BYTES_IN_BLOCKS = 0.65
_EXPERT_BYTES = 0.625  # of a weight that is rounded to four bits, with a scale for each 32 and no minimum
_NPU_CONTEXT = 1024


@dataclass(frozen=True)
class ModelForms:
    """A model by the device that is to run it.

    find: A prepared folder, None where there is none. prepare: Exports one; None where the folders are all that
    there is. foresee: The size of the model on a device, by its source.
    """

    name: str
    find: Callable[[Device], ModelFolder | None]
    prepare: Callable[[Device], ModelFolder] | None
    foresee: Callable[[Device], ModelSize]

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
                is_named = split_precision(self.name)[1] is not None
                gpu_bytes = None if is_named or each == device else nvidia_bytes(device.name)
                return size if each == device else in_form(size, device.form, gpu_bytes)
        return self.foresee(device)


def in_form(size: ModelSize, form: Kind, gpu_bytes: int | None = None) -> ModelSize:
    """The size of another form of a model, roughly.

    gpu_bytes: The memory of the NVIDIA GPU that it is for, where nobody has named a precision.
    """
    manifest, file_bytes = size
    if form == manifest.form:
        return size
    is_float = manifest.precision in ("fp16", "fp32")
    is_float |= manifest.precision == "source" and manifest.source.format != "gguf"
    # What a source has beside half floats are blocks; safetensors without any have floats of four bytes.
    others = 4.0 if is_float and not manifest.half_bytes else _BYTES_IN_BLOCKS
    per_weight = _BYTES_A_WEIGHT.get(manifest.precision, others)
    half_bytes = manifest.half_bytes + int(2 * (file_bytes - manifest.half_bytes) / per_weight)
    if form == "npu":
        file_bytes = half_bytes
    elif form == "gpu" and gpu_bytes and not is_float and are_read_at_once(half_bytes, gpu_bytes):
        manifest, file_bytes = replace(manifest, precision="fp16"), half_bytes
    return ModelSize(_manifest_in_form(manifest, form), file_bytes)


def _manifest_in_form(manifest: Manifest, form: str) -> Manifest:
    """The manifest of another form of a model, as far as the shapes go."""
    kv_cache = replace(manifest.kv_cache, dtype="float32" if form == "cpu" else "float16")
    if form != "npu":
        return replace(manifest, form=form, kv_cache=kv_cache)
    return replace(
        manifest,
        form=form,
        kv_cache=replace(kv_cache, form="static"),
        context_length=min(manifest.context_length, _NPU_CONTEXT),
        tree_graph=None,
    )


def file_bytes(entry: CatalogEntry) -> int:
    """The most that the weights file takes in the precision of the entry."""
    if isinstance(entry.source, CatalogFile):
        return int(SOURCE_GROWTH * entry.source.bytes)
    return bytes_of_shape(entry.shape, entry.precision, has_minima=bool(entry.gguf))


def bytes_of_shape(shape: Shape, precision: str, *, has_minima: bool = False) -> int:
    """The most that weights of a shape take in a precision; embedding and head are never in 4 bits.

    has_minima: They come in 4 bits as a GGUF file has them. An export keeps experts with minima in 8 bits.
    """
    per_weight = BYTES_PER_WEIGHT[precision]
    vocabulary = max(per_weight, BYTES_PER_WEIGHT["int8"]) * shape.num_vocabulary_weights
    rotary_tables = 4 * shape.context_length * shape.head_dim
    experts = per_weight
    if precision == "int4":
        experts = BYTES_PER_WEIGHT["int8"] if has_minima else _EXPERT_BYTES
    matrices = per_weight * (shape.num_matrix_weights - shape.num_expert_weights)
    matrices += experts * shape.num_expert_weights
    return int(matrices + vocabulary) + rotary_tables + _gathered_bytes(shape, precision)


def _gathered_bytes(shape: Shape, precision: str) -> int:
    return int(max(BYTES_PER_WEIGHT[precision], BYTES_PER_WEIGHT["int8"]) * shape.num_gathered)


def memory_bytes(entry: CatalogEntry) -> int:
    """The memory that plain decoding of a catalogue model takes on the CPU with 2048 tokens, and the reserve."""
    return needed_bytes(*_from_catalog(entry.title, entry, entry.precision, "cpu"))


def needed_bytes(manifest: Manifest, file_bytes: int) -> int:
    """The memory that plain decoding of a prepared model takes on the CPU with 2048 tokens, and the reserve."""
    estimate = estimate_memory(manifest, file_bytes)
    needed = estimate.weights_bytes + estimate.kv_cache_bytes + estimate.states_bytes + estimate.workspace_bytes
    return needed + RESERVE_BYTES


def foresee_model(home: ModelHome, model: str, form: str, gpu_bytes: int | None = None) -> ModelSize:
    """The manifest of a model as its source gives it, and the bytes of the weights file.

    That of a catalogue model is made up, and only states shapes. Another source is fetched if need be.

    gpu_bytes: The memory of the NVIDIA GPU that it is for.

    Raises ModelError: The source is missing, damaged or unsupported.
    """
    name, asked = home.split_name(model)
    entry = CATALOG.get(name)
    precision = asked or ("fp16" if form == "npu" else entry.precision if entry else "source")
    gpu_bytes = gpu_bytes if form == "gpu" and asked is None else None
    if entry:
        if gpu_bytes and are_read_at_once(bytes_of_shape(entry.shape, "fp16"), gpu_bytes):
            precision = "fp16"
        return _from_catalog(name, entry, precision, form)
    path = Path(name).expanduser()
    source = path if path.exists() else home.locate(name).path
    if gpu_bytes and prefers_half_floats(source, precision, source.parent, gpu_bytes, lambda line: None):
        precision = "fp16"
    return _from_source(source, path.name, precision, form)


def _from_catalog(name: str, entry: CatalogEntry, precision: str, form: str) -> ModelSize:
    shape = entry.shape
    is_usual = precision in ("source", entry.precision)
    num_bytes = file_bytes(entry) if is_usual else bytes_of_shape(shape, precision)
    num_layers, num_cached = shape.num_layers, shape.num_cached_layers or shape.num_layers
    kv_cache = KVCache(
        num_layers=num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        # Those without keys and values of their own, of whatever kind, evenly among the others.
        sharing_layers=tuple(
            i for i in range(num_layers) if i * num_cached // num_layers == (i + 1) * num_cached // num_layers
        ),
    )
    manifest = Manifest(
        name=name,
        architecture="",
        precision=precision,
        context_length=shape.context_length,
        kv_cache=kv_cache,
        vocab_size=shape.vocab_size,
        vocab_sha256="",
        bos_token_id=None,
        eos_token_ids=(),
        add_bos=False,
        source=Source(name=name, format="", sha256=""),
        tree_graph="model_tree.onnx",
        gathered_bytes=_gathered_bytes(shape, precision) if shape.num_gathered else 0,
    )
    return ModelSize(_manifest_in_form(manifest, form), num_bytes)


def _from_source(source: Path, name: str, precision: str, form: str) -> ModelSize:
    from edgespec.export.layout import lay_out  # 0.3 s, and only a first use needs it
    from edgespec.export.options import ExportOptions
    from edgespec.export.plan import plan_model

    planned = plan_model(source, ExportOptions(precision=precision, form=form))
    manifest = lay_out(name, planned.loaded, planned.rule, planned.options)
    return ModelSize(manifest, planned.cost.write_bytes)
