from dataclasses import replace

import pytest
from made_up import manifest

from edgespec.errors import MemoryExhausted
from edgespec.manifest import Head, Manifest
from edgespec.manifest.caches import KVCache
from edgespec.memory.estimate import (
    WeightsSize,
    arena_bytes,
    bytes_by_place,
    cache_bytes,
    estimate_full_context,
    estimate_memory,
    fitting_caches,
    fitting_context,
    growth_bytes,
    next_capacity,
    require_memory,
    states_bytes,
    sum_bytes,
    texts_bytes,
)
from edgespec.memory.free_memory import HOST, RESERVE_BYTES, FreeMemory, Reserve

MIB = 1 << 20
KV = KVCache(num_layers=28, num_kv_heads=2, head_dim=128)  # of Qwen2.5-1.5B: 56 KiB a token
MANIFEST = replace(manifest("qwen", 32768), kv_cache=KV, vocab_size=151936)
ROOM = FreeMemory(8 << 30, "the memory of this machine")
# Its embedding is its head, and its largest matrix is unpacked in slices.
SIZE = WeightsSize(1000 * MIB, 1233 * MIB, 256 * MIB)


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


# The most memory and address space that opening the model took, MiB (docs/log/memory.md).
MEASURED = {
    ("source", 101.4): (178, 271),
    ("int4", 101.4): (178, 270),
    ("int8", 146.5): (221, 313),
    ("fp16", 258.7): (655, 776),
    ("fp32", 515.2): (633, 699),
    ("int4", 1145.6): (1526, 1754),
    ("source", 1335.1): (1818, 2046),
    ("source in bf16", 258.7): (555, 785),
    ("source in bf16", 944.3): (2024, 2622),
}


@pytest.mark.parametrize("model", MEASURED, ids=str)
def test_what_opening_takes_is_foreseen_within_a_fifth(model: tuple[str, float]) -> None:
    (precision, *stored), file_bytes = model[0].split(), int(model[1] * MIB)
    half_bytes = file_bytes if stored else 0
    estimate = estimate_memory(replace(MANIFEST, precision=precision, half_bytes=half_bytes), file_bytes)
    for foreseen_bytes, taken_mib in zip(estimate[:2], MEASURED[model], strict=True):
        assert 0.98 < foreseen_bytes / MIB / taken_mib < 1.2


@pytest.mark.parametrize("max_draft_tokens", [24, 64])
def test_the_longest_draft_that_is_asked_for_has_its_rows_of_logits(max_draft_tokens: int) -> None:
    """Each row of a pass over a draft is there three times: logits, noise, and what sampling makes of them."""
    rows_bytes = 4 * 3 * (max_draft_tokens + 1) * MANIFEST.vocab_size
    shortest = estimate_memory(MANIFEST, 0, 256, max_draft_tokens=0)
    asked = estimate_memory(MANIFEST, 0, 256, max_draft_tokens=max_draft_tokens)
    assert asked.workspace_bytes - shortest.workspace_bytes == rows_bytes - 4 * 3 * MANIFEST.vocab_size
    assert texts_bytes(MANIFEST, frozenset({"ngram"}), max_draft_tokens) == rows_bytes


def test_an_address_space_counts_more() -> None:
    estimate = estimate_memory(MANIFEST, 1000 * MIB)
    assert estimate.host_bytes(ROOM._replace(counts_files=True)) - estimate.host_bytes(ROOM) == 230 * MIB


def test_a_shorter_context_needs_less() -> None:
    assert estimate_memory(MANIFEST, 0, 512).host_bytes(ROOM) < estimate_memory(MANIFEST, 0).host_bytes(ROOM)
    assert estimate_memory(MANIFEST, 0, 10**9) == estimate_memory(MANIFEST, 0, 32768)


def test_a_device_of_its_own_leaves_the_host_little() -> None:
    estimate = estimate_memory(MANIFEST, 1000 * MIB)
    assert bytes_by_place(estimate, HOST, {HOST: ROOM}) == {HOST: estimate.host_bytes(ROOM)}
    found = bytes_by_place(estimate, "cuda", {HOST: ROOM})
    assert found == {HOST: 40 * MIB, "cuda": estimate.device_bytes}
    # 2048 positions, and the 1024 that they replace.
    assert estimate.device_bytes == 1000 * MIB + 3072 * KV.bytes_per_token + estimate.workspace_bytes


def test_a_table_that_two_nodes_read_is_twice_on_a_device_and_once_on_the_host() -> None:
    once, twice = (estimate_memory(MANIFEST, each) for each in (1000 * MIB, SIZE))
    assert once.host_bytes(ROOM) == twice.host_bytes(ROOM)
    assert twice.device_bytes - once.device_bytes == 233 * MIB + 256 * MIB


def test_a_session_on_a_device_may_take_all_but_a_reserve_and_never_less_than_it_needs() -> None:
    estimate = estimate_memory(MANIFEST, SIZE, 32768)
    assert arena_bytes(estimate, 8000 * MIB) == 8000 * MIB - RESERVE_BYTES
    assert arena_bytes(estimate, 1600 * MIB) == estimate.device_bytes > SIZE.device_bytes
    assert growth_bytes(KV, 700, 3000, 32768, on_device=True) == 4096 * KV.bytes_per_token
    assert growth_bytes(KV, 700, 800, 32768, on_device=True) == 0


def test_a_context_that_fits_a_device_fits_while_its_cache_grows() -> None:
    rooms = {HOST: ROOM, "cuda": FreeMemory(4096 * MIB, "the memory of cuda")}
    fitting = fitting_context(MANIFEST, SIZE, "cuda", rooms)
    needed = estimate_full_context(MANIFEST, SIZE, fitting).device_bytes
    assert needed + RESERVE_BYTES <= 4096 * MIB < needed + RESERVE_BYTES + 4096 * KV.bytes_per_token
    assert next_capacity(0, fitting // 2, fitting) < fitting < 32768


def test_a_target_and_its_drafter_take_of_each_place_what_lies_there() -> None:
    target, drafter = estimate_memory(MANIFEST, 1000 * MIB), estimate_memory(MANIFEST, 100 * MIB)
    rooms = {HOST: ROOM, "cuda": ROOM}
    apart = sum_bytes([bytes_by_place(target, "cuda", rooms), bytes_by_place(drafter, HOST, rooms)])
    assert apart == {
        HOST: 40 * MIB + drafter.host_bytes(ROOM),
        "cuda": bytes_by_place(target, "cuda", rooms)["cuda"],
    }
    together = sum_bytes([bytes_by_place(target, "cuda", rooms), bytes_by_place(drafter, "cuda", rooms)])
    assert together["cuda"] - apart["cuda"] == drafter.device_bytes
    assert together[HOST] == 80 * MIB


@pytest.mark.parametrize(
    ("free_mib", "said"),
    [
        ({HOST: 8192, "cuda": 512}, r"GB of the memory of cuda .*\(weights and session 1.0 GB, KV cache 176 MB, "),
        (
            {HOST: 100, "cuda": 8192},
            r"about 143 MB of memory .*\(weights and session 42 MB, reserve 101 MB\), but 105 MB",
        ),
    ],
)
def test_each_place_is_checked_with_what_it_is_to_hold(free_mib: dict[str, int], said: str) -> None:
    rooms = {place: FreeMemory(free * MIB, f"the memory of {place}") for place, free in free_mib.items()}
    with pytest.raises(MemoryExhausted, match=said):
        require_memory("qwen", estimate_memory(MANIFEST, 1000 * MIB), "cuda", rooms)


def test_a_place_of_which_nothing_is_known_is_not_checked() -> None:
    require_memory("qwen", estimate_memory(MANIFEST, 1000 * MIB), "cuda", {HOST: ROOM})
    with pytest.raises(MemoryExhausted):
        require_memory(
            "qwen", estimate_memory(MANIFEST, 1000 * MIB), "cuda", {HOST: ROOM, "cuda": FreeMemory(0, "it")}
        )


def test_what_does_not_fit_is_said_with_figures_and_a_way_out() -> None:
    estimate = estimate_memory(MANIFEST, 1000 * MIB)
    require_memory("qwen", estimate, HOST, {HOST: FreeMemory(estimate.host_bytes(ROOM) + RESERVE_BYTES, "x")})
    with pytest.raises(
        MemoryExhausted, match=r"needs about \S+ [MG]B .* 537 MB are free within memory_limit=; use"
    ) as caught:
        require_memory("qwen", estimate, HOST, {HOST: FreeMemory(512 * MIB, "--memory")})
    assert caught.value.free_bytes == 512 * MIB
    assert caught.value.needed_bytes == estimate.host_bytes(ROOM) + RESERVE_BYTES
    assert caught.value.exit_code == 5


def room_for(manifest: Manifest, num_tokens: int, kv_bytes: int) -> FreeMemory:
    limited = replace(manifest, context_length=num_tokens)
    estimate = estimate_memory(limited, 1000 * MIB, num_tokens)._replace(kv_cache_bytes=kv_bytes)
    return FreeMemory(estimate.host_bytes(ROOM) + RESERVE_BYTES, "--memory")


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
    rooms = {HOST: FreeMemory(200 * MIB, "it"), "cuda": room_for(MANIFEST, 4096, 4096 * KV.bytes_per_token)}
    assert 4096 < fitting_context(MANIFEST, 1000 * MIB, "cuda", rooms) < 32768
    del rooms["cuda"]
    assert fitting_context(MANIFEST, 1000 * MIB, "cuda", rooms) == 32768, "of which nothing is known"


def test_a_short_or_static_context_is_what_it_is() -> None:
    nothing = {HOST: FreeMemory(0, "it")}
    assert fitting_context(replace(MANIFEST, context_length=300), 0, HOST, nothing) == 300
    static = replace(MANIFEST, kv_cache=replace(KV, form="static"))
    assert fitting_context(static, 0, HOST, nothing) == 32768


def test_each_way_to_draft_from_the_text_takes_less_than_the_one_before() -> None:
    ways = [frozenset({"suffix", "lookahead"}), frozenset({"suffix"}), frozenset({"ngram"}), frozenset[str]()]
    found = [texts_bytes(MANIFEST, names) for names in ways]
    assert found == sorted(set(found), reverse=True)
    assert found[-1] == 0


def test_head_counts_the_hidden_states_of_its_target() -> None:
    head = Head(method="eagle3", kind="recurrent", target_layers=(1, 5), target_hidden_size=100, state_size=100)
    with_states = replace(MANIFEST, head=head)
    assert states_bytes(MANIFEST, 600) == 0
    assert states_bytes(with_states, 600) == 4 * 200 * 1024
    for place in (HOST, "gpu"):  # they are the host's, wherever the head runs
        free = {HOST: ROOM, place: ROOM}
        without, needed = (
            bytes_by_place(estimate_memory(each, SIZE, 600), place, free) for each in (MANIFEST, with_states)
        )
        assert needed[HOST] - without[HOST] == states_bytes(with_states, 600)


def test_as_many_caches_fit_as_memory_has_space_for_beside_the_reserve() -> None:
    reserve = Reserve(100, 50)
    each = cache_bytes(KV, 2048, MANIFEST.context_length)
    for spare, num in ((-each, 1), (0, 1), (each, 2), (2 * each + 1, 3), (99 * each, 4)):
        free = {HOST: FreeMemory(1000 + 100 + spare, "a test", reserve=reserve)}
        assert fitting_caches(MANIFEST, {HOST: 1000}, HOST, free, 4) == num
    assert fitting_caches(MANIFEST, {HOST: 1000}, "a device that is not read", free, 4) == 4
