"""What providers for NPUs and for Intel's GPUs are asked for, by the kind of hardware behind them."""

import json

from edgespec.runtimes.device_names import Kind

_Options = tuple[tuple[str, str], ...]

# A pass is followed by the next one at once: clocks stay up. Graphs are compiled once and kept, so that the
# compiler may take its time. The latency of a call is in microseconds.
_QNN_REAL = (
    ("htp_performance_mode", "burst"),
    ("htp_graph_finalization_optimization_mode", "3"),
    ("rpc_control_latency", "100"),
)
# With it the provider offers memory that CPU and NPU share. It needs the driver's library of the CPU.
QNN_SHARED_MEMORY = ("enable_htp_shared_memory_allocator", "1")
_OPENVINO_DEVICES = {"cpu": "CPU", "gpu": "GPU", "npu": "NPU"}


def kind_options(plugin: str, kind: Kind, *, is_emulated: bool) -> _Options:
    """Options for one device of a plugin, beside those that the plugin always gets.

    Args:
        is_emulated: The device is imitated by the processor: no clocks to raise, no memory to share.
    """
    if plugin == "qnn" and not is_emulated:
        return (*_QNN_REAL, QNN_SHARED_MEMORY)
    if plugin == "openvino":  # the only option that its plugin reads; others are ignored with a warning
        return (("load_config", json.dumps({_OPENVINO_DEVICES[kind]: {"PERFORMANCE_HINT": "LATENCY"}})),)
    return ()
