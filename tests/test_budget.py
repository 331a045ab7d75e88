from dataclasses import replace

import pytest

from edgespec.budget import RESERVE_BYTES, cache_bytes, expect_room, growth_bytes, need_of, placed, texts_bytes
from edgespec.errors import MemoryExhausted
from edgespec.headroom import Room
from edgespec.manifest import KVCache, Manifest, Source

MIB = 1 << 20
KV = KVCache(num_layers=28, num_kv_heads=2, head_dim=128)  # of Qwen2.5-1.5B: 56 KiB a token
MANIFEST = Manifest(
    name="qwen",
    architecture="qwen2",
    precision="int4",
    context_length=32768,
    kv_cache=KV,
    vocab_size=151936,
    vocab_sha256="",
    bos_token_id=None,
    eos_token_ids=(),
    add_bos=False,
    source=Source(name="qwen", format="gguf", sha256=""),
)
ROOM = Room(8 << 30, "the memory of this machine")


@pytest.mark.parametrize(
    ("form", "dtype", "wanted"),
    [("shared_buffer", "float32", 1), ("shared_buffer", "float16", 0.5), ("growing", "float32", 2)],
)
def test_a_cache_takes_what_its_form_holds(form: str, dtype: str, wanted: float) -> None:
    kv = replace(KV, form=form, dtype=dtype)
    assert cache_bytes(kv, 4096, 32768) == wanted * 4096 * 56 * 1024


def test_a_static_cache_is_of_the_whole_context_at_once() -> None:
    kv = replace(KV, form="static")
    assert cache_bytes(kv, 1, 2048) == cache_bytes(kv, 2048, 2048) == 2048 * kv.bytes_per_token
    assert growth_bytes(kv, 1, 2048, 2048) == 0


@pytest.mark.parametrize(
    ("num_held", "num_tokens", "wanted"),
    [(0, 100, 0), (400, 512, 0), (512, 513, 512), (700, 3000, 3072), (20000, 30000, 0), (4000, 40000, 28672)],
)
def test_a_shared_buffer_grows_by_doubling_up_to_the_context(num_held: int, num_tokens: int, wanted: int) -> None:
    assert growth_bytes(KV, num_held, num_tokens, 32768) == wanted * KV.bytes_per_token


def test_a_growing_cache_holds_the_old_while_it_makes_the_new() -> None:
    kv = replace(KV, form="growing")
    assert growth_bytes(kv, 512, 513, 32768) == 2 * 1024 * kv.bytes_per_token


# Measured: the most that opening the model took of memory and of address space, MiB (docs/log.md, 2026-11-21).
MEASURED = {
    ("source", 101.4): (178, 271),
    ("int4", 101.4): (178, 270),
    ("int8", 146.5): (221, 313),
    ("fp16", 258.7): (655, 776),
    ("fp32", 515.2): (633, 699),
    ("int4", 1145.6): (1526, 1754),
    ("source", 1335.1): (1818, 2046),
}


@pytest.mark.parametrize("model", MEASURED, ids=str)
def test_what_opening_takes_is_foreseen_within_a_fifth(model: tuple[str, float]) -> None:
    precision, file_mib = model
    need = need_of(replace(MANIFEST, precision=precision), int(file_mib * MIB))
    for foreseen_bytes, taken_mib in zip(need[:2], MEASURED[model], strict=True):
        assert 0.98 < foreseen_bytes / MIB / taken_mib < 1.2


def test_an_address_space_counts_more() -> None:
    need = need_of(MANIFEST, 1000 * MIB)
    assert need.within(ROOM._replace(counts_files=True)) - need.within(ROOM) == 230 * MIB


def test_a_shorter_context_needs_less() -> None:
    assert need_of(MANIFEST, 0, 512).within(ROOM) < need_of(MANIFEST, 0).within(ROOM)
    assert need_of(MANIFEST, 0, 10**9) == need_of(MANIFEST, 0, 32768)


def test_a_device_of_its_own_leaves_the_host_little() -> None:
    need = need_of(MANIFEST, 1000 * MIB)
    assert placed(need, ROOM, is_on_host=True) == (need.within(ROOM), 0)
    host_bytes, device_bytes = placed(need, ROOM, is_on_host=False)
    assert host_bytes < 100 * MIB < 1000 * MIB < device_bytes


def test_what_does_not_fit_is_said_with_figures_and_a_way_out() -> None:
    need = need_of(MANIFEST, 1000 * MIB)
    expect_room("qwen", need, Room(need.within(ROOM) + RESERVE_BYTES, "x"))
    with pytest.raises(
        MemoryExhausted, match=r"needs about \d+ MiB .* 512 MiB are free within --memory; use"
    ) as caught:
        expect_room("qwen", need, Room(512 * MIB, "--memory"))
    assert caught.value.free_bytes == 512 * MIB
    assert caught.value.needed_bytes == need.within(ROOM) + RESERVE_BYTES
    assert caught.value.exit_code == 5


def test_each_way_to_draft_from_the_text_takes_less_than_the_one_before() -> None:
    ways = [frozenset({"suffix", "lookahead"}), frozenset({"ngram"}), frozenset[str]()]
    found = [texts_bytes(MANIFEST, names) for names in ways]
    assert found == sorted(set(found), reverse=True)
    assert found[-1] == 0
