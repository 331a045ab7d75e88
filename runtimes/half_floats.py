"""Whether a device computes in half floats, which the gpu form needs; some WebGPU adapters do not."""

from typing import Any

import numpy as np

from edgespec.errors import DeviceUnavailable
from edgespec.runtimes.devices import Device, find_device, import_onnxruntime
from edgespec.runtimes.driver_check import adapter_problem
from edgespec.runtimes.missing import Missing
from edgespec.runtimes.node_placement import request_device
from edgespec.runtimes.plugins import driver_fix

NO_HALF_FLOATS = "requires f16"  # words of the WebGPU provider


def lacks_half_floats(device: Device) -> bool:
    """Whether a device lacks half floats, by a graph of one node on WebGPU; all other providers have them.

    Raises DeviceUnavailable: The device computes nothing at all.
    """
    if device.memory != "webgpu":
        return False
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 4  # what fails is read back; a log would repeat it
    try:
        session = ort.InferenceSession(_one_node(), options, **request_device(options, device))
        session.run(None, {"x": np.ones(2, np.float16)})
    except Exception as error:  # ONNX Runtime has no common base of its own
        if NO_HALF_FLOATS in str(error):
            return True
        if problem := adapter_problem(str(error)):
            raise Missing(problem, driver_fix(device.name.partition(":")[0])).as_error(device.name) from error
        raise DeviceUnavailable(
            f"'{device.name}' does not compute: {str(error)[:200].rstrip('.')}; update its driver, or use "
            "--device cpu",
            device=device.name,
        ) from error
    return False


def is_known_to_lack_half_floats(name: str) -> bool:
    """Whether the device of that name is in this machine and lacks half floats; of others nothing is known."""
    try:
        return lacks_half_floats(find_device(name))
    except DeviceUnavailable:
        return False


def _one_node() -> Any:
    from onnx import TensorProto, helper

    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, [2]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Mul", ["x", "x"], ["y"])], "one", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return model.SerializeToString()
