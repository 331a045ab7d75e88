"""Arrays in a safetensors file, written at once and read whole. Format: the safetensors README.

By hand, since it is thirty lines, and since nothing in it is ever run, other than in a pickle of torch.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.errors import ModelError
from edgespec.system.disk import explain_write_errors, replace_file

_DTYPES = {"F32": "<f4", "F16": "<f2", "I64": "<i8", "BOOL": "|b1"}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_ALIGNMENT = 8

Array = npt.NDArray[Any]


def write_tensors(path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Raises DiskFull: There is no room; an earlier file stays then."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, tensor in tensors.items():
        stop = start + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    parts = [
        struct.pack("<Q", len(text)),
        text,
        *(np.ascontiguousarray(tensor).tobytes() for tensor in tensors.values()),
    ]
    with explain_write_errors(path.parent, sum(map(len, parts))):
        replace_file(path, b"".join(parts), 0o644)


def read_tensors(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """Arrays by name, and the metadata. Raises ModelError: The file is damaged."""
    content = path.read_bytes()
    try:
        (length,) = struct.unpack_from("<Q", content)
        header = json.loads(content[8 : 8 + length])
        metadata = header.pop("__metadata__", {})
        body = memoryview(content)[8 + length :]
        tensors = {
            name: np.frombuffer(body[slice(*info["data_offsets"])], _DTYPES[info["dtype"]]).reshape(info["shape"])
            for name, info in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(f"{path} is damaged ({error}); remove it and train again") from None
    return tensors, metadata
