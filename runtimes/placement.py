"""Where the nodes of a graph run: asked of ONNX Runtime, read back, and refused where it is not what was asked.

ONNX Runtime gives to the CPU, and says nothing, what a provider has no kernel for.
"""

from collections import Counter
from typing import Any

from edgespec.errors import DeviceUnavailable
from edgespec.runtimes.devices import Device

CPU_PROVIDER = "CPUExecutionProvider"
# What a pass spends its time on. Lengths and shapes may be counted on the CPU beside any provider.
_HEAVY = frozenset(
    {
        "Attention",
        "FusedMatMul",
        "Gemm",
        "GroupQueryAttention",
        "MatMul",
        "MatMulNBits",
        "MultiHeadAttention",
        "RotaryEmbedding",
        "SimplifiedLayerNormalization",
        "SkipSimplifiedLayerNormalization",
        "Softmax",
    }
)

Placement = dict[str, Counter[str]]  # provider to how many nodes of which kind it runs


def placed_on(options: Any, device: Device) -> dict[str, Any]:
    """Ask for a device in SessionOptions; what else InferenceSession takes for it."""
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    for key, value in device.entries:
        options.add_session_config_entry(key, value)
    if device.handles:
        options.add_provider_for_devices(list(device.handles), dict(device.options))
        return {"enable_fallback": 0}
    return {"providers": [(device.provider, dict(device.options))], "enable_fallback": 0}


def placement(session: Any) -> Placement:
    """Nodes by provider, after all fusing."""
    found: Placement = {}
    for graph in session.get_provider_graph_assignment_info():
        found.setdefault(graph.ep_name, Counter()).update(node.op_type for node in graph.get_nodes())
    return found


def expect_placed(found: Placement, device: Device, what: str) -> None:
    """Raises DeviceUnavailable: work that takes time would run elsewhere."""
    if device.provider not in found:
        raise DeviceUnavailable(
            f"none of {what} runs on {device.provider}: {written(found)}; {_MEND}", device=device.name
        )
    stray = {
        provider: Counter({kind: num for kind, num in kinds.items() if kind in _HEAVY})
        for provider, kinds in found.items()
        if provider != device.provider
    }
    if stray := {provider: kinds for provider, kinds in stray.items() if kinds}:
        provider, kinds = next(iter(stray.items()))
        named = ", ".join(f"{num} {kind}" for kind, num in kinds.most_common(3))
        raise DeviceUnavailable(
            f"{what} would run on {device.provider} in part alone, which has no kernel here for {named}: "
            f"{provider} would run these; {_MEND}",
            device=device.name,
        )


def written(found: Placement) -> str:
    """333 nodes on WebGpuExecutionProvider, 6 on CPUExecutionProvider."""
    parts = sorted(((kinds.total(), provider) for provider, kinds in found.items()), reverse=True)
    return ", ".join(f"{num}{' nodes' if not i else ''} on {name}" for i, (num, name) in enumerate(parts))


_MEND = "export the model for that device (edgespec export --form), or use --device cpu"
