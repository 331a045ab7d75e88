"""NVIDIA's provider: whether it works here and what mends it, and what its sessions are told.

Written from ONNX Runtime's documentation and tried with its 1.31 build on a machine without a GPU alone. Knows
nothing of models.
"""

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any, NamedTuple

from edgespec.nvml import Nvidia

PROVIDER = "CUDAExecutionProvider"
# What onnxruntime-gpu from the package index is built for, and the first driver that knows it.
NEEDED, DRIVER = (13, 0), "580"
EXTRA = 'pip uninstall -y onnxruntime && pip install "edgespec[cuda]"'
_REINSTALL = 'pip install --force-reinstall "edgespec[cuda]"'
# An arena that doubles would hold up to twice of what weights and workspace take.
OPTIONS = (("arena_extend_strategy", "kSameAsRequested"),)
# Weights are loaded once and never freed: in the arena they would only keep it from being given back.
ENTRIES = (("session.use_device_allocator_for_initializers", "1"),)
# One thread starts the kernels; others would wait for shapes, which is all that the CPU is left with.
HOST_THREADS = 1
_FATAL = 4  # of ONNX Runtime's severities


class Lack(NamedTuple):
    """Why the provider cannot be used, and the line that mends it."""

    why_not: str
    mend: str


def lack(driver: Nvidia | None, available: list[str], refusal: Callable[[], str | None]) -> Lack | None:
    """What is missing; None where a graph opens.

    Args:
        driver: What NVIDIA's driver says of itself; None where none answers.
        available: The providers of the ONNX Runtime that is installed.
        refusal: Opens a graph, and says why that failed.
    """
    told = refusal() if PROVIDER in available else "this onnxruntime is not built for CUDA"
    if told is None:
        return None
    if driver is None or not driver.gpus:
        why_not = "no NVIDIA driver answers" if driver is None else f"driver {driver.driver} finds no GPU"
        return Lack(why_not, f"with an NVIDIA GPU: install its driver, {DRIVER} or newer")
    if driver.cuda < NEEDED:
        known, wanted = (".".join(map(str, version)) for version in (driver.cuda, NEEDED))
        why_not = f"driver {driver.driver} knows CUDA {known}, and onnxruntime-gpu wants {wanted}"
        return Lack(why_not, f"update the NVIDIA driver to {DRIVER} or newer")
    return Lack(told, _REINSTALL if PROVIDER in available else EXTRA)


def refusal(ort: Any) -> str | None:
    """Why a graph of one node does not open on the provider; None where it does."""
    told = preload(ort)
    ort.set_default_logger_severity(_FATAL)  # what fails is read back; a log would say it twice
    try:
        opened = ort.InferenceSession(_one_node(), providers=[PROVIDER], enable_fallback=0)
    except Exception as error:  # ONNX Runtime has no common base of its own
        return f"it opens no graph: {str(error)[:200]}"
    if PROVIDER in opened.get_providers():
        return None
    return "its libraries (CUDA, cuDNN) do not load" + (f": {told}" if told else "")


def preload(ort: Any) -> str:
    """Load CUDA and cuDNN from the wheels beside onnxruntime; what it says first of those that do not load."""
    if not hasattr(ort, "preload_dlls"):
        return ""
    said = io.StringIO()
    with redirect_stdout(said):
        ort.preload_dlls(cuda=True, cudnn=True)
    return said.getvalue().strip().partition("\n")[0]


def _one_node() -> bytes:
    from onnx import TensorProto, helper

    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "one", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def arena_options(arena_bytes: int) -> tuple[tuple[str, str], ...]:
    """The most that a session may take beside its weights and its KV cache, which lie outside of its arena."""
    return (("gpu_mem_limit", str(arena_bytes)),)
