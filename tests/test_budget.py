from dataclasses import replace

import pytest

from edgespec.budget import (
    RESERVE_BYTES,
    arena_bytes,
    cache_bytes,
    expect_room,
    expect_rooms,
    fitting_context,
    growth_bytes,
    need_of,
    placed,
    texts_bytes,
    total,
)
from edgespec.errors import MemoryExhausted
from edgespec.headroom import HOST, Room
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
    assert placed(need, HOST, {HOST: ROOM}) == {HOST: need.within(ROOM)}
    found = placed(need, "cuda", {HOST: ROOM})
    assert found == {HOST: 40 * MIB, "cuda": 1000 * MIB + need.kv_cache_bytes + need.workspace_bytes}


def test_a_pass_on_a_device_may_take_what_weights_and_cache_leave() -> None:
    need = need_of(MANIFEST, 1000 * MIB)._replace(kv_cache_bytes=500 * MIB, workspace_bytes=50 * MIB)
    assert arena_bytes(need, 4000 * MIB) == 2500 * MIB - RESERVE_BYTES
    assert arena_bytes(need, 1600 * MIB) == 50 * MIB


def test_a_target_and_its_drafter_take_of_each_place_what_lies_there() -> None:
    target, drafter = need_of(MANIFEST, 1000 * MIB), need_of(MANIFEST, 100 * MIB)
    rooms = {HOST: ROOM, "cuda": ROOM}
    apart = total([placed(target, "cuda", rooms), placed(drafter, HOST, rooms)])
    assert apart == {HOST: 40 * MIB + drafter.within(ROOM), "cuda": placed(target, "cuda", rooms)["cuda"]}
    together = total([placed(target, "cuda", rooms), placed(drafter, "cuda", rooms)])
    assert together["cuda"] - apart["cuda"] == 100 * MIB + drafter.kv_cache_bytes + drafter.workspace_bytes
    assert together[HOST] == 80 * MIB


@pytest.mark.parametrize(
    ("free_mib", "said"),
    [
        ({HOST: 8192, "cuda": 512}, r"MiB of the memory of cuda .*\(weights and session 1000, KV cache 112, "),
        (
            {HOST: 100, "cuda": 8192},
            r"about 136 MiB of memory .*\(weights and session 40, reserve 96\) and 100 MiB",
        ),
    ],
)
def test_each_place_is_checked_with_what_it_is_to_hold(free_mib: dict[str, int], said: str) -> None:
    rooms = {place: Room(free * MIB, f"the memory of {place}") for place, free in free_mib.items()}
    with pytest.raises(MemoryExhausted, match=said):
        expect_rooms("qwen", need_of(MANIFEST, 1000 * MIB), "cuda", rooms)


def test_a_place_of_which_nothing_is_known_is_not_checked() -> None:
    expect_rooms("qwen", need_of(MANIFEST, 1000 * MIB), "cuda", {HOST: ROOM})
    with pytest.raises(MemoryExhausted):
        expect_rooms("qwen", need_of(MANIFEST, 1000 * MIB), "cuda", {HOST: ROOM, "cuda": Room(0, "it")})


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


def room_for(manifest: Manifest, num_tokens: int, kv_bytes: int) -> Room:
    limited = replace(manifest, context_length=num_tokens)
    need = need_of(limited, 1000 * MIB, num_tokens)._replace(kv_cache_bytes=kv_bytes)
    return Room(need.within(ROOM) + RESERVE_BYTES, "--memory")


@pytest.mark.parametrize("num_tokens", [1024, 1280, 4096, 30720, 32768])
def test_the_context_is_as_long_as_there_is_room_for(num_tokens: int) -> None:
    room = room_for(MANIFEST, num_tokens, num_tokens * KV.bytes_per_token)
    assert fitting_context(MANIFEST, 1000 * MIB, HOST, {HOST: room}) == num_tokens
    less = room._replace(free_bytes=room.free_bytes - 1)
    shorter = num_tokens - 256 if num_tokens > 1024 else 1024
    assert fitting_context(MANIFEST, 1000 * MIB, HOST, {HOST: less}) == shorter


def test_a_growing_cache_needs_room_for_what_it_held_as_well() -> None:
    """Twice two buffers: of 4096 positions while it makes those of 8192."""
    manifest = replace(MANIFEST, kv_cache=replace(KV, form="growing"))
    room = room_for(manifest, 8192, 2 * (4096 + 8192) * KV.bytes_per_token)
    assert fitting_context(manifest, 1000 * MIB, HOST, {HOST: room}) == 8192
    less = room._replace(free_bytes=room.free_bytes - 1)
    assert fitting_context(manifest, 1000 * MIB, HOST, {HOST: less}) == 7936


def test_the_cache_counts_where_the_target_runs() -> None:
    rooms = {HOST: Room(200 * MIB, "it"), "cuda": room_for(MANIFEST, 4096, 4096 * KV.bytes_per_token)}
    assert 4096 < fitting_context(MANIFEST, 1000 * MIB, "cuda", rooms) < 32768
    del rooms["cuda"]
    assert fitting_context(MANIFEST, 1000 * MIB, "cuda", rooms) == 32768, "of which nothing is known"


def test_a_short_or_static_context_is_what_it_is() -> None:
    nothing = {HOST: Room(0, "it")}
    assert fitting_context(replace(MANIFEST, context_length=300), 0, HOST, nothing) == 300
    static = replace(MANIFEST, kv_cache=replace(KV, form="static"))
    assert fitting_context(static, 0, HOST, nothing) == 32768


def test_each_way_to_draft_from_the_text_takes_less_than_the_one_before() -> None:
    ways = [frozenset({"suffix", "lookahead"}), frozenset({"ngram"}), frozenset[str]()]
    found = [texts_bytes(MANIFEST, names) for names in ways]
    assert found == sorted(set(found), reverse=True)
    assert found[-1] == 0
