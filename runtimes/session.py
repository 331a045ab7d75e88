"""Opens a graph on ONNX Runtime, and checks that it is the one that its manifest describes."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, TypedDict, Unpack

from edgespec.errors import DeviceUnavailable, EdgeSpecError, ManifestError, MemoryExhausted
from edgespec.manifest import Manifest
from edgespec.manifest.caches import NUM_SETTLED
from edgespec.runtimes import cuda
from edgespec.runtimes.device_rows import END_ROW, FIRST_ROW, with_chosen_rows
from edgespec.runtimes.devices import Device, import_onnxruntime, request_device
from edgespec.runtimes.driver_check import NO_HALF_FLOATS, adapter_problem
from edgespec.runtimes.memory_errors import is_memory_error
from edgespec.runtimes.node_placement import find_strays, read_node_placement, require_placement
from edgespec.runtimes.plugins import Missing, driver_fix
from edgespec.system.cancel import Cancel
from edgespec.system.context_managers import contextmanager
from edgespec.system.processes import environment_variable
from edgespec.system.system_info import physical_cores
from edgespec.system.threads import NO_THREAD

# A dimension is a number, or a word where any number has to be allowed, or _ANY where the graph may choose.
_Dimensions = Sequence[int | str | None]
_Values = dict[str, tuple[tuple[str, ...], _Dimensions]]  # name to the types that serve and the shape
_Opened = tuple[Any, Mapping[str, Any], Mapping[str, Any]]  # a session, its inputs and its outputs by name
_ANY = "any size"
HIDDEN_STATES = "hidden_states."  # and the number of a layer: the name of an output
_NO_FLASH_ATTENTION = "ORT_GQA_DISABLE_FLASH_ATTENTION"
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
_environment_lock = Lock()
_log = logging.getLogger(__name__)
RECURRENT_OPERATOR = "LinearAttention"
# What CUDA and WebGPU say of a GPU that another program holds, or that stays lost until the process ends.
_LOST = (
    "busy or unavailable", "unspecified launch failure", "illegal memory access", "driver shutting down",
    "device is lost", "device was lost",
)  # fmt: skip
_NUM_NAMED = 4  # differences named in a message; a wrong layer count alone makes dozens


class SessionOptions(TypedDict, total=False):
    """How to open a graph, and to run it."""

    num_threads: int | None  # threads of the host; by default all physical cores it may use
    shares_cores: bool  # another model uses these cores between passes
    cancel: Cancel | None  # ends the loading within milliseconds, or within a pass where a device is checked
    deterministic: bool  # rows are equal to the bit however tokens are cut into passes; for decoders alone
    hidden_layers: tuple[int, ...]  # layers whose hidden states a decoder keeps, for drafting heads
    has_flash_attention: bool  # attention on the CPU may go through the cache in tiles, as it does by default


def new_run_options(graph_id: int = -1) -> Any:
    """Options for a run, which CUDA records, or replays, where an id is given.

    There is an id in any case: before each run ONNX Runtime's Python asks for it, and where there is none an error
    in C++ says so, which takes 0.05 ms of a pass.
    """
    options = import_onnxruntime().RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph_id))
    return options


def open_session(graph: Path, manifest: Manifest, device: Device, **options: Unpack[SessionOptions]) -> _Opened:
    """An InferenceSession of a graph, with its inputs and its outputs by name.

    Raises:
        Cancelled: The loading was cancelled.
        DeviceUnavailable: The device does not run the graph, or not all of it that takes time.
        ManifestError: The graph does not load, or is not the one that the manifest describes.
        MemoryExhausted: The weights do not fit.
    """
    if manifest.kv_cache.recurrence:
        _require_operators(manifest, device)
    if device.name == "cpu":
        return _check_signature(graph, manifest, load_graph(graph, device, **options))
    _require_half_floats(manifest, device)
    opened = _check_signature(graph, manifest, _load_recording(graph, manifest, device, **options))
    placement = read_node_placement(opened[0])
    require_placement(placement, device, str(graph))
    if strays := find_strays(placement, device, manifest.kv_cache.num_layers):
        _log.warning("%s", strays)
    return opened


def _load_recording(graph: Path, manifest: Manifest, device: Device, **options: Unpack[SessionOptions]) -> Any:
    """The session of a graph as it runs fast, whose passes may be recorded where the device does that."""
    content = fast_model(graph, manifest, device)
    names = manifest.signature
    takes_length = names.attention_mask and names.num_logits_to_keep and not names.position_ids
    kv = manifest.kv_cache
    takes_length = takes_length and not (kv.convolutions or kv.recurrence)  # whose rows lie elsewhere in each pass
    if content and device.records_passes and takes_length:
        try:
            return load_graph(graph, cuda.recording(device), content, **options)
        except DeviceUnavailable as error:
            _log.warning("'%s' records no passes (CUDA graphs): %s", device.name, error)
    return load_graph(graph, device, content, **options)


def fast_model(graph: Path, manifest: Manifest, device: Device) -> bytes | None:
    """The model to open on a device in place of that of the file; None where the file's own serves."""
    if device.memory == "cpu" or manifest.form != "gpu" or manifest.head:
        return None
    found: bytes | None = with_chosen_rows(graph, manifest.signature, by_argmax=device.provider == cuda.PROVIDER)
    if found is None:
        _log.warning("%s ends in a way that '%s' may run slowly; export the model again", graph, device.name)
    return found


def _require_operators(manifest: Manifest, device: Device) -> None:
    """Raises DeviceUnavailable: This ONNX Runtime has no operator for the model's recurrent layers."""
    ort = import_onnxruntime()
    from onnxruntime.capi._pybind_state import get_all_operator_schema

    if not any(schema.name == RECURRENT_OPERATOR for schema in get_all_operator_schema()):
        raise DeviceUnavailable(
            f"{manifest.name} has recurrent layers, which need an ONNX Runtime with the operator "
            f"{RECURRENT_OPERATOR}, as 1.28 and newer ones have; this is {ort.__version__}: "
            "pip install -U onnxruntime",
            device=device.name,
        )


def _require_half_floats(manifest: Manifest, device: Device) -> None:
    """Raises DeviceUnavailable: NVIDIA's provider has no attention in the type of the model's cache."""
    if device.provider != cuda.PROVIDER or manifest.kv_cache.dtype == "float16":
        return
    if manifest.form == "gpu":
        fix = "export it in int4 or fp16; a model whose activations exceed fp16 (Gemma) runs with --device webgpu"
    else:
        fix = f"export it again with --device {device.name}"
    raise DeviceUnavailable(
        f"{manifest.name} has its KV cache in {manifest.kv_cache.dtype}, and attention on '{device.name}' takes "
        f"half floats only: {fix}, or use --device cpu",
        device=device.name,
    )


def load_graph(
    graph: Path, device: Device, content: bytes | None = None, **options: Unpack[SessionOptions]
) -> Any:
    """An InferenceSession of a graph whose signature is not checked; raises as open_session does.

    content: A graph made from that of the file, to load in its place; its weights lie beside the file.
    """
    ort, cancel = import_onnxruntime(), options.get("cancel") or Cancel()
    attention = nullcontext() if options.get("has_flash_attention", True) else without_flash_attention()
    gate = nullcontext() if device.name == "cpu" else cuda.opening(device)
    with session_settings(device, **options) as (settings, how), attention, gate:
        if content is not None:
            settings.add_session_config_entry(_WEIGHTS_FOLDER, os.fsencode(graph.parent))
        try:
            return ort.InferenceSession(content or _PathInBytes(graph), settings, **how)
        except Exception as error:  # ONNX Runtime has no common base of its own
            cancel.require_unset()
            raise _loading_error(error, graph, device) from error


class _PathInBytes:
    """A path as the system has it: ONNX Runtime takes no str of a path that Python cannot decode."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> bytes:
        return os.fsencode(self._path)


@contextmanager
def session_settings(device: Device, **options: Unpack[SessionOptions]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """SessionOptions to load or compile a graph within, and the other arguments of an InferenceSession."""
    ort, cancel = import_onnxruntime(), options.get("cancel") or Cancel()
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = device.host_threads or options.get("num_threads") or physical_cores()
    if options.get("shares_cores"):
        # Threads that spin on after a pass take a core from the other model: 67 → 135 tokens/s on two cores.
        settings.add_session_config_entry("session.force_spinning_stop", "1")
    settings.log_severity_level = 4  # what fails is raised; a log would repeat it
    how = request_device(settings, device)
    with cancel.on_set(partial(settings.set_load_cancellation_flag, True)):
        yield settings, how


@contextmanager
def without_flash_attention() -> Iterator[None]:
    """Sessions opened within the block run attention on the CPU without tiles.

    ONNX Runtime has a switch for that in the environment alone, which it reads as it opens a session. One that
    another thread opens meanwhile may lose its tiles as well, which costs it nothing but some time.
    """
    with _environment_lock, environment_variable(_NO_FLASH_ATTENTION, "1"):
        yield


def _loading_error(error: Exception, graph: Path, device: Device) -> EdgeSpecError:
    """The error for a graph that does not load: on the CPU it is at fault, elsewhere the device may be."""
    if device.name == "cpu":
        return translate_error(error, f"loading {graph}", ManifestError)
    if problem := adapter_problem(str(error)):
        return Missing(problem, driver_fix(device.name)).as_error(device.name)
    found = translate_error(error, f"loading {graph} on '{device.name}'")
    return found if isinstance(found, MemoryExhausted) else _device_refusal(found, device)


@contextmanager
def refuse_device(device: Device) -> Iterator[None]:
    """Raises DeviceUnavailable: The first pass of a model fails on the device."""
    try:
        yield
    except (DeviceUnavailable, MemoryExhausted):
        raise
    except EdgeSpecError as error:
        raise _device_refusal(error, device) from error


@contextmanager
def ends_with(cancel: Cancel, interrupt: Callable[[], None]) -> Iterator[None]:
    """Let a cancelled loading end the passes that are tried within the block.

    Raises Cancelled: The loading was cancelled, and a pass failed for it.
    """
    try:
        with cancel.on_set(interrupt):
            yield
    except EdgeSpecError:
        cancel.require_unset()
        raise


def _device_refusal(error: EdgeSpecError, device: Device) -> DeviceUnavailable:
    problem, fix = str(error), "use --device cpu"
    if NO_HALF_FLOATS in problem:
        fix = (
            "it has no half floats: export the model again with --precision fp32 (or name its source as "
            f"SOURCE:fp32), or {fix}"
        )
    return DeviceUnavailable(
        f"'{device.name}' does not run this model: {problem.rstrip('.')}; {fix}", device=device.name
    )


@contextmanager
def translate_errors(doing: str, *, of_memory_alone: bool = False) -> Iterator[None]:
    """Raises an error of edgespec's own for any that ONNX Runtime raises within the block."""
    try:
        yield
    except EdgeSpecError:
        raise
    except Exception as error:  # ONNX Runtime has no common base of its own
        if of_memory_alone and not is_memory_error(error):
            raise
        raise translate_error(error, doing) from error


# Raises MemoryExhausted: an array did not fit, of numpy's or of ONNX Runtime's.
translate_memory_errors = partial(translate_errors, of_memory_alone=True)


def translate_error(error: Exception, doing: str, kind: type[EdgeSpecError] = EdgeSpecError) -> EdgeSpecError:
    """An error of edgespec's own for one that ONNX Runtime raised."""
    if is_memory_error(error):
        return MemoryExhausted(f"out of memory while {doing}; close other programs or use a smaller model")
    if "pthread_create failed" in str(error):
        return MemoryExhausted(NO_THREAD)
    is_lost = any(words in str(error).lower() for words in _LOST)
    advice = (
        "; the GPU or its driver gave up, or another program holds it: try again, or use --device cpu" * is_lost
    )
    return kind(f"ONNX Runtime failed {doing}: {error}{advice}")


def _check_signature(graph: Path, manifest: Manifest, session: Any) -> _Opened:
    """The session with its inputs and its outputs. Raises ManifestError: They are not what the manifest says."""
    wanted_inputs, wanted_outputs = _expected_values(manifest)
    inputs = {value.name: value for value in session.get_inputs()}
    outputs = {value.name: value for value in session.get_outputs()}
    for bias in (manifest.signature.attention_bias, manifest.signature.local_attention_bias):
        if bias and bias in inputs:
            wanted_inputs[bias] = (("float",), (1, 1, "new", "total"))
    for row in {FIRST_ROW, END_ROW}.intersection(inputs):
        wanted_inputs[row] = (("int64",), (1,))
    differences = [f"{name} is not expected" for name in inputs if name not in wanted_inputs]
    differences += _differences(wanted_inputs, inputs) + _differences(wanted_outputs, outputs)
    if manifest.files and not differences:  # graphs of others name their dimensions as they like
        past, present = manifest.cache_names[0]
        # A shared buffer is one dimension in past and present; a growing cache is longer in present.
        form = "shared_buffer" if inputs[past].shape[2] == outputs[present].shape[2] else "growing"
        if form != (wanted := manifest.kv_cache.form):
            differences.append(f"its cache is {form}, wanted {wanted}")
        positions = session.get_modelmeta().custom_metadata_map.get("context_length", "")
        if positions and not (positions.isdecimal() and int(positions[:20]) >= manifest.context_length):
            least = manifest.context_length
            differences.append(f"it has {positions[:20]} positions, wanted a context_length of {least}")
        unstated = outputs.keys() - wanted_outputs.keys()
        differences += [f"{name} is not expected" for name in sorted(unstated) if name.startswith(HIDDEN_STATES)]
    require_same(graph, differences)
    return session, inputs, outputs


def require_same(graph: Path, differences: Sequence[str]) -> None:
    """Raises ManifestError: A graph differs from its manifest."""
    if differences:
        more = f" and {len(differences) - _NUM_NAMED} more" if len(differences) > _NUM_NAMED else ""
        raise ManifestError(
            f"{graph} is not what its manifest says: {'; '.join(differences[:_NUM_NAMED])}{more}; export it again"
        )


def _expected_values(manifest: Manifest) -> tuple[_Values, _Values]:
    kv, names = manifest.kv_cache, manifest.signature
    inputs: _Values = {names.input_ids: (("int64",), (1, "new"))}
    for name, shape in ((names.attention_mask, (1, "total")), (names.position_ids, (1, "new"))):
        if name:
            inputs[name] = (("int64",), shape)
    if names.num_logits_to_keep:
        inputs[names.num_logits_to_keep] = (("int64",), (1,))
    cache_type = {"float32": "float", "float16": "float16"}[kv.dtype]
    outputs: _Values = {names.logits: (("float", "float16"), (1, "rows", manifest.vocab_size))}
    if names.best:
        outputs[names.best] = (("float",), (1, "rows", 2))
    for layer, (num_heads, head_dim) in kv.heads.items():
        for past, present in names.caches([layer]):
            inputs[past] = ((cache_type,), (1, num_heads, "past", head_dim))
            outputs[present] = ((cache_type,), (1, num_heads, "total", head_dim))
    if rows := kv.convolutions:
        for past, present in rows.names:
            inputs[past] = ((cache_type,), (1, rows.num_before, rows.width))
            outputs[present] = ((cache_type,), (1, "new", rows.width))
    if states := kv.recurrence:
        inputs[NUM_SETTLED] = (("int64",), (1,))
        shapes = (1, *states.state_shape), (1, "rows", states.row_width)
        for at, (past, present) in enumerate(states.names):
            inputs[past] = outputs[present] = ((cache_type,), shapes[at % 2])
    if head := manifest.head:
        inputs["hidden"] = (("float",), (1, "new", head.state_size))
        outputs["state"] = (("float",), (1, "new", head.state_size))
    for layer in manifest.hidden_layers:
        outputs.setdefault(f"{HIDDEN_STATES}{layer}", (("float",), (1, "new", _ANY)))
    return inputs, outputs


def _differences(expected: _Values, found: Mapping[str, Any]) -> list[str]:
    differences = []
    for name, (types, shape) in expected.items():
        value = found.get(name)
        kind = value.type.removeprefix("tensor(").removesuffix(")") if value else ""
        if value and kind in types and _can_take(value.shape, shape):
            continue
        there = f"{kind} {_format_shape(value.shape)}" if value else "missing"
        differences.append(f"{name} is {there}, wanted {' or '.join(types)} {_format_shape(shape)}")
    return differences


def _can_take(found: _Dimensions, wanted: _Dimensions) -> bool:
    """True if a shape of the graph is free where the wanted one varies, and free or equal elsewhere."""
    return len(found) == len(wanted) and all(
        not isinstance(have, int) or want in (have, _ANY) for have, want in zip(found, wanted, strict=True)
    )


def _format_shape(shape: _Dimensions) -> str:
    return f"[{', '.join(map(str, shape))}]"
