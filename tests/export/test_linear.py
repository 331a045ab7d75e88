"""Matrices of several forms as nodes that ONNX Runtime runs."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from rows import random_rows

from edgespec.errors import SourceError
from edgespec.export.blocks import BLOCK_FORMATS
from edgespec.export.linear import PartWriter
from edgespec.export.precision import Rule, choose_precision
from edgespec.export.tensors import StoredTensor
from edgespec.export.weights import WeightsFile
from edgespec.export.written import read_written

COLUMNS = 512


def stored(path: Path, storage: str, seed: int, num_rows: int = 3) -> StoredTensor:
    """A matrix of random blocks or floats in a file of its own."""
    if storage in BLOCK_FORMATS:
        num_blocks = COLUMNS // BLOCK_FORMATS[storage].weights_per_block
        raw = random_rows(storage, seed, num_blocks=num_blocks)
    else:
        raw = np.random.default_rng(seed).normal(0, 1, (num_rows, COLUMNS)).astype(np.float32)
    path.write_bytes(raw.tobytes())
    return StoredTensor(path.stem, path, 0, len(raw), COLUMNS, storage)


def products(folder: Path, tensors: list[StoredTensor], rule: Rule, x: np.ndarray) -> list[np.ndarray]:
    entry = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1, "rows", COLUMNS]))
    with WeightsFile(folder / "m.data") as weights:
        write = PartWriter(dict(zip("abc", tensors, strict=False)), weights, rule)
        outputs = write.products("w", entry, [*write.tensors])
    for value in outputs:
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([1, "rows", "columns"])
    graph = ir.Graph(
        [entry],
        outputs,
        nodes=write.nodes.nodes,
        initializers=write.nodes.initializers,
        opset_imports={"": 21, "com.microsoft": 1},
        name="linear",
    )
    ir.save(ir.Model(graph, ir_version=10), folder / "m.onnx")
    session = onnxruntime.InferenceSession(str(folder / "m.onnx"), providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, {"x": x[None]})
    return [value[0] for value in found]


def whole(tensor: StoredTensor) -> np.ndarray:
    return np.concatenate(list(tensor.floats()))


def written(folder: Path, tensor: StoredTensor) -> np.ndarray:
    """The matrix as the graph has it, read back from its file."""
    products(folder, [tensor], Rule("source", 32), np.zeros((1, COLUMNS), np.float32))
    (matrix,) = read_written(folder / "m.onnx", {"w": tensor}).values()
    return np.concatenate(list(matrix.floats()))


@pytest.mark.parametrize("storage", [name for name, each in BLOCK_FORMATS.items() if not each.has_offsets])
def test_scaled_levels_are_written_to_the_bit(tmp_path: Path, storage: str) -> None:
    tensor = stored(tmp_path / "w", storage, 4)
    expected = whole(tensor)
    if storage == "Q6_K":  # whose blocks are joined
        assert np.abs(written(tmp_path, tensor) - expected).max() < 0.005 * np.abs(expected).max()
    else:
        assert np.array_equal(written(tmp_path, tensor), expected)


def test_blocks_of_several_sizes_meet_one_input(tmp_path: Path) -> None:
    """A Q2_K file stores values in Q4_K beside queries and keys in Q2_K: minima by 16 and by 32 weights."""
    tensors = [stored(tmp_path / f"{i}", storage, i) for i, storage in enumerate(["Q2_K", "Q4_K", "Q6_K"])]
    x = np.random.default_rng(9).normal(0, 1, (4, COLUMNS)).astype(np.float32)
    for product, tensor in zip(products(tmp_path, tensors, Rule("source", 32), x), tensors, strict=True):
        expected = x @ whole(tensor).T
        assert np.abs(product - expected).max() < 0.12 * np.abs(expected).max()


@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_larger_blocks_are_smaller_and_coarser(tmp_path: Path, precision: str) -> None:
    tensor = stored(tmp_path / "w", "F32", 1, num_rows=64)
    x = np.random.default_rng(2).normal(0, 1, (8, COLUMNS)).astype(np.float32)
    errors, sizes = [], []
    for block_size in (32, 64, 128):
        (product,) = products(tmp_path, [tensor], Rule(precision, block_size), x)
        errors.append(np.square(product - x @ whole(tensor).T).mean())
        sizes.append((tmp_path / "m.data").stat().st_size)
    assert errors == sorted(errors)
    assert sizes[0] > max(sizes[1:])


def test_half_floats_keep_eleven_bits_and_refuse_what_they_cannot_hold(tmp_path: Path) -> None:
    tensor = stored(tmp_path / "w", "F32", 1)
    x = np.eye(COLUMNS, dtype=np.float32)
    (product,) = products(tmp_path, [tensor], Rule("fp16", 32), x)
    assert np.array_equal(product, whole(tensor).T.astype(np.float16).astype(np.float32))
    (tmp_path / "w").write_bytes((1e5 * whole(tensor)).tobytes())
    with pytest.raises(SourceError, match="half floats"):
        products(tmp_path, [tensor], Rule("fp16", 32), x)


def test_auto_keeps_blocks_and_rounds_floats_by_size() -> None:
    assert choose_precision(10**9, is_blocks=True)[0] == "source"
    assert choose_precision(10**8, is_blocks=False)[0] == "int8"
    assert choose_precision(10**9, is_blocks=False)[0] == "int4"
    assert choose_precision(10**9, is_blocks=False, hidden_size=240)[0] == "source"
