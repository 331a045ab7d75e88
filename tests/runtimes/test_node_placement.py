"""Which nodes run where."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest

from edgespec.errors import DeviceUnavailable
from edgespec.runtimes.devices import Device, find_device, request_device
from edgespec.runtimes.node_placement import (
    NodePlacement,
    find_strays,
    format_placement,
    read_node_placement,
    require_placement,
)

GPU = Device("webgpu", "WebGpuExecutionProvider", "webgpu")


class Session:
    """What ONNX Runtime says of nodes: kinds by provider, a graph each."""

    def __init__(self, *graphs: tuple[str, list[str]]) -> None:
        self._graphs = graphs

    def get_provider_graph_assignment_info(self) -> list[Any]:
        return [
            SimpleNamespace(
                ep_name=name, get_nodes=lambda kinds=kinds: [SimpleNamespace(op_type=k) for k in kinds]
            )
            for name, kinds in self._graphs
        ]


def found(*graphs: tuple[str, list[str]]) -> NodePlacement:
    return read_node_placement(Session(*graphs))


def test_nodes_are_counted_by_provider_over_all_graphs() -> None:
    nodes = found(
        (GPU.provider, ["MatMul", "Mul"]), ("CPUExecutionProvider", ["Shape"]), (GPU.provider, ["MatMul"])
    )
    assert nodes == {GPU.provider: {"MatMul": 2, "Mul": 1}, "CPUExecutionProvider": {"Shape": 1}}
    assert format_placement(nodes) == f"3 nodes on {GPU.provider}, 1 on CPUExecutionProvider"


def test_operators_that_stray_in_each_layer_are_told_with_their_number() -> None:
    counted = (GPU.provider, ["MatMulNBits"] * 24), ("CPUExecutionProvider", ["Shape", "Gather", "Cast", "Cast"])
    assert find_strays(found(*counted), GPU, 24) is None
    assert find_strays(found(*counted), GPU, 2) is None, "as many as layers, and they count lengths"
    strays = find_strays(found(*counted, ("CPUExecutionProvider", ["Where"] * 24 + ["Mul"] * 49)), GPU, 24)
    assert strays == (
        "'webgpu' has no kernel for 49 Mul, 24 Where: CPUExecutionProvider runs them, 3 in each layer, and each "
        "waits for a copy to the host and back"
    )


def test_lengths_may_be_counted_on_the_cpu_and_products_may_not() -> None:
    light = found((GPU.provider, ["MatMulNBits"]), ("CPUExecutionProvider", ["Shape", "Gather", "Cast"]))
    require_placement(light, GPU, "a model")
    heavy = found(
        (GPU.provider, ["MatMulNBits"]), ("CPUExecutionProvider", ["Cast", "FusedMatMul", "FusedMatMul"])
    )
    with pytest.raises(DeviceUnavailable, match="2 FusedMatMul: CPUExecutionProvider would run") as refused:
        require_placement(heavy, GPU, "a model")
    assert refused.value.exit_code == 4


def test_experts_are_refused_where_their_kernel_may_be_wrong() -> None:
    experts = found((GPU.provider, ["MatMulNBits", "QMoE"]))
    with pytest.raises(DeviceUnavailable, match=r"QMoE\) can give wrong logits .*; use device='cpu'"):
        require_placement(experts, GPU, "a model")
    cuda = Device("cuda", "CUDAExecutionProvider", "cuda")
    require_placement(found((cuda.provider, ["MatMulNBits", "QMoE"])), cuda, "a model")


def test_provider_that_runs_nothing_is_refused() -> None:
    with pytest.raises(
        DeviceUnavailable, match=r"none of a model runs on WebGpu.*1 nodes on CPUExecutionProvider"
    ):
        require_placement(found(("CPUExecutionProvider", ["Cast"])), GPU, "a model")


def test_real_session_tells_that_all_its_nodes_are_on_the_cpu(tiny_model: Path) -> None:
    device, options = find_device("cpu"), onnxruntime.SessionOptions()
    how = request_device(options, device)
    nodes = read_node_placement(onnxruntime.InferenceSession(str(tiny_model / "model.onnx"), options, **how))
    assert list(nodes) == ["CPUExecutionProvider"]
    assert nodes["CPUExecutionProvider"]["GroupQueryAttention"] == 2
    require_placement(nodes, device, "a model")
