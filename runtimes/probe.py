"""A short probe of a device: small graphs of a model's kind of matrices, run some times; saved in the model home.

It tells how fast a model would run before one is prepared for the device. A pass reads 64 MB of weights, more than
most caches hold, or 10 MB where that takes long already.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta

from edgespec.errors import DeviceUnavailable, EdgeSpecError
from edgespec.runtimes.devices import Device, import_onnxruntime
from edgespec.runtimes.node_placement import read_node_placement, require_placement
from edgespec.runtimes.session import refuse_device, session_settings, translate_errors
from edgespec.system.typed_json import RecordFile

FILE_NAME = "devices.json"

_Rate = Annotated[float, Meta(gt=0, le=1e15)]
_Seconds = Annotated[float, Meta(ge=0.0, le=1e3)]
_Factor = Annotated[float, Meta(ge=1.0, le=1e3)]
_Rows = Annotated[int, Meta(ge=1, le=1 << 12)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProbe:
    """The cost of passes over matrices of a model's kind on a device.

    bytes_per_s: weights that a pass over one token reads.
    node_s: for each node of a graph, beside its weights.
    start_s: for each pass, however small.
    rows: time of a pass over several tokens over one of a single token, by their number; 1 has 1.
    """

    bytes_per_s: _Rate
    node_s: _Seconds
    start_s: _Seconds
    rows: Mapping[_Rows, _Factor] = field(default_factory=lambda: {1: 1.0})

    def __post_init__(self) -> None:
        if self.rows.get(1) != 1.0:
            raise ValueError("rows without a pass of a single token")


def read_probes(home: Path) -> dict[str, DeviceProbe]:
    """Probes by the key of a device; none where there is no file, or one that cannot be used: probing is short."""
    return _probes(home).read()


def write_probe(home: Path, key: str, probe: DeviceProbe) -> None:
    """Save a probe; those of devices that were probed longest ago go first where there are many.

    Raises OSError: The home cannot be written.
    """
    home.mkdir(parents=True, exist_ok=True)
    _probes(home).write(key, probe)


def _probes(home: Path) -> RecordFile[DeviceProbe]:
    return RecordFile(home / FILE_NAME, dict[str, DeviceProbe], "probes", version=1, most=64)


_SIZE, _SMALL = 2048, 64  # columns and rows of a matrix that is read, and of one that only has to be started
_BLOCK = 32  # weights that share a scale, as exports have them
_FEW_BYTES, _MANY_BYTES = 10 << 20, 64 << 20  # of all matrices together
_NUM_STARTED = 33  # nodes of the graph that shows what starting a node takes
_ROWS = (2, 4, 8)
_SLOW_S = 0.01  # a pass over a few matrices that takes longer than this shows enough
_RUNS, _RUNS_S = (2, 6), 0.2  # of each pass: at least, at most, and no more once they have taken so long


class _Kind(NamedTuple):
    """bits: of a weight in blocks, with a scale each; None for matrices of floats."""

    dtype: Any
    bits: int | None

    @property
    def matrix_bytes(self) -> int:
        item_bytes = int(np.dtype(self.dtype).itemsize)
        if self.bits is None:
            return _SIZE * _SIZE * item_bytes
        return _SIZE * _SIZE // _BLOCK * (_BLOCK * self.bits // 8 + item_bytes)


# What the graph of a form is made of; the first kind that the device runs is probed.
_KINDS = {
    "cpu": (_Kind(np.float32, 4),),
    "gpu": (_Kind(np.float16, 4), _Kind(np.float32, 4)),
    "npu": (_Kind(np.float16, None), _Kind(np.float32, None)),
}


def probe_device(device: Device, form: str, num_threads: int | None = None) -> DeviceProbe:
    """Measure a device on the kind of graph that the form of a model has, in well under a second as a rule.

    Raises DeviceUnavailable: It runs no such graph.
    """
    *others, last = _KINDS[form]
    for kind in others:
        try:
            return _probe(device, kind, form, num_threads)
        except DeviceUnavailable:
            continue
    return _probe(device, last, form, num_threads)


def _probe(device: Device, kind: _Kind, form: str, num_threads: int | None) -> DeviceProbe:
    open_chain = partial(_Chain, device, kind, num_threads=num_threads)
    start_s = _fastest_s(partial(open_chain(1, _SMALL).run, 1))
    node_s = max(0.0, _fastest_s(partial(open_chain(_NUM_STARTED, _SMALL).run, 1)) - start_s) / (_NUM_STARTED - 1)
    for wanted_bytes in (_FEW_BYTES, _MANY_BYTES):
        chain = open_chain(-(-wanted_bytes // kind.matrix_bytes), _SIZE)
        if (step_s := _fastest_s(partial(chain.run, 1))) > _SLOW_S:
            break
    # A graph of an NPU takes one token, or a whole block of a prompt.
    widths = () if form == "npu" else _ROWS
    rows = {width: max(1.0, _fastest_s(partial(chain.run, width)) / step_s) for width in widths}
    reading_s = max(step_s - start_s - node_s * chain.num_matrices, 0.1 * step_s)
    return DeviceProbe(
        bytes_per_s=chain.num_bytes / reading_s, node_s=node_s, start_s=start_s, rows={1: 1.0, **rows}
    )


def _fastest_s(run: Callable[[], object]) -> float:
    run()  # kernels are compiled and buffers made
    taken_s: list[float] = []
    least, most = _RUNS
    while len(taken_s) < least or (len(taken_s) < most and sum(taken_s) < _RUNS_S):
        started = perf_counter()
        run()
        taken_s.append(perf_counter() - started)
    return min(taken_s)


class _Chain:
    """A graph that multiplies its input by one square matrix after another, on a device."""

    def __init__(
        self, device: Device, kind: _Kind, num_matrices: int, size: int, *, num_threads: int | None
    ) -> None:
        """Raises DeviceUnavailable: The device does not run it."""
        graph, self.num_bytes = _chain_graph(kind, num_matrices, size)
        self.num_matrices = num_matrices
        self._size, self._dtype, self._device = size, kind.dtype, device
        with (
            refuse_device(device),
            translate_errors(f"opening a probe on '{device.name}'"),
            session_settings(device, num_threads=num_threads) as (settings, how),
        ):
            self._session = import_onnxruntime().InferenceSession(graph, settings, **how)
        require_placement(read_node_placement(self._session), device, "the probe")

    def run(self, num_rows: int) -> None:
        x = np.full((1, num_rows, self._size), 1 / self._size, self._dtype)
        with refuse_device(self._device):
            with translate_errors(f"running a probe on '{self._device.name}'"):
                (y,) = self._session.run(None, {"x": x})
            if not np.isfinite(y).all():
                raise EdgeSpecError(f"a probe on '{self._device.name}' gives values that are not finite")


def _chain_graph(kind: _Kind, num_matrices: int, size: int) -> tuple[bytes, int]:
    """A model as bytes, and the bytes of its matrices."""
    from onnx import helper, numpy_helper  # 0.15 s, and only a machine with an accelerator needs it

    element = helper.np_dtype_to_tensor_dtype(np.dtype(kind.dtype))
    operator, attributes = "MatMul", dict[str, Any]()
    if kind.bits is not None:
        operator, blocks = "MatMulNBits", {"K": size, "N": size, "bits": kind.bits, "block_size": _BLOCK}
        attributes = {"domain": "com.microsoft", "accuracy_level": 4, **blocks}
    nodes, weights, value = [], [], "x"
    for i in range(num_matrices):
        arrays = _matrix(kind, size)
        names = [f"{name}.{i}" for name in arrays]
        weights += [
            numpy_helper.from_array(array, name) for array, name in zip(arrays.values(), names, strict=True)
        ]
        result = "y" if i == num_matrices - 1 else f"y.{i}"
        nodes.append(helper.make_node(operator, [value, *names], [result], **attributes))
        value = result
    shape: list[str | int | None] = [1, "rows", size]
    graph = helper.make_graph(
        nodes,
        "probe",
        [helper.make_tensor_value_info("x", element, shape)],
        [helper.make_tensor_value_info("y", element, shape)],
        weights,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return model.SerializeToString(), sum(len(weight.raw_data) for weight in weights)


def _matrix(kind: _Kind, size: int) -> dict[str, Any]:
    """Arrays of a matrix that hardly changes the size of a vector; its values are of no account."""
    if kind.bits is None:
        return {"weight": np.full((size, size), 1 / size, kind.dtype)}
    num_blocks = size // _BLOCK
    levels = np.full((size, num_blocks, _BLOCK * kind.bits // 8), 0x79, np.uint8)  # -1 and 1 of a zero point of 8
    return {"levels": levels, "scales": np.full((size, num_blocks), 1 / size, kind.dtype)}
