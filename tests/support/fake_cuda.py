"""A GPU of NVIDIA's in imitation: ONNX Runtime's CPU provider computes, and memory is counted as an arena does.

Weights are taken when a session opens. Arrays are taken and given back to the arena, which keeps them until a pass
is told to shrink it or the session is closed. A test sets how much there is, and makes opening, arrays and passes
fail in words that a real one says.
"""

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from fake_nvml import FakeNvml

from edgespec.memory.device_memory import DRIVERS, Nvidia, NvidiaGpu
from edgespec.runtimes import cuda
from edgespec.runtimes.pass_shapes import choose_shapes

WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
SHRINK = "memory.enable_memory_arena_shrinkage"
ARENA = (
    "/onnxruntime_src/onnxruntime/core/framework/bfc_arena.cc:360 void* onnxruntime::BFCArena::AllocateRawInternal"
    "(size_t, bool, onnxruntime::Stream*) Available memory of {} is smaller than requested bytes of {}"
)
KERNEL = "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running MatMulNBits node: "


class FakeGpu:
    """limit: bytes of its memory. loads, arrays, passes: what each next one of these says; None lets it be."""

    def __init__(self, limit: int = 24 << 30) -> None:
        self.limit = limit
        self.loads: Iterator[str | None] = iter(())
        self.arrays: Iterator[str | None] = iter(())
        self.passes: Iterator[str | None] = iter(())
        self.arenas: list[Counter[int]] = []  # of each session, by size: how often what it has let go was taken
        self.used = 0
        self.num_shrunk = 0
        self.devices: list[int] = []  # of the sessions, by index
        self.options: list[dict[str, str]] = []
        self.widths: list[int] = []  # of passes

    @property
    def kept(self) -> int:
        return sum(size * num for arena in self.arenas for size, num in arena.items())

    @property
    def free(self) -> int:
        return self.limit - self.used - self.kept

    def open(self, graph: str | bytes, settings: Any, **how: Any) -> Any:
        provider, *options = how.get("providers", [("", {})])[0]
        if provider != cuda.PROVIDER:
            return onnxruntime.InferenceSession(graph, settings, **how)
        if said := next(self.loads, None):
            raise RuntimeError(said)
        self.options.append(options[0])
        self.devices.append(int(options[0].get("device_id", 0)))
        return _Session(self, graph, settings)

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


class _Session:
    def __init__(self, gpu: FakeGpu, graph: str | bytes, settings: Any) -> None:
        self._gpu = gpu
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
        if said := next(self._gpu.arrays, None):
            raise RuntimeError(said)
        return _Value(self, self._gpu, self._arena, shape, kind)

    def get_provider_graph_assignment_info(self) -> list[Any]:
        return [
            SimpleNamespace(ep_name=cuda.PROVIDER, get_nodes=each.get_nodes)
            for each in self._real.get_provider_graph_assignment_info()
        ]

    def io_binding(self) -> "_Binding":
        return _Binding(self._real.io_binding())

    def run_with_iobinding(self, binding: "_Binding", options: Any = None) -> None:
        if said := next(self._gpu.passes, None):
            raise RuntimeError(said)
        if binding.width is not None:
            self._gpu.widths.append(binding.width)
        shrinks = options is not None and options.shrinks is not None
        self._real.run_with_iobinding(binding.real, None if shrinks else options)
        if shrinks:
            self._gpu.num_shrunk += 1
            self._arena.clear()


def _weights_bytes(graph: str | bytes, settings: Any) -> int:
    """Of the files beside a graph; none of a graph of nodes that choose alone."""
    if isinstance(graph, str):
        folder = Path(graph).parent
    elif any(each.external_data for each in onnx.load_from_string(graph).graph.initializer):
        folder = Path(settings.get_session_config_entry(WEIGHTS_FOLDER))
    else:
        return 0
    return sum(path.stat().st_size for path in folder.glob("*.data"))


class _Value:
    """An array that numpy sees copies of."""

    def __init__(self, session: _Session, gpu: FakeGpu, arena: Counter[int], shape: Any, kind: Any) -> None:
        self._session = session  # as ONNX Runtime's own keeps it
        num_bytes = int(np.prod(shape)) * np.dtype(kind).itemsize
        gpu.take(num_bytes, arena)
        weakref.finalize(self, gpu.release, num_bytes, arena)
        self.real = onnxruntime.OrtValue.ortvalue_from_numpy(np.full(shape, np.nan, kind), "cpu")

    def shape(self) -> Any:
        return self.real.shape()

    def numpy(self) -> Any:
        return self.real.numpy().copy()

    def update_inplace(self, array: Any) -> None:
        self.real.update_inplace(array)


class _Binding:
    width: int | None = None  # of a pass

    def __init__(self, real: Any) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def bind_input(self, name: str, memory: str, index: int, kind: Any, shape: Any, address: int) -> None:
        if name == "input_ids":
            self.width = shape[1]
        self.real.bind_input(name, memory, index, kind, shape, address)

    def bind_ortvalue_input(self, name: str, value: _Value) -> None:
        self.real.bind_ortvalue_input(name, value.real)

    def bind_ortvalue_output(self, name: str, value: _Value) -> None:
        self.real.bind_ortvalue_output(name, value.real)

    def bind_output(self, name: str, memory: str, *where: Any) -> None:
        self.real.bind_output(name, "cpu", *where)


class _RunOptions(onnxruntime.RunOptions):  # type: ignore[misc]
    shrinks: str | None = None

    def add_run_config_entry(self, key: str, value: str) -> None:
        assert key == SHRINK
        self.shrinks = value


# Milliseconds of a pass by width: SmolLM2 in fp16 on an H100 (docs/log/devices.md), wider ones assumed.
PASSES_MS = {1: 2.75, 2: 2.80, 4: 2.77, 8: 2.80, 16: 2.91, 32: 3.0, 64: 3.1, 256: 4.0}


def install(
    patch: pytest.MonkeyPatch, *gpus: FakeGpu, passes_ms: Mapping[int, float] | None = PASSES_MS
) -> FakeGpu:
    """Let edgespec find these GPUs; the first holds all sessions.

    Args:
        passes_ms: What passes count as taking by their width; None for GPUs so slow that passes are not padded.
    """
    seconds_of = (lambda width, num_rows: passes_ms[width] / 1e3) if passes_ms else (lambda width, num_rows: 1.0)
    patch.setattr(
        "edgespec.runtimes.onnx.choose_shapes",
        lambda measured, widest, *, is_same=False: choose_shapes(seconds_of, widest, is_same=is_same),
    )
    runtime = SimpleNamespace(
        SessionOptions=onnxruntime.SessionOptions,
        InferenceSession=gpus[0].open,
        RunOptions=_RunOptions,
        OrtValue=onnxruntime.OrtValue,
    )
    for module in ("session", "passes", "kv_caches"):
        patch.setattr(f"edgespec.runtimes.{module}.import_onnxruntime", lambda: runtime)
    driver = Nvidia("580.65.06", (13, 0), tuple(NvidiaGpu(gpu.name, gpu.total, gpu.free) for gpu in gpus))
    patch.setattr("edgespec.runtimes.devices.read_nvidia_driver", lambda: driver)
    patch.setattr("edgespec.runtimes.devices.cuda.find_missing", lambda *about: None)
    patch.setitem(vars(DRIVERS), "open_nvml", FakeNvml(list(gpus)).open)  # type: ignore[arg-type]
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return gpus[0]
