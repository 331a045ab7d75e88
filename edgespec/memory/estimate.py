"""The memory that a model takes, in bytes, by its manifest. Pure; shares were measured (docs/log/memory.md)."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from edgespec.config.drafter_names import FRUGAL, MAX_DRAFT_TOKENS
from edgespec.errors import MemoryExhausted
from edgespec.manifest import Manifest
from edgespec.manifest.caches import KVCache
from edgespec.memory.free_memory import HOST, RESERVE_BYTES, Bytes, FreeByPlace, FreeMemory
from edgespec.system.units import format_bytes

# The most that opening a model took, as a multiple of its weights file: resident memory, and address space.
# Kernels repack the weights; half floats they widen (docs/log/memory.md).
_BLOCKS_GROWTH, _HALVES_GROWTH = (1.35, 1.5), (2.4, 2.65)
_FLOATS_GROWTH = {"fp16": _HALVES_GROWTH, "fp32": (1.2, 1.2)}
# A session itself: its code, and in an address space what its threads reserve.
_SESSION_BYTES = (40 << 20, 120 << 20)
# A pass: rows of a chunk, and floats that a row takes in all layers, as multiples of what the manifest knows.
_CHUNK_TOKENS = 256
_HEADS_PER_KV_HEAD = 4
# Each row of a pass over a draft has its logits, and what sampling makes of them.
_LOGITS_COPIES = 3
# Bytes a weight that the exporter writes at most, scales and all.
BYTES_PER_WEIGHT = {"fp32": 4.0, "fp16": 2.0, "int8": 1.125, "int4": 0.75, "w8a16": 3.0}
# A source that is quantised already grows so much: scales of two bytes are written as four.
SOURCE_GROWTH = 1.3
# A token of the text in each drafter that remembers it: an automaton of its suffixes, a pool of n-grams.
_REMEMBERED_BYTES = 1024
_LIMIT_STEP = 16_000_000
# The context that is foreseen before loading; a longer one grows as its text does.
FORESEEN_TOKENS = 2048
# No model is loaded with a shorter context, unless its own is shorter.
_LEAST_CONTEXT = 1024
_CONTEXT_STEP = 256
_FIRST_CAPACITY = 512  # slots of a cache


class WeightsSize(NamedTuple):
    """A model's weights, in bytes.

    A file may hold a table once that two nodes read. It is mapped once, and a device copies it for each.
    """

    file_bytes: int
    device_bytes: int  # as copied to a device: a tensor for each node that reads it
    unpacked_bytes: int = 0  # the largest matrix that a device unpacks for a wide pass


class MemoryEstimate(NamedTuple):
    weights_bytes: int  # resident memory of the weights as kernels want them, and of the session
    address_bytes: int  # address space of weights and session, where mapped files count as a whole
    kv_cache_bytes: int  # for the context that is foreseen
    workspace_bytes: int  # of a pass
    replaced_bytes: int  # shorter KV buffers, which a device holds until a pass after the growth is over
    size: WeightsSize  # the weights as they are stored
    states_bytes: int = 0  # hidden states of the target that are kept for a drafting head, on the host

    def host_bytes(self, free: FreeMemory) -> int:
        """The bytes of the host's memory that the model takes, counted as its free memory is."""
        opened_bytes = self.address_bytes if free.counts_files else self.weights_bytes
        return opened_bytes + self.kv_cache_bytes + self.workspace_bytes + self.states_bytes

    @property
    def device_bytes(self) -> int:
        """The bytes of a device's own memory that the model takes; no device was measured."""
        cache_bytes = self.kv_cache_bytes + self.replaced_bytes
        return self.size.device_bytes + cache_bytes + self.workspace_bytes + self.size.unpacked_bytes


class MemoryNeeds(NamedTuple):
    """The memory that models need, and that is free.

    needed: Bytes by place that a model takes at a context length on a device.
    free_bytes: Bytes by place; a place that is missing is not bounded.
    """

    needed: Callable[[Manifest, int, str], Bytes]
    free_bytes: Mapping[str, int]


def estimate_memory(
    manifest: Manifest,
    size: WeightsSize | int,
    num_tokens: int | None = None,
    max_draft_tokens: int = MAX_DRAFT_TOKENS,
) -> MemoryEstimate:
    """The memory of a model by the size of its weights; of one that is not there yet the size of the file alone.

    num_tokens is the context that is foreseen, 2048 or the model's own unless given; max_draft_tokens is the
    longest draft that it verifies in one pass.
    """
    if isinstance(size, int):
        size = WeightsSize(size, size)
    num_tokens = min(num_tokens or FORESEEN_TOKENS, manifest.context_length)
    kv, opened_bytes = manifest.kv_cache, max(0, size.file_bytes - manifest.gathered_bytes)
    halves_bytes = min(manifest.half_bytes, opened_bytes)
    growth = zip(_FLOATS_GROWTH.get(manifest.precision, _BLOCKS_GROWTH), _HALVES_GROWTH, strict=True)
    resident, addressed = (int(own * (opened_bytes - halves_bytes) + half * halves_bytes) for own, half in growth)
    # The last growth on the way to num_tokens replaces the buffers before it.
    after = next_capacity(0, num_tokens, manifest.context_length)
    before = next_capacity(0, (after + 1) // 2, manifest.context_length)
    return MemoryEstimate(
        resident + _SESSION_BYTES[0],
        addressed + manifest.gathered_bytes + _SESSION_BYTES[1],
        cache_bytes(kv, num_tokens, manifest.context_length),
        workspace_bytes(manifest, num_tokens, max_draft_tokens),
        kv.bytes_per_token * before if kv.form == "shared_buffer" and before < after else 0,
        size,
        states_bytes(manifest, num_tokens),
    )


def bytes_by_place(estimate: MemoryEstimate, place: str, free: FreeByPlace) -> Bytes:
    """The bytes of each place. A device with memory of its own leaves only the session to the host."""
    if place == HOST:
        return {HOST: estimate.host_bytes(free[HOST])}
    on_host = _SESSION_BYTES[free[HOST].counts_files] + estimate.states_bytes
    return {HOST: on_host, place: estimate.device_bytes}


def arena_bytes(estimate: MemoryEstimate, free_bytes: int) -> int:
    """The bytes that a session may take on a device with free_bytes before it is opened: all but a reserve.

    ONNX Runtime counts all that the session takes there: weights, KV cache and what passes take. It subtracts the
    weights from the limit without a check, so that a limit below them is none (docs/log/devices.md).
    """
    return max(estimate.device_bytes, free_bytes - RESERVE_BYTES)


def sum_bytes(parts: Iterable[Bytes]) -> Bytes:
    """The bytes that several models take of each place together."""
    summed: Counter[str] = Counter()
    for part in parts:
        summed.update(part)
    return summed


def fitting_context(
    manifest: Manifest,
    size: WeightsSize | int,
    place: str,
    free: FreeByPlace,
    max_draft_tokens: int = MAX_DRAFT_TOKENS,
) -> int:
    """The longest context that plain decoding has room for beside the reserve; 1024, or the model's own, at least.

    Place is where the device that the model is to run on has its memory.
    """

    def is_short(num_tokens: int) -> bool:
        needed = bytes_by_place(estimate_full_context(manifest, size, num_tokens, max_draft_tokens), place, free)
        return any(
            needed.get(at, 0) + there.reserve.context_bytes > there.free_bytes for at, there in free.items()
        )

    lengths = context_lengths(manifest)
    return lengths[max(0, bisect_left(lengths, True, key=is_short) - 1)]


def context_lengths(manifest: Manifest) -> list[int]:
    """The contexts that a model may be loaded with, up to its own."""
    whole = manifest.context_length
    if manifest.kv_cache.form == "static":
        return [whole]
    return [*range(min(_LEAST_CONTEXT, whole), whole, _CONTEXT_STEP), whole]


def estimate_full_context(
    manifest: Manifest, size: WeightsSize | int, num_tokens: int, max_draft_tokens: int = MAX_DRAFT_TOKENS
) -> MemoryEstimate:
    """Estimate the memory of a model with a context of num_tokens by the time that it is full."""
    if manifest.kv_cache.form == "static":
        return estimate_memory(manifest, size, max_draft_tokens=max_draft_tokens)
    shortened = replace(manifest, context_length=num_tokens)
    estimate = estimate_memory(shortened, size, num_tokens, max_draft_tokens)
    before = next_capacity(0, (num_tokens + 1) // 2, num_tokens)
    if manifest.kv_cache.form == "growing" and before < num_tokens:  # it copies itself to its last capacity
        copied_bytes = cache_bytes(manifest.kv_cache, before, num_tokens)
        estimate = estimate._replace(kv_cache_bytes=copied_bytes + estimate.kv_cache_bytes)
    return estimate


def cache_bytes(kv: KVCache, num_tokens: int, context_length: int) -> int:
    """The size of a KV cache with room for num_tokens positions."""
    if kv.form == "static":
        return kv.bytes_per_token * context_length
    buffers = 2 if kv.form == "growing" else 1  # a growing one has a spare
    return buffers * kv.bytes_per_token * next_capacity(0, num_tokens, context_length) + kv.recurrent_bytes


def fitting_caches(manifest: Manifest, needed: Bytes, place: str, free: FreeByPlace, max_caches: int) -> int:
    """How many KV caches of the context that is foreseen fit in a place beside the reserve, from 1 to max_caches.

    needed: What plain decoding takes with one of them.
    """
    there = free.get(place)
    if there is None:
        return max_caches
    spare_bytes = there.free_bytes - there.reserve.opening_bytes - needed.get(place, 0)
    # A device has a cache for the whole context from the start.
    num_tokens = FORESEEN_TOKENS if place == HOST else manifest.context_length
    each_bytes = cache_bytes(manifest.kv_cache, min(num_tokens, manifest.context_length), manifest.context_length)
    return max(1, min(max_caches, 1 + spare_bytes // each_bytes))


def states_bytes(manifest: Manifest, num_tokens: int) -> int:
    """The bytes of hidden states of num_tokens tokens that a drafting head reads; 0 for other models."""
    if manifest.head is None:
        return 0
    width = len(manifest.head.target_layers) * manifest.head.target_hidden_size
    return 4 * width * next_capacity(0, num_tokens, manifest.context_length)


def growth_bytes(
    kv: KVCache, num_held: int, num_tokens: int, context_length: int, *, on_device: bool = False
) -> int:
    """Extra bytes that the KV cache takes when it grows from room for num_held to room for num_tokens tokens."""
    before = cache_bytes(kv, num_held, context_length)
    after = cache_bytes(kv, max(num_held, num_tokens), context_length)
    # A shared buffer is replaced layer by layer; a growing cache holds old and new at once, and a device's arena
    # gives the old back after a later pass.
    holds_both = kv.form == "growing" or on_device
    return after if holds_both and before != after else after - before


def text_growth_bytes(
    target: Manifest, drafters: Sequence[Manifest], num_held: int, num_tokens: int, *, on_device: bool
) -> int:
    """Memory of a target that a text of num_tokens takes beyond one of num_held, with what heads read of it.

    on_device: The target's cache lies in a device's memory; hidden states lie in the host's.
    """
    grown = growth_bytes(target.kv_cache, num_held, num_tokens, target.context_length, on_device=on_device)
    if on_device:
        return grown
    most = max(num_held, num_tokens)
    return grown + sum(states_bytes(each, most) - states_bytes(each, num_held) for each in drafters)


def workspace_bytes(manifest: Manifest, num_tokens: int, max_draft_tokens: int = MAX_DRAFT_TOKENS) -> int:
    """The bytes of the widest passes: a chunk of a prompt over num_tokens positions, and a draft with logits."""
    rows = min(_CHUNK_TOKENS, num_tokens)
    scores = 4 * rows * num_tokens * manifest.kv_cache.num_kv_heads * _HEADS_PER_KV_HEAD
    return scores + draft_bytes(manifest, max_draft_tokens)


def draft_bytes(manifest: Manifest, max_draft_tokens: int) -> int:
    """Bytes by which passes over drafts exceed passes over one token."""
    return 4 * (max_draft_tokens + 1) * _LOGITS_COPIES * manifest.vocab_size


def texts_bytes(
    manifest: Manifest, names: frozenset[str], max_draft_tokens: int = MAX_DRAFT_TOKENS, max_guesses: int = 0
) -> int:
    """The bytes that drafting from the text takes: wide passes, and what is remembered of it.

    max_guesses: Tokens in the window of lookahead.
    """
    if not names:
        return 0
    if "lookahead" in names:
        max_draft_tokens = max(max_draft_tokens, max_guesses)
    num_remembered = min(FORESEEN_TOKENS, manifest.context_length) * len(names - FRUGAL)
    return draft_bytes(manifest, max_draft_tokens) + _REMEMBERED_BYTES * num_remembered


def require_memory(name: str, estimate: MemoryEstimate, place: str, free: FreeByPlace) -> None:
    """Raises MemoryExhausted: not even plain decoding on the device of a place fits, there or on the host.

    What a user asked for may take of the reserve of a machine or a device; only what makes it faster leaves that.
    """
    for at, num_bytes in bytes_by_place(estimate, place, free).items():
        needed_bytes, there = num_bytes + RESERVE_BYTES, free.get(at)
        if there is None or needed_bytes <= there.free_bytes:
            continue
        parts = _list_parts(estimate, at, place, num_bytes)
        raise MemoryExhausted(
            _shortage(name, needed_bytes, parts, "memory" if at == HOST else f"the memory of {at}", there),
            needed_bytes=needed_bytes,
            free_bytes=there.free_bytes,
        )


def _shortage(name: str, needed_bytes: int, parts: str, memory: str, free: FreeMemory) -> str:
    """A line with the needed and the free bytes; where a user gave a limit, the least that would do."""
    smaller = "use a smaller model or one in fewer bits (edgespec export --precision int4)"
    needed = format_bytes(needed_bytes, decimals=2)
    if free.used_bytes is not None:
        # A little more, since what a process holds varies.
        least = -(-(free.used_bytes + needed_bytes) // _LIMIT_STEP) * _LIMIT_STEP
        return (
            f"the memory limit is too low for {name}: give at least --memory {least // 10**6}M, or {smaller}. "
            f"Plain decoding takes about {needed} ({parts}) beside the {format_bytes(free.used_bytes)} that this "
            "process holds already"
        )
    return (
        f"{name} needs about {needed} of {memory} for plain decoding ({parts}), but "
        f"{format_bytes(free.free_bytes, decimals=2)} are free within {free.bound}; {smaller}, raise the limit, "
        "or close other programs"
    )


def _list_parts(estimate: MemoryEstimate, at: str, place: str, num_bytes: int) -> str:
    """The parts of what a model on the device of a place takes at another, or there."""
    cache_bytes = work_bytes = 0
    if at == place:
        cache_bytes, work_bytes = estimate.kv_cache_bytes, estimate.workspace_bytes
        if place != HOST:
            cache_bytes += estimate.replaced_bytes
            work_bytes += estimate.size.unpacked_bytes
    parts = {
        "weights and session": num_bytes - cache_bytes - work_bytes,
        "KV cache": cache_bytes,
        "workspace": work_bytes,
        "reserve": RESERVE_BYTES,
    }
    return ", ".join(f"{name} {format_bytes(part)}" for name, part in parts.items() if part)


def next_capacity(capacity: int, needed: int, context_length: int) -> int:
    """The next buffer length that holds needed positions: 512 or more, doubled, and never past the context."""
    capacity = max(capacity, _FIRST_CAPACITY)
    while capacity < needed:
        capacity *= 2
    return min(capacity, context_length)
