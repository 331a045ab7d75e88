"""A GPU of NVIDIA's in imitation: ONNX Runtime's CPU provider computes, and memory is counted as an arena does.

Weights are taken when a session opens. Arrays are taken and given back to the arena, which keeps them until a pass
is told to shrink it or the session is closed. A session may record passes as CUDA graphs: a replay
reads what the host gave to the first run, and arrays at the addresses of that time; its workspace may be others'
by then. A test sets how much there is, and makes opening, arrays, passes and recordings fail in words that a real
one says.
"""

import ctypes
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from fake_nvml import install_driver

from edgespec.memory.device_memory import Nvidia, NvidiaGpu
from edgespec.runtimes import cuda, pass_shapes
from edgespec.runtimes.cuda import GATE
from edgespec.simulation.machines import find_machine

WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
SHRINK = "memory.enable_memory_arena_shrinkage"
ARENA = (
    "/onnxruntime_src/onnxruntime/core/framework/bfc_arena.cc:360 void* onnxruntime::BFCArena::AllocateRawInternal"
    "(size_t, bool, onnxruntime::Stream*) Available memory of {} is smaller than requested bytes of {}"
)
KERNEL = "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running MatMulNBits node: "

_Graph = os.PathLike[bytes] | bytes  # a file, or its content


class FakeGpu:
    """limit: bytes of its memory. loads, arrays, passes, recordings: what each next one says; None lets it be."""

    def __init__(self, limit: int = 24 << 30) -> None:
        self.limit = limit
        self.loads: Iterator[str | None] = iter(())
        self.arrays: Iterator[str | None] = iter(())
        self.passes: Iterator[str | None] = iter(())
        self.recordings: Iterator[str | None] = iter(())
        self.replay_error = 0.0  # added to an output of replays
        self.replay_output = "logits"
        # The width of a pass and the place of a token in it → times what its keys and values are.
        self.rounding: Callable[[int, int], float] | None = None
        self.num_recorded = self.num_replayed = 0
        self.arenas: list[Counter[int]] = []  # of each session, by size: how often what it has let go was taken
        self.used = 0
        self.num_shrunk = 0
        self.copied_bytes = 0  # to the host, of arrays that stay on the device
        self.devices: list[int] = []  # of the sessions, by index
        self.options: list[dict[str, str]] = []
        self.widths: list[int] = []  # of passes

    @property
    def kept(self) -> int:
        return sum(size * num for arena in self.arenas for size, num in arena.items())

    @property
    def free(self) -> int:
        return self.limit - self.used - self.kept

    def open(self, graph: _Graph, settings: Any, **how: Any) -> Any:
        provider, *options = how.get("providers", [("", {})])[0]
        if provider != cuda.PROVIDER:
            return onnxruntime.InferenceSession(graph, settings, **how)
        assert GATE._num_openings, "a session is opened beside a recording"
        if said := next(self.loads, None):
            raise RuntimeError(said)
        self.options.append(options[0])
        self.devices.append(int(options[0].get("device_id", 0)))
        return _Session(self, graph, settings, options[0])

    def take(self, num_bytes: int, arena: Counter[int]) -> None:
        if arena[num_bytes]:
            arena[num_bytes] -= 1
        elif num_bytes > self.free:
            raise RuntimeError(ARENA.format(self.free, num_bytes))
        self.used += num_bytes

    def release(self, num_bytes: int, arena: Counter[int]) -> None:
        self.used -= num_bytes
        arena[num_bytes] += 1

    # What a driver tells of it.
    name, total, uuid, is_lost = "NVIDIA Imitation", 24 << 30, "", False


def _is_within_gate() -> bool:
    return bool(GATE._num_passes or GATE._is_recording)


class _Session:
    def __init__(self, gpu: FakeGpu, graph: _Graph, settings: Any, options: dict[str, str]) -> None:
        self._gpu, self._options = gpu, options
        self._records = options.get(cuda.GRAPHS) == "1"
        self._thread: int | None = None
        self._recorded: dict[str, _Recording] = {}
        self.taken: list[weakref.ref[_Value]] = []  # in the order of their making
        self.num_shrunk = 0
        self._arena: Counter[int] = Counter()
        gpu.arenas.append(self._arena)
        weights = _weights_bytes(graph, settings)
        gpu.take(weights, self._arena)
        self._real = onnxruntime.InferenceSession(graph, settings, providers=["CPUExecutionProvider"])
        weakref.finalize(self, self._close, gpu, self._arena, weights)

    @staticmethod
    def _close(gpu: FakeGpu, arena: Counter[int], weights: int) -> None:
        gpu.used -= weights
        gpu.arenas = [each for each in gpu.arenas if each is not arena]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_ortvalue_from_shape_and_type(self, shape: Any, kind: Any, memory: str, index: int) -> "_Value":
        assert memory == "cuda"
        assert _is_within_gate(), "an array is taken beside a recording"
        if said := next(self._gpu.arrays, None):
            raise RuntimeError(said)
        value = _Value(self, self._gpu, self._arena, shape, kind)
        self.taken.append(weakref.ref(value))
        return value

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        return {cuda.PROVIDER: self._options}

    def get_provider_graph_assignment_info(self) -> list[Any]:
        return [
            SimpleNamespace(ep_name=cuda.PROVIDER, get_nodes=each.get_nodes)
            for each in self._real.get_provider_graph_assignment_info()
        ]

    def io_binding(self) -> "_Binding":
        return _Binding(self._real.io_binding())

    def run_with_iobinding(self, binding: "_Binding", options: Any = None) -> None:
        assert _is_within_gate(), "a pass runs beside a recording"
        if said := next(self._gpu.passes, None):
            raise RuntimeError(said)
        if self._records:
            # Each thread has recordings and handles of its own, which stay until the session is closed.
            self._thread = self._thread or get_ident()
            assert self._thread == get_ident(), "passes of a session that records run in one thread"
            if options.graph_id != "-1":
                self._run_recorded(binding, options)
                return
        if binding.width is not None:
            self._gpu.widths.append(binding.width)
        shrinks = options is not None and options.shrinks is not None
        self._real.run_with_iobinding(binding.real, None if shrinks else options)
        if self._gpu.rounding and binding.width:
            binding.round(self._gpu.rounding, binding.width)
        if shrinks:
            self._gpu.num_shrunk += 1
            self.num_shrunk += 1
            self._arena.clear()

    def _run_recorded(self, binding: "_Binding", options: Any) -> None:
        """The first run with an id records; others ignore what they are given and do what was recorded."""
        assert options.shrinks is None, "the workspace of a recording is given back"
        if options.graph_id not in self._recorded:
            if said := next(self._gpu.recordings, None):
                raise RuntimeError(said)
            self._gpu.num_recorded += 1
            assert binding.width
            assert not GATE._num_passes, "a pass runs beside a recording"
            self._gpu.widths.append(binding.width)
            self._recorded[options.graph_id] = _Recording(self, self._real.io_binding(), binding)
        else:
            self._gpu.num_replayed += 1
        self._recorded[options.graph_id].run(self._gpu.replay_output, self._gpu.replay_error)


def _weights_bytes(graph: _Graph, settings: Any) -> int:
    """Bytes of the weights files beside a graph; 0 for a graph that refers to none."""
    if not isinstance(graph, bytes):
        folder = Path(os.fsdecode(graph)).parent
    elif any(each.external_data for each in onnx.load_from_string(graph).graph.initializer):
        folder = Path(settings.get_session_config_entry(WEIGHTS_FOLDER))
    else:
        return 0
    return sum(path.stat().st_size for path in folder.glob("*.data"))


class _Recording:
    """A pass as it was when it was recorded."""

    def __init__(self, session: _Session, real: Any, binding: "_Binding") -> None:
        self._session, self._real_session, self._real = weakref.ref(session), session._real, real
        self._num_taken, self._num_shrunk = len(session.taken), session.num_shrunk
        self._values = [weakref.ref(value) for value in binding.values.values()]
        self._outputs: list[Any] = []
        for (is_input, name), value in binding.values.items():
            bind = real.bind_ortvalue_input if is_input else real.bind_ortvalue_output
            bind(name, value.real)
            if not is_input:
                self._outputs.append((name, value.real))
        for name, address in binding.host.items():
            real.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(address.copy(), "cpu"))
        for name in binding.unfixed:  # written where nobody looks
            real.bind_output(name, "cpu")

    def run(self, output: str, error: float) -> None:
        session = self._session()
        assert session is not None
        if session.num_shrunk != self._num_shrunk or None in [value() for value in self._values]:
            raise RuntimeError("CUDA failure 700: an illegal memory access was encountered")
        for each in session.taken[self._num_taken :]:  # may lie in the workspace of the recording
            if (value := each()) is not None:
                value.spoil()
        self._real_session.run_with_iobinding(self._real)
        for name, real in self._outputs:
            if error and name == output:
                noise = np.random.default_rng(0).normal(0, error, real.shape())
                real.update_inplace((real.numpy() + noise).astype(real.numpy().dtype))


class _Value:
    """An array that numpy sees copies of."""

    def __init__(self, session: _Session, gpu: FakeGpu, arena: Counter[int], shape: Any, kind: Any) -> None:
        self._session = session  # as ONNX Runtime's own keeps it
        num_bytes = int(np.prod(shape)) * np.dtype(kind).itemsize
        gpu.take(num_bytes, arena)
        weakref.finalize(self, gpu.release, num_bytes, arena)
        self.real = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, kind), "cpu")
        self.spoil()

    def spoil(self) -> None:
        """Hold what was in memory before, or what another writes there."""
        held = self.real.numpy()
        self.real.update_inplace(np.full_like(held, np.nan if held.dtype.kind == "f" else -1))

    def shape(self) -> Any:
        return self.real.shape()

    def numpy(self) -> Any:
        found = self.real.numpy().copy()
        self._session._gpu.copied_bytes += found.nbytes
        return found

    def update_inplace(self, array: Any) -> None:
        self.real.update_inplace(array)


class _Binding:
    width: int | None = None  # of a pass

    def __init__(self, real: Any) -> None:
        self.real = real
        self.values: dict[tuple[bool, str], _Value] = {}  # by whether they are inputs, and by name
        self.host: dict[str, Any] = {}  # inputs in the host's memory
        self.unfixed: set[str] = set()  # outputs without an array of the device that stays

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def round(self, rounding: Callable[[int, int], float], width: int) -> None:
        """Change keys and values of the last pass, as kernels do that are chosen by the width.

        Those of the last layer alone: of others rows of this pass itself would depend.
        """
        stop = self.host["attention_mask"].shape[1]
        factors = np.array([rounding(width, place) for place in range(width)], np.float16)[:, None]
        layers = {name: int(name.split(".")[1]) for _, name in self.values if name.startswith("present")}
        for name in (name for name, layer in layers.items() if layer == max(layers.values())):
            self.values[False, name].real.numpy()[:, :, stop - width : stop] *= factors

    def bind_input(self, name: str, memory: str, index: int, kind: Any, shape: Any, address: int) -> None:
        if name == "input_ids":
            self.width = shape[1]
        self.values.pop((True, name), None)
        num_bytes = int(np.prod(shape)) * np.dtype(kind).itemsize
        memory_there = (ctypes.c_char * num_bytes).from_address(address)
        self.host[name] = np.frombuffer(memory_there, kind).reshape(shape)
        self.real.bind_input(name, memory, index, kind, shape, address)

    def bind_ortvalue_input(self, name: str, value: _Value) -> None:
        self.values[True, name] = value
        self.host.pop(name, None)
        if name == "input_ids":
            self.width = value.shape()[1]
        self.real.bind_ortvalue_input(name, value.real)

    def bind_ortvalue_output(self, name: str, value: _Value) -> None:
        self.values[False, name] = value
        self.real.bind_ortvalue_output(name, value.real)

    def bind_output(self, name: str, memory: str, *where: Any) -> None:
        self.unfixed.add(name)
        self.real.bind_output(name, "cpu", *where)

    def clear_binding_inputs(self) -> None:
        self.values = {key: value for key, value in self.values.items() if not key[0]}
        self.host.clear()
        self.real.clear_binding_inputs()

    def clear_binding_outputs(self) -> None:
        self.values = {key: value for key, value in self.values.items() if key[0]}
        self.unfixed.clear()
        self.real.clear_binding_outputs()


class _RunOptions(onnxruntime.RunOptions):  # type: ignore[misc]
    shrinks: str | None = None
    graph_id = "0"

    def add_run_config_entry(self, key: str, value: str) -> None:
        assert key in (SHRINK, "gpu_graph_id")
        if key == SHRINK:
            self.shrinks = value
        else:
            self.graph_id = value


H100 = find_machine("h100").card
assert H100
PASSES_MS = H100.forms["SmolLM2 fp16"].passes_ms  # milliseconds of a pass by width
INT4_MS = H100.forms["1.5B int4"].passes_ms  # where one row costs less than four


def install(
    patch: pytest.MonkeyPatch, *gpus: FakeGpu, passes_ms: Mapping[int, float] | None = PASSES_MS
) -> FakeGpu:
    """Let edgespec find these GPUs; the first holds all sessions.

    Args:
        passes_ms: What passes count as taking by their width; None for GPUs so slow that passes are not padded.
    """
    seconds_of = (lambda width, num_rows: passes_ms[width] / 1e3) if passes_ms else (lambda width, num_rows: 1.0)
    for name in ("choose_shapes", "choose_same_shapes", "same_cost"):
        choose = partial(getattr(pass_shapes, name), seconds_of)
        patch.setattr(f"edgespec.runtimes.device_trial.{name}", lambda measured, *how, choose=choose: choose(*how))
    runtime = SimpleNamespace(
        SessionOptions=onnxruntime.SessionOptions,
        InferenceSession=gpus[0].open,
        RunOptions=_RunOptions,
        OrtValue=onnxruntime.OrtValue,
    )
    for module in ("session", "passes"):
        patch.setattr(f"edgespec.runtimes.{module}.import_onnxruntime", lambda: runtime)
    driver = Nvidia("580.65.06", (13, 0), tuple(NvidiaGpu(gpu.name, gpu.total, gpu.free) for gpu in gpus))
    patch.setattr("edgespec.runtimes.devices.read_nvidia_driver", lambda: driver)
    patch.setattr("edgespec.runtimes.devices.cuda.find_missing", lambda *about: None)
    install_driver(patch, *gpus)  # type: ignore[arg-type]
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return gpus[0]
