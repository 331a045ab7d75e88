"""What the catalogue says, against what follows from it."""

import re
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from edgespec.config.options import DEFAULT_MODEL
from edgespec.config.presets import Preset
from edgespec.setup.catalog import CATALOG, CatalogEntry, CatalogFile, HubRepository
from edgespec.setup.foresee import bytes_of_shape, file_bytes, memory_bytes
from edgespec.setup.home import ModelHome
from edgespec.setup.repository import parse_hub_id
from edgespec.setup.resolve import resolve
from edgespec.setup.wish import Wish

# The vision tower and its projection, fetched with the text part and left out of the export; and norms of
# queries and keys where not all layers have the same ones.
OTHER_PARTS = {
    "gemma-3-4b": 416_866_032 + 1152 * 2560 + 1152,
    "gemma-4-e2b": 40 * 256 + 10 * 512 + 256,
    "gemma-4-e4b": 55 * 256 + 11 * 512 + 256,
}


def num_vectors(name: str, entry: CatalogEntry) -> int:
    """Weights of a layer that are no matrix: norms, and biases of the attention where the family has them."""
    shape = entry.shape
    if name.startswith("gemma-3"):
        return 4 * shape.hidden_size + 2 * shape.head_dim
    if name.startswith("gemma-4"):
        return 5 * shape.hidden_size + 1
    if name.startswith("qwen2.5"):
        return 2 * shape.hidden_size + (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    if name.startswith("gpt-oss"):  # biases of experts of gate and up, and down, and one sink a head
        biases = 32 * (3 * shape.hidden_size + 1) + 2 * shape.hidden_size + shape.num_heads
        return biases + (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim + shape.hidden_size
    if name.startswith(
        "qwen3.5"
    ):  # in the mean of layers with a state, of 32 heads of 128 values, and with attention
        others = (128 + 2 * 32) * (shape.num_layers - shape.num_cached_layers)
        convolutions = 4 * (2 * 16 + 32) * 128 * (shape.num_layers - shape.num_cached_layers)
        return 2 * shape.hidden_size + (others + convolutions + 512 * shape.num_cached_layers) // shape.num_layers
    if name.startswith("lfm2"):  # in the mean of layers with a convolution of three tokens, and with attention
        num_convolutions = shape.num_layers - shape.num_cached_layers
        others = 3 * shape.hidden_size * num_convolutions + 2 * shape.head_dim * shape.num_cached_layers
        return 2 * shape.hidden_size + others // shape.num_layers
    return 2 * shape.hidden_size + (2 * shape.head_dim if name.startswith("qwen3") else 0)


@pytest.mark.parametrize("name", CATALOG)
def test_shape_gives_the_published_number_of_parameters(name: str) -> None:
    entry = CATALOG[name]
    shape = entry.shape
    counted = shape.num_matrix_weights + shape.num_vocabulary_weights + shape.num_gathered
    counted += shape.num_layers * num_vectors(name, entry) + shape.hidden_size
    assert counted + OTHER_PARTS.get(name, 0) == entry.num_parameters


@pytest.mark.parametrize("name", CATALOG)
def test_fields_of_an_entry_have_their_types(name: str) -> None:
    entry = CATALOG[name]
    sources = entry.source.sources if isinstance(entry.source, CatalogFile) else ()
    for part in (entry, entry.shape, entry.source, *sources):
        kinds = get_type_hints(type(part)) | {"sources": tuple}
        assert all(isinstance(getattr(part, field.name), kinds[field.name]) for field in fields(part))


@pytest.mark.parametrize("name", CATALOG)
def test_entry_is_pinned_and_its_drafter_is_a_smaller_one_of_the_catalogue(name: str) -> None:
    entry = CATALOG[name]
    if isinstance(entry.source, HubRepository):
        assert re.fullmatch("[0-9a-f]{40}|main", entry.source.revision)
        assert not (entry.was_run and entry.source.revision == "main"), "of another day"
        assert parse_hub_id(entry.source.repository) is not None
    if entry.gguf:
        assert entry.precision == "int4", "which it takes the place of"
        assert (named := parse_hub_id(entry.gguf)) is not None
        assert named.choice == ("q4_0" if "-qat-" in entry.gguf else "q4_k_m")
        assert not entry.is_gated
    if entry.drafter is not None:
        drafter = CATALOG[entry.drafter]
        assert 2 * drafter.num_parameters < entry.num_parameters
        assert abs(drafter.shape.vocab_size - entry.shape.vocab_size) <= 128  # padded, each in its own way


def test_newcomers_are_given_a_reason_and_a_model_that_fits_each_machine() -> None:
    advised = {name: entry for name, entry in CATALOG.items() if entry.machine_gb}
    assert {entry.machine_gb for entry in advised.values()} == {8, 16, 32}
    for entry in advised.values():
        assert 0 < len(entry.reason) < 60
        assert memory_bytes(entry) < 0.8e9 * entry.machine_gb
    assert CATALOG["minicpm5-2b"].head == "openbmb/MiniCPM5-2B-DSpark"
    heads = {name: CATALOG[name].head for name in ("qwen3.5-4b", "qwen3-8b")}
    assert heads == {"qwen3.5-4b": "mtp", "qwen3-8b": "z-lab/Qwen3-8B-DFlash-b16"}
    assert CATALOG["qwen2.5-7b"].head is None


def test_forecast_of_a_known_export_is_an_upper_bound() -> None:
    """Weights of Qwen2.5-Coder-1.5B in int4, as export wrote them: 1,201,264,000 bytes."""
    assert 1_201_264_000 <= file_bytes(CATALOG["qwen2.5-coder-1.5b"]) < 1.06 * 1_201_264_000
    shape = CATALOG["qwen2.5-coder-1.5b"].shape
    assert bytes_of_shape(shape, "int4") < bytes_of_shape(shape, "int8") < bytes_of_shape(shape, "fp16")


def test_experts_in_four_bits_are_foreseen_by_what_their_kernel_takes() -> None:
    """Two layers of gpt-oss-20b in int4 took 2,069 MB as export wrote them (docs/log/exactness.md)."""
    entry = CATALOG["gpt-oss-20b"]
    shape = replace(entry.shape, num_layers=2, other_weights=entry.shape.other_weights // 12, context_length=8192)
    assert 2_069_000_000 <= bytes_of_shape(shape, "int4") < 1.2 * 2_069_000_000
    from_gguf = CATALOG["qwen3-30b-a3b"]  # whose experts take 8 bits
    assert file_bytes(from_gguf) > 1.7 * bytes_of_shape(from_gguf.shape, "int4")


def test_memory_grows_with_the_model() -> None:
    names = ["smollm2-135m", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b"]
    needed = [memory_bytes(CATALOG[name]) for name in names]
    assert needed == sorted(needed)
    assert all(memory_bytes(each) > file_bytes(each) - 1.1 * each.shape.num_gathered for each in CATALOG.values())


def test_auto_hears_the_drafter_of_the_catalogue_once_it_is_prepared(
    home_with_pair: ModelHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def heard(model: str, drafter: str) -> list[tuple[str, ...]]:
        named: dict[str, Any] = {
            "drafter": drafter,
            "device": "cpu",
            "drafter_device": "cpu",
            "home": home_with_pair.path,
        }
        wish = Wish(model=model, **named, offline=True)
        return [each.models for each in resolve(wish).names.cascades]

    assert heard("big", "auto") == [("small",)]
    assert heard("big", "auto+small") == [("small",)]
    assert heard("big", "suffix") == heard("small", "auto") == []
    home_with_pair.presets.write(Preset(name="poet", model="big"))
    assert heard("poet", "auto") == [("small",)]
    shutil.copytree(home_with_pair.models / "big", tmp_path / "big")
    with monkeypatch.context() as elsewhere:
        elsewhere.chdir(tmp_path)
        assert heard("big", "auto") == [], "the folder of that name is another model"
    (home_with_pair.models / "small" / "edgespec.json").unlink()
    assert heard("big", "auto") == []


@pytest.fixture
def home_with_pair(
    tiny_model: object, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> ModelHome:
    home = ModelHome(tmp_path_factory.mktemp("home"), offline=True)
    source = CATALOG[DEFAULT_MODEL]
    assert isinstance(source.source, CatalogFile)
    for name, drafter in (("big", "small"), ("small", None)):
        shutil.copytree(str(tiny_model), home.models / name)
        monkeypatch.setitem(CATALOG, name, replace(source, drafter=drafter))
    return home
