"""Which provider runs each node: ONNX Runtime silently gives the CPU those that a provider has no kernel for."""

from collections import Counter
from typing import Any

from edgespec.errors import DeviceUnavailable
from edgespec.runtimes.devices import Device

# What a pass spends its time on. Lengths and shapes may be counted on the CPU beside any provider.
_HEAVY = frozenset({
    "Attention", "FusedMatMul", "Gemm", "GroupQueryAttention", "LinearAttention", "MatMul", "MatMulNBits", "MoE",
    "MultiHeadAttention", "QMoE", "RotaryEmbedding", "SimplifiedLayerNormalization",
    "SkipSimplifiedLayerNormalization", "Softmax",
})  # fmt: skip
_FEW = 4  # nodes of a kind that count lengths
_FIX = "use --device cpu"
_WEBGPU = "WebGpuExecutionProvider"

NodePlacement = dict[str, Counter[str]]  # provider to how many nodes of which kind it runs


def read_node_placement(session: Any) -> NodePlacement:
    """Count a session's nodes by provider, after all fusing."""
    placement: NodePlacement = {}
    for graph in session.get_provider_graph_assignment_info():
        placement.setdefault(graph.ep_name, Counter()).update(node.op_type for node in graph.get_nodes())
    return placement


def require_placement(placement: NodePlacement, device: Device, what: str) -> None:
    """Raises DeviceUnavailable: Work that takes time would run elsewhere, or in a kernel that can be wrong."""
    if device.provider not in placement:
        raise DeviceUnavailable(
            f"none of {what} runs on {device.provider}: {format_placement(placement)}; {_FIX}", device=device.name
        )
    if device.provider == _WEBGPU and "QMoE" in placement[_WEBGPU]:
        raise DeviceUnavailable(
            f"{what} has experts, for which WebGPU's kernel (QMoE) can give wrong logits where a pass has several "
            f"tokens; {_FIX}",
            device=device.name,
        )
    for provider, kinds in placement.items():
        stray = Counter({kind: num for kind, num in kinds.items() if kind in _HEAVY})
        if stray and provider != device.provider:
            named = ", ".join(f"{num} {kind}" for kind, num in stray.most_common(3))
            raise DeviceUnavailable(
                f"only a part of {what} would run on {device.provider}, which has no kernel here for {named}: "
                f"{provider} would run these; {_FIX}",
                device=device.name,
            )


def find_strays(placement: NodePlacement, device: Device, num_layers: int) -> str | None:
    """A line on operators that another provider runs in each layer: each costs a copy to the host and one back.

    None where there are none. Lengths and shapes are counted once for the whole model, or a few times.
    """
    strays = [
        (num, kind, provider)
        for provider, kinds in placement.items()
        for kind, num in kinds.most_common()
        if provider != device.provider and num >= max(num_layers, _FEW)
    ]
    if not strays:
        return None
    named = ", ".join(f"{num} {kind}" for num, kind, _ in strays)
    in_each = sum(num for num, _, _ in strays) // num_layers
    return (
        f"'{device.name}' has no kernel for {named}: {strays[0][2]} runs them, {in_each} in each layer, and each "
        "waits for a copy to the host and back"
    )


def format_placement(placement: NodePlacement) -> str:
    """Example: `333 nodes on WebGpuExecutionProvider, 6 on CPUExecutionProvider`."""
    parts = sorted(((kinds.total(), provider) for provider, kinds in placement.items()), reverse=True)
    return ", ".join(f"{num}{' nodes' if not i else ''} on {name}" for i, (num, name) in enumerate(parts))
