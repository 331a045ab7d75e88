"""What is foreseen of a model, compared with what its export makes."""

from pathlib import Path

import pytest

from edgespec.errors import ModelError
from edgespec.export.convert import export_model
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
    assert (found.form, found.precision) == (made.form, made.precision)
    assert (found.vocab_size, found.context_length) == (made.vocab_size, made.context_length)
    assert found.tree_graph == made.tree_graph
    kv_cache = found.kv_cache
    assert (kv_cache.form, kv_cache.num_layers, kv_cache.num_kv_heads, kv_cache.head_dim) == (
        made.kv_cache.form, made.kv_cache.num_layers, made.kv_cache.num_kv_heads, made.kv_cache.head_dim,
    )  # fmt: skip
    # Rotary tables lie beside the weights, which shows in a model as small as this one alone.
    assert num_bytes > 0.5 * (tmp_path / "made" / made.weights).stat().st_size
    assert not (tmp_path / "models").exists()


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
