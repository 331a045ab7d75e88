"""NVIDIA's provider: whether it works here, how to fix it if not, the options of its sessions, and their gate."""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import replace
from functools import cache
from threading import Condition, RLock
from typing import Any

from edgespec.memory.device_memory import Nvidia
from edgespec.runtimes.device_names import DEVICES, INSTALLS, Device
from edgespec.runtimes.memory_errors import is_memory_error
from edgespec.runtimes.plugins import Missing
from edgespec.system.cancel import Cancel
from edgespec.system.context_managers import contextmanager

PROVIDER = "CUDAExecutionProvider"
# What onnxruntime-gpu from the package index is built for, and the first driver that supports it.
_NEEDED, _DRIVER = (13, 0), "580"
_REINSTALL = 'pip install --force-reinstall "edgespec[cuda]"'
CUDA = Device(
    "cuda",
    PROVIDER,
    "cuda",
    options=tuple(DEVICES["cuda"]["options"].items()),
    # Weights are loaded once and never freed: in the arena they would only prevent its memory from being returned.
    entries=(("session.use_device_allocator_for_initializers", "1"),),
    # One thread starts the kernels; others would wait for shapes, which is all that the CPU is left with.
    host_threads=1,
    records_passes=True,
    kind="gpu",
)
GRAPHS = "enable_cuda_graph"  # an option of sessions that may record passes
_FATAL = 4  # a severity of ONNX Runtime


def recording(device: Device) -> Device:
    """The device with the option for sessions that may record passes."""
    return replace(device, options=(*device.options, (GRAPHS, "1")))


def find_missing(
    driver: Nvidia | None, available: list[str], open_graph: Callable[[], str | None]
) -> Missing | None:
    """The reason why the provider does not work; None where it is available and open_graph finds no problem."""
    is_built_in = PROVIDER in available
    problem = open_graph() if is_built_in else "this onnxruntime is built without CUDA"
    if problem is None:
        return None
    if driver is None or not driver.gpus:
        found = "no NVIDIA driver was found" if driver is None else f"NVIDIA driver {driver.driver} finds no GPU"
        return Missing(found, f"if this machine has an NVIDIA GPU, install its driver, version {_DRIVER} or newer")
    if driver.cuda < _NEEDED:
        supported, needed = (".".join(map(str, version)) for version in (driver.cuda, _NEEDED))
        return Missing(
            f"NVIDIA driver {driver.driver} supports CUDA {supported}, and onnxruntime-gpu needs {needed}",
            f"update the NVIDIA driver to {_DRIVER} or newer",
        )
    return Missing(problem, _REINSTALL if is_built_in else INSTALLS["gpu"]["NVIDIA"][1])


@cache
def opening_problem(ort: Any) -> str | None:
    """Open a graph of one node on the provider, once a process; returns why that failed, None where it opens."""
    lines = preload_libraries(ort)
    ort.set_default_logger_severity(_FATAL)  # what fails is read back; a log would repeat it
    try:
        session = ort.InferenceSession(_one_node(), providers=[PROVIDER], enable_fallback=0)
    except Exception as error:  # ONNX Runtime has no common base of its own
        if is_memory_error(error):  # the provider works, and loading a model says what the GPU lacks
            return None
        return f"it cannot open a graph: {str(error)[:200]}"
    if PROVIDER in session.get_providers():
        return None
    return "its libraries (CUDA, cuDNN) do not load" + (f": {lines}" if lines else "")


def preload_libraries(ort: Any) -> str:
    """Load CUDA and cuDNN from their wheels; returns the first line that ONNX Runtime prints of a failure.

    Before, CUDA is told to count GPUs as NVIDIA's driver and nvidia-smi do, unless the user has told it otherwise:
    by itself it counts the fastest first, and an index would name another GPU than the one whose memory is read.
    """
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if not hasattr(ort, "preload_dlls"):
        return ""
    printed = io.StringIO()
    with redirect_stdout(printed):
        ort.preload_dlls(cuda=True, cudnn=True)
    return printed.getvalue().strip().partition("\n")[0]


def _one_node() -> bytes:
    from onnx.parser import parse_model

    text = '<ir_version: 8, opset_import: ["": 17]> one (float[1] x) => (float[1] y) { y = Relu(x) }'
    return bytes(parse_model(text).SerializeToString())


class RecordingGate:
    """Lets passes and openings use GPUs at once, or one recording alone, which memory taken beside it would spoil.

    A pass enters the gate itself. A recording waits for passes, and passes that come later wait for it. Opening a
    model takes seconds: it waits for the recording that is being made, and none begins meanwhile.
    """

    def __init__(self) -> None:
        self._lock = RLock()  # entered itself where a pass has no time to lose
        self._changed = Condition(self._lock)
        self._num_passes = self._num_openings = self._num_recorders = 0
        self._is_recording = False

    def __enter__(self) -> None:
        with self._lock:
            if self._num_recorders:
                self._changed.wait_for(lambda: not self._num_recorders)
            self._num_passes += 1

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._num_passes -= 1
            if self._num_recorders:
                self._changed.notify_all()

    @contextmanager
    def opening(self) -> Iterator[None]:
        with self._changed:
            self._num_openings += 1
            self._changed.notify_all()  # recordings that wait are given up
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._is_recording)
            yield
        finally:
            with self._changed:
                self._num_openings -= 1
                self._changed.notify_all()

    @contextmanager
    def recording(self) -> Iterator[bool]:
        """True within the block if nothing else uses a GPU; False at once if a model is being opened."""
        with self._changed:
            self._num_recorders += 1
            self._changed.wait_for(lambda: self._num_openings or not (self._num_passes or self._is_recording))
            is_alone = not self._num_openings
            self._is_recording |= is_alone
        try:
            yield is_alone
        finally:
            with self._changed:
                self._num_recorders -= 1
                self._is_recording &= not is_alone
                self._changed.notify_all()

    def wait_for_openings(self, cancel: Cancel) -> None:
        """Wait until no model is being opened. Raises Cancelled: The caller's own loading was cancelled."""
        with cancel.on_set(self._wake), self._changed:
            self._changed.wait_for(lambda: cancel.is_set or not self._num_openings)
        cancel.require_unset()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


GATE = RecordingGate()


def opening(device: Device) -> AbstractContextManager[None]:
    """While the block opens a session on a device, no pass is recorded."""
    return GATE.opening() if device.provider == PROVIDER else nullcontext()
