"""Models whose last layers read the keys and values of earlier ones, and whose heads have two sizes (Gemma 4)."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import tiny
from calls import decoder
from families import FAMILIES, weights_of

from edgespec import load
from edgespec.errors import ManifestError, UsageError
from edgespec.export.convert import export_model
from edgespec.export.options import Trimming
from edgespec.manifest import parse_manifest, read_manifest
from edgespec.manifest.caches import OtherHeads
from edgespec.memory.estimate import cache_bytes, estimate_memory
from edgespec.setup.open_model import self_drafter
from edgespec.system.typed_json import read_json

TOKENS = np.random.default_rng(3).integers(0, tiny.VOCAB, 600).astype(np.int32)
PER_TOKEN = 2 * (16 + 16 + 32)  # keys and values of the three layers that have some


def test_keys_and_values_are_held_once(sharing_model: Path) -> None:
    kv = read_manifest(sharing_model).kv_cache
    assert kv.attention_layers == (0, 1, 2)
    assert kv.sharing_layers == (3, 4, 5, 6)
    assert kv.numbers_per_token == PER_TOKEN
    assert cache_bytes(kv, 512, 1024) == 512 * PER_TOKEN * 4
    used = decoder(sharing_model)
    used.logits(TOKENS[:30], 1)
    assert [value.shape() for value in used._passes.cache.buffers[::2]] == [  # type: ignore[union-attr]
        [1, 1, 512, 16], [1, 1, 512, 16], [1, 1, 512, 32],
    ]  # fmt: skip
    graph = ir.load(sharing_model / "model.onnx").graph
    assert sum(value.name.startswith("past_") for value in graph.inputs) == 6


def test_what_a_text_left_grows_and_is_copied_and_put_back(sharing_model: Path) -> None:
    used, fresh, other = decoder(sharing_model), decoder(sharing_model), decoder(sharing_model)
    for stop in (500, 511, 513, 600):
        used.logits(TOKENS[:stop], 1)
    wanted = fresh.logits(TOKENS, 3)
    assert np.array_equal(used.logits(TOKENS, 3), wanted)
    fork = used.fork()
    assert fork.copy_prefix(used, TOKENS[:590])
    held, values = used.read_prefix()
    assert values.shape == (1, 1, 600, PER_TOKEN)
    other.fill_prefix(held, values)
    for each in (fork, other):
        assert np.array_equal(each.logits(TOKENS, 3), wanted)
        assert each.num_fed < 20


def test_a_drafter_of_some_layers_has_those_whose_keys_they_read(tmp_path: Path) -> None:
    tiny.write_huggingface(
        tmp_path / "hf", weights_of("gemma4-shared"), config=FAMILIES["gemma4-shared"]["config"]
    )
    with pytest.raises(UsageError, match="layer 4 reads the keys and values of layer 1; keep that one too"):
        export_model(tmp_path / "hf", tmp_path / "no", trimming=Trimming(keep=frozenset({0, 4})))
    export_model(tmp_path / "hf", tmp_path / "out", precision="fp32", trimming=Trimming(keep=frozenset({0, 2, 5})))
    drafter = self_drafter(whole := read_manifest(tmp_path / "out"))
    kv = drafter.kv_cache
    assert (kv.sharing_layers, kv.attention_layers, kv.head_dims) == ((2,), (0, 1), {16, 32})
    assert 7 * drafter.gathered_bytes == 3 * whole.gathered_bytes > 0
    assert estimate_memory(whole, 0).weights_bytes == estimate_memory(drafter, 0).weights_bytes
    texts = {
        name: load(tmp_path / "out", drafter=name, device="cpu").generate("the", max_tokens=12).token_ids
        for name in ("none", "self")
    }
    assert texts["self"] == texts["none"]


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int4"])
def test_embeddings_of_layers_count_as_read_by_rows(tmp_path: Path, precision: str) -> None:
    tiny.write_huggingface(
        tmp_path / "hf", weights_of("gemma4-shared"), config=FAMILIES["gemma4-shared"]["config"]
    )
    manifest = export_model(tmp_path / "hf", tmp_path / "out", precision=precision)
    tables = {
        name: value.const_value
        for name, value in ir.load(tmp_path / "out" / "model.onnx").graph.initializers.items()
        if name.startswith("layer_embedding")
    }
    written = {table.offset: table.length for table in tables.values() if isinstance(table, ir.ExternalTensor)}
    assert manifest.gathered_bytes == sum(length or 0 for length in written.values()) > 269 * 7 * 32
    held, all_read = (
        estimate_memory(replace(manifest, gathered_bytes=num), 1 << 30) for num in (manifest.gathered_bytes, 0)
    )
    assert held.weights_bytes <= all_read.weights_bytes - manifest.gathered_bytes
    assert held.address_bytes < all_read.address_bytes or precision == "fp32"


def test_a_manifest_that_contradicts_itself_is_refused(sharing_model: Path) -> None:
    stated = read_json(sharing_model / "edgespec.json", 1 << 20)
    for change in (
        {"sharing_layers": [0, 1, 2, 3, 4, 5, 6]},
        {"sharing_layers": [7]},
        {"other_heads": {"layers": [9], "num_kv_heads": 1, "head_dim": 32}},
        {"form": "growing"},
    ):
        with pytest.raises(ManifestError, match=r"shared_buffer|names layers"):
            parse_manifest(sharing_model, {**stated, "kv_cache": {**stated["kv_cache"], **change}})
    kv = read_manifest(sharing_model).kv_cache
    assert kv.of_layers((1, 2, 4)) == replace(
        kv, num_layers=3, sharing_layers=(2,), other_heads=OtherHeads(layers=(1,), num_kv_heads=1, head_dim=32)
    )
