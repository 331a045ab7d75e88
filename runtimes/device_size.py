"""Reads from a graph alone how much its weights take on a device."""

from pathlib import Path
from typing import Any, NamedTuple

# ONNX Runtime's CUDA provider unpacks a matrix of blocks to half floats for a pass of more than some rows, in
# slices if it has more bytes and rows than this (its docs/contrib_ops/cuda/matmul_nbits.md, section 5).
_WHOLE_BYTES, _WHOLE_ROWS, _SLICE_ROWS = 256 << 20, 65536, 32768
_HALF_BYTES = 2


class DeviceSize(NamedTuple):
    """In bytes. A device holds a tensor for each name, also where two lie in one place of the file."""

    weights_bytes: int
    unpacked_bytes: int  # of the largest matrix that a wide pass unpacks


def read_device_size(graph: Path) -> DeviceSize:
    """Read a graph without its weights; zeros for a file that is none, which opening it reports."""
    import onnx  # 0.15 s, and only folders for a GPU need it
    from google.protobuf.message import DecodeError

    try:
        read = onnx.load(str(graph), load_external_data=False).graph
    except (DecodeError, OSError):
        return DeviceSize(0, 0)
    weights_bytes = sum(map(_num_bytes, read.initializer))
    products = (node for node in read.node if node.op_type == "MatMulNBits")
    return DeviceSize(weights_bytes, max(map(_unpacked_bytes, products), default=0))


def _num_bytes(tensor: Any) -> int:
    lengths = [int(entry.value) for entry in tensor.external_data if entry.key == "length"]
    return lengths[0] if lengths else int(tensor.ByteSize())


def _unpacked_bytes(node: Any) -> int:
    sizes: dict[str, int] = {attribute.name: attribute.i for attribute in node.attribute}
    rows, columns = sizes["N"], -(-sizes["K"] // sizes["block_size"]) * sizes["block_size"]
    whole = rows * columns * _HALF_BYTES
    if whole > _WHOLE_BYTES and rows > _WHOLE_ROWS:
        return _SLICE_ROWS * columns * _HALF_BYTES
    return whole
