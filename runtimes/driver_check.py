"""Finds out if a device computes, and if it does so in half floats, which the gpu form needs.

What a provider lists may lack a driver, or have one that is too old; that shows when it computes. A process of its
own multiplies two matrices and compares with numpy: a driver that crashes ends that and nothing else.
"""

import json
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

import numpy as np

from edgespec.errors import DeviceUnavailable, EdgeSpecError
from edgespec.runtimes.devices import Device, find_device, import_onnxruntime, request_device
from edgespec.runtimes.plugins import Missing, driver_fix, library_fix
from edgespec.system.line_process import python_program

NO_HALF_FLOATS = "requires f16"  # words of the WebGPU provider


def lacks_half_floats(device: Device) -> bool:
    """True if a device lacks half floats, by a product of matrices on WebGPU; all other providers have them.

    Raises DeviceUnavailable: The device computes nothing at all.
    """
    if device.memory != "webgpu":
        return False
    try:
        _multiply(device, np.float16)
    except Exception as error:  # ONNX Runtime has no common base of its own
        if NO_HALF_FLOATS in str(error):
            return True
        if problem := adapter_problem(str(error)):
            raise Missing(problem, driver_fix(device.name)).as_error(device.name) from error
        raise DeviceUnavailable(
            f"'{device.name}' does not compute: {str(error)[:200].rstrip('.')}; update its driver, or use "
            "--device cpu",
            device=device.name,
        ) from error
    return False


def is_known_to_lack_half_floats(name: str) -> bool:
    """True if the device of that name is in this machine and lacks half floats; of others nothing is known."""
    try:
        return lacks_half_floats(find_device(name))
    except DeviceUnavailable:
        return False


_LIMIT_S = 60.0  # a driver's first start may compile its shaders
_SIZE = 64
_TOLERANCE = 0.05  # of numbers near 5; half floats have 11 bits
_NO_ADAPTER = "Failed to get a WebGPU adapter"


def check_driver(name: str, timeout_s: float = _LIMIT_S) -> Missing | None:
    """Let a device compute, by its name; returns what keeps it from working, None where nothing does."""
    try:
        done = subprocess.run(
            [python_program(), "-P", "-m", __name__, name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return Missing(f"its driver gave no result within {timeout_s:.0f} s", driver_fix(name))
    except (EdgeSpecError, OSError) as error:
        return Missing(f"no process could be started to try it: {error}")
    return _read_result(name, done.returncode, done.stdout, done.stderr)


def _read_result(name: str, code: int, stdout: str, stderr: str) -> Missing | None:
    fix = driver_fix(name)
    with suppress(ValueError, KeyError, IndexError, TypeError):
        problem = json.loads(stdout.strip().splitlines()[-1])["problem"]
        return Missing(problem, library_fix(stderr) or fix) if problem else None
    return Missing(f"its driver crashed ({_ending(code)})", fix)


def _ending(code: int) -> str:
    with suppress(ValueError):
        return signal.Signals(-code).name
    return f"exit code {code}"


def main(name: str) -> int:
    """In the process: print one line of JSON; the exit code is 0 if the device computes."""
    try:
        problem = _multiply(find_device(name), np.float32)
    except EdgeSpecError as error:
        problem = str(error)
    except Exception as error:  # ONNX Runtime has no common base of its own
        problem = adapter_problem(str(error)) or f"it cannot open a graph: {' '.join(str(error).split())[:200]}"
    print(json.dumps({"problem": problem}), flush=True)
    return 0 if problem is None else 1


def _multiply(device: Device, kind: type[np.floating[Any]]) -> str | None:
    """Multiply two matrices on the device; returns what is wrong with that, None where the product is right.

    Raises what ONNX Runtime raises where the device fails.
    """
    ort = import_onnxruntime()
    settings = ort.SessionOptions()
    settings.log_severity_level = 4  # what fails is read back; a log would repeat it
    rng = np.random.default_rng(0)
    x, y = (rng.uniform(-1, 1, (_SIZE, _SIZE)).astype(kind) for _ in range(2))
    session = ort.InferenceSession(_product(kind), settings, **request_device(settings, device))
    if device.provider not in session.get_providers():
        return "it runs no products of matrices"
    (found,) = session.run(None, {"x": x, "y": y})
    is_right = np.allclose(found.astype(np.float32), x.astype(np.float32) @ y.astype(np.float32), atol=_TOLERANCE)
    return None if is_right else "it computes a product of matrices wrongly"


def adapter_problem(message: str) -> str | None:
    """The problem with a driver that a provider's failure tells of; None where it is about something else."""
    return "it finds no GPU with a driver that it can use" if _NO_ADAPTER in message else None


def _product(kind: type[np.floating[Any]]) -> bytes:
    from onnx.parser import parse_model

    side = f"{'float16' if kind is np.float16 else 'float'}[{_SIZE}, {_SIZE}]"
    graph = f"product ({side} x, {side} y) => ({side} z) {{ z = MatMul(x, y) }}"
    return bytes(parse_model(f'<ir_version: 8, opset_import: ["": 17]> {graph}').SerializeToString())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
