"""What weights take on a device, counted from graphs that the exporter writes."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from edgespec.export.convert import export_model
from edgespec.manifest import read_manifest
from edgespec.runtimes.device_size import read_device_size
from edgespec.setup.open_model import ModelFolder, weights_bytes, weights_size


def test_a_tied_table_is_counted_twice(tiny_gguf: Path, tmp_path: Path) -> None:
    export_model(tiny_gguf, tmp_path / "tiny", precision="int8", form="gpu")
    model = ModelFolder(tmp_path / "tiny", read_manifest(tmp_path / "tiny"))
    size = weights_size(model)
    graph = onnx.load(tmp_path / "tiny" / "model.onnx", load_external_data=False).graph
    tensors = {each.name: {e.key: e.value for e in each.external_data} for each in graph.initializer}
    places: dict[str, list[int]] = {}
    for about in tensors.values():
        if about:
            places.setdefault(about["offset"], []).append(int(about["length"]))
    shared = sum(sum(lengths[1:]) for lengths in places.values())
    assert shared > 0
    own = sum(tensor.ByteSize() for tensor in graph.initializer if not tensor.external_data)
    stored = sum(max(lengths) for lengths in places.values())
    assert size.device_bytes == stored + shared + own
    assert size.file_bytes == weights_bytes(model)
    assert size.unpacked_bytes == read_manifest(model.folder).vocab_size * 64 * 2


def test_a_folder_for_the_cpu_is_not_read(tiny_model: Path) -> None:
    model = ModelFolder(tiny_model, read_manifest(tiny_model))
    assert weights_size(model) == (weights_bytes(model), weights_bytes(model), 0)


def product(rows: int, columns: int) -> bytes:
    node = helper.make_node("MatMulNBits", ["x"], ["y"], domain="com.microsoft", N=rows, K=columns, block_size=32)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy"]
    graph = helper.make_graph([node], "one", values[:1], values[1:])
    return bytes(helper.make_model(graph).SerializeToString())


def test_large_matrices_are_unpacked_in_slices(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    # A gate of 7B: whole. A head of 8B: 32768 rows at a time. Columns are rounded up to blocks.
    for rows, columns, wanted in ((18944, 3584, 18944 * 3584), (151936, 4096, 32768 * 4096), (64, 70, 64 * 96)):
        path.write_bytes(product(rows, columns))
        assert read_device_size(path) == (0, wanted * np.dtype(np.float16).itemsize)
    path.write_bytes(b"no graph")
    assert read_device_size(path) == (0, 0)
