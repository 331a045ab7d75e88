"""A graph opened on ONNX Runtime and found to be the one that its manifest describes.

Knows names, types and shapes; nothing of tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from edgespec.cancel import Cancel
from edgespec.errors import DeviceUnavailable, EdgeSpecError, ManifestError, MemoryExhausted
from edgespec.manifest import Manifest
from edgespec.runtimes.devices import Device, import_onnxruntime
from edgespec.runtimes.placement import expect_placed, placed_on, placement

# A dimension is a number, or a word where any number has to be allowed, or _ANY where the graph may choose.
_Dimensions = Sequence[int | str | None]
_ANY = "any size"
_HIDDEN = "hidden_states."
_NUM_NAMED = 4  # differences named in a message; a wrong layer count alone makes dozens


def open_session(
    graph: Path,
    manifest: Manifest,
    device: Device,
    num_threads: int,
    *,
    shares_cores: bool = False,
    cancel: Cancel | None = None,
) -> Any:
    """An InferenceSession of a graph; shares_cores says that another model runs by turns with it.

    Raises:
        Cancelled: It was given up, which takes effect within milliseconds.
        DeviceUnavailable: The device does not run it, or not all of it that takes time.
        ManifestError: The graph does not load, or is not the one that the manifest describes.
        MemoryExhausted: The weights do not fit.
    """
    session = load_graph(graph, device, num_threads, shares_cores, cancel or Cancel())
    _check_signature(graph, manifest, session)
    expect_placed(placement(session), device, str(graph))
    return session


def load_graph(graph: Path, device: Device, num_threads: int, shares_cores: bool, cancel: Cancel) -> Any:
    """An InferenceSession of any graph; raises as open_session does."""
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = device.host_threads or num_threads
    if shares_cores:
        # Threads that spin on after a pass take a core from the other model: 67 → 135 tokens/s on two cores.
        options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 4  # what fails is raised; a log would say it twice
    how = placed_on(options, device)
    with cancel.ending(partial(options.set_load_cancellation_flag, True)):
        try:
            return ort.InferenceSession(str(graph), options, **how)
        except Exception as error:  # ONNX Runtime has no common base of its own
            cancel.expect_unset()
            raise _refused(error, graph, device) from error


def _refused(error: Exception, graph: Path, device: Device) -> EdgeSpecError:
    """On the CPU it is the graph that is at fault; a device has kernels, compilers and drivers that may be."""
    if device.name == "cpu":
        return translated(error, f"loading {graph}", ManifestError)
    told = translated(error, f"loading {graph} on '{device.name}'")
    return told if isinstance(told, MemoryExhausted) else not_run(told, device)


def not_run(error: EdgeSpecError, device: Device) -> DeviceUnavailable:
    """What a device said of a graph that it does not load, or of its first pass, and what to do."""
    said, mend = str(error), "use --device cpu"
    if "requires f16" in said:  # words of the WebGPU provider
        mend = f"it has no half floats: export the model again with --precision fp32, or {mend}"
    return DeviceUnavailable(
        f"'{device.name}' does not run this model: {said.rstrip('.')}; {mend}", device=device.name
    )


@contextmanager
def telling_of_memory(doing: str) -> Iterator[None]:
    """Raises MemoryExhausted: an array did not fit."""
    try:
        yield
    except MemoryError as error:
        raise translated(error, doing) from error


def translated(error: Exception, doing: str, kind: type[EdgeSpecError] = EdgeSpecError) -> EdgeSpecError:
    """What ONNX Runtime raised, as an error of edgespec's own."""
    said = str(error)
    if isinstance(error, MemoryError) or "allocate memory" in said or "bad_alloc" in said:
        return MemoryExhausted(f"out of memory while {doing}; close other programs or use a smaller model")
    return kind(f"ONNX Runtime failed {doing}: {said}")


def _check_signature(graph: Path, manifest: Manifest, session: Any) -> None:
    inputs, outputs = _wanted(manifest)
    names = {value.name for value in session.get_inputs()}
    for bias in (manifest.signature.attention_bias, manifest.signature.local_attention_bias):
        if bias and bias in names:
            inputs[bias] = (("float",), (1, 1, "new", "total"))
    differing = [
        *_differences(inputs, session.get_inputs(), exhaustive=True),
        *_differences(outputs, session.get_outputs(), exhaustive=False),
    ]
    if manifest.files and not differing:  # graphs of others name their dimensions as they like
        differing += _cache_differences(manifest, session)
    if differing:
        more = f" and {len(differing) - _NUM_NAMED} more" if len(differing) > _NUM_NAMED else ""
        raise ManifestError(
            f"{graph} is not what its manifest says: {'; '.join(differing[:_NUM_NAMED])}{more}; export it again"
        )


_Values = dict[str, tuple[tuple[str, ...], _Dimensions]]  # name to the types that serve and the shape


def _wanted(manifest: Manifest) -> tuple[_Values, _Values]:
    """Inputs and outputs as the manifest has them."""
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
    for past, present in names.caches(kv.num_layers):
        inputs[past] = ((cache_type,), (1, kv.num_kv_heads, "past", kv.head_dim))
        outputs[present] = ((cache_type,), (1, kv.num_kv_heads, "total", kv.head_dim))
    for layer in manifest.hidden_layers:
        outputs.setdefault(f"{_HIDDEN}{layer}", (("float",), (1, "new", _ANY)))
    return inputs, outputs


def _cache_differences(manifest: Manifest, session: Any) -> list[str]:
    """Where the cache is not of its form, or hidden states are given that the manifest does not state.

    A shared buffer is one dimension in past and present; a growing cache is longer in present.
    """
    past, present = manifest.signature.caches(1)[0]
    shapes = {value.name: value.shape for value in (*session.get_inputs(), *session.get_outputs())}
    found = "shared_buffer" if shapes[past][2] == shapes[present][2] else "growing"
    said = [] if found == manifest.kv_cache.form else [f"its cache is {found}, wanted {manifest.kv_cache.form}"]
    positions = session.get_modelmeta().custom_metadata_map.get("context_length", "")
    if positions and not (positions.isdecimal() and int(positions[:20]) >= manifest.context_length):
        said.append(f"it has {positions[:20]} positions, wanted a context_length of {manifest.context_length}")
    stated = {f"{_HIDDEN}{layer}" for layer in manifest.hidden_layers}
    return said + [f"{name} is not expected" for name in shapes if name.startswith(_HIDDEN) and name not in stated]


def _differences(wanted: _Values, values: Sequence[Any], *, exhaustive: bool) -> list[str]:
    found = {value.name: value for value in values}
    said = [f"{name} is not expected" for name in found if name not in wanted] if exhaustive else []
    for name, (types, shape) in wanted.items():
        expected = f"{' or '.join(types)} {_written(shape)}"
        if name not in found:
            said.append(f"{name} is missing, wanted {expected}")
            continue
        value = found[name]
        kind = value.type.removeprefix("tensor(").removesuffix(")")
        if kind not in types or not _serves(value.shape, shape):
            said.append(f"{name} is {kind} {_written(value.shape)}, wanted {expected}")
    return said


def _serves(found: _Dimensions, wanted: _Dimensions) -> bool:
    """Whether a shape of the graph takes what is wanted: free where that varies, free or equal where not."""
    return len(found) == len(wanted) and all(
        not isinstance(have, int) or want in (have, _ANY) for have, want in zip(found, wanted, strict=True)
    )


def _written(shape: _Dimensions) -> str:
    return f"[{', '.join(str(dimension) for dimension in shape)}]"
