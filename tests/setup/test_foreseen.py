"""What is foreseen of a model, compared with what its export makes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest
import tiny

from edgespec.errors import ModelError
from edgespec.export.convert import export_model
from edgespec.export.plan import estimate
from edgespec.setup.catalog import CATALOG
from edgespec.setup.foresee import file_bytes, foresee_model
from edgespec.setup.home import ModelHome


@pytest.mark.parametrize("form", ["cpu", "gpu", "npu"])
@pytest.mark.parametrize("precision", ["", ":fp32"])
def test_shapes_are_those_of_the_export(tiny_gguf: Path, tmp_path: Path, form: str, precision: str) -> None:
    home = ModelHome(tmp_path, offline=True)
    found, num_bytes = foresee_model(home, f"{tiny_gguf}{precision}", form)
    made = export_model(
        tiny_gguf, tmp_path / "made", precision=precision[1:] or ("fp16" if form == "npu" else "source"), form=form
    )
    assert replace(found, name="made", vocab_sha256=made.vocab_sha256, files=made.files) == made
    # Rotary tables lie beside the weights, which shows in a model as small as this one alone.
    assert num_bytes > 0.5 * (tmp_path / "made" / made.weights).stat().st_size
    assert not (tmp_path / "models").exists()


def test_half_floats_count_as_widened_in_the_precision_of_the_source(tmp_path: Path) -> None:
    source, home = tmp_path / "hf", ModelHome(tmp_path, offline=True)
    tiny.write_huggingface(source, tiny.random_weights(), dtype="F16")
    made = [export_model(source, tmp_path / name, precision=name) for name in ("source", "fp16", "int8")]
    stored = [
        sum({tensor.offset: tensor.length or 0 for tensor in _halves(tmp_path / manifest.precision)}.values())
        for manifest in made
    ]
    assert [manifest.half_bytes for manifest in made] == stored
    assert stored[0] == stored[1] > stored[2] == 0
    assert foresee_model(home, f"{source}:source", "cpu").manifest.half_bytes == stored[0]
    assert foresee_model(home, f"{source}:w8a16", "npu").manifest.half_bytes == 0
    kept, rounded = (
        estimate("m", precision, 1 << 30, 2 << 30, is_blocks=False, is_checked=True, write_bytes=2 << 30)
        for precision in ("source", "fp16")
    )
    assert kept.peak_bytes == rounded.peak_bytes


def _halves(folder: Path) -> Iterator[ir.ExternalTensor]:
    for value in ir.load(folder / "model.onnx").graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor) and value.dtype == ir.DataType.FLOAT16:
            yield value.const_value


@pytest.mark.parametrize(("name", "gpu_bytes"), [("smollm2-135m", 12 << 30), ("qwen2.5-coder-1.5b", 80 << 30)])
def test_models_of_the_catalogue_are_foreseen_in_half_floats_for_a_large_gpu(
    name: str, gpu_bytes: int, tmp_path: Path
) -> None:
    home = ModelHome(tmp_path, offline=True)
    halves, blocks = (foresee_model(home, name, "gpu", size) for size in (gpu_bytes, 4 << 30))
    assert (halves.manifest.precision, blocks.manifest.precision) == ("fp16", CATALOG[name].precision)
    assert halves.file_bytes > 2 * blocks.file_bytes


@pytest.mark.parametrize("name", sorted(CATALOG))
def test_models_of_the_catalogue_are_foreseen_without_a_download(name: str, tmp_path: Path) -> None:
    home = ModelHome(tmp_path, offline=True)
    found, num_bytes = foresee_model(home, name, "gpu")
    shape = CATALOG[name].shape
    assert found.kv_cache.num_layers == shape.num_layers
    assert len(found.kv_cache.attention_layers) == (shape.num_cached_layers or shape.num_layers)
    assert num_bytes == file_bytes(CATALOG[name])
    npu, npu_bytes = foresee_model(home, name, "npu")
    assert (npu.precision, npu.kv_cache.form) == ("fp16", "static")
    assert npu_bytes > num_bytes


def test_source_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        foresee_model(ModelHome(tmp_path, offline=True), "nobody/nothing", "cpu")
