"""The memory that a model takes, in bytes, by its manifest. Pure; shares were measured (docs/log/memory.md)."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from edgespec.decoding.cached_prefix import next_capacity
from edgespec.errors import MemoryExhausted
from edgespec.manifest import KVCache, Manifest
from edgespec.memory.free_memory import HOST, FreeByPlace, FreeMemory
from edgespec.memory.ladder import Bytes
from edgespec.memory.reserve import RESERVE_BYTES
from edgespec.policy.limits import MAX_DRAFT_TOKENS

# The most that opening a model took, as a multiple of its weights file: resident memory, and address space.
# Kernels repack the weights; half floats they widen (docs/log/memory.md).
_BLOCKS_GROWTH = (1.35, 1.5)
_FLOATS_GROWTH = {"fp16": (2.4, 2.55), "fp32": (1.2, 1.2)}
# A session itself: its code, and in an address space what its threads reserve.
_SESSION_BYTES = (40 << 20, 120 << 20)
# A pass: rows of a chunk, and floats that a row takes in all layers, as multiples of what the manifest knows.
_CHUNK_TOKENS = 256
_HEADS_PER_KV_HEAD = 4
# The most tokens that a draft has unless --draft-length asks for more; each row of its pass has its logits and
# what sampling makes of them.
_LOGITS_COPIES = 3
# Bytes a weight that the exporter writes at most, scales and all.
BYTES_PER_WEIGHT = {"fp32": 4.0, "fp16": 2.0, "int8": 1.125, "int4": 0.75, "w8a16": 3.0}
# A source that is quantised already grows so much: scales of two bytes are written as four.
SOURCE_GROWTH = 1.3
# A token of the text in each drafter that remembers it: an automaton of its suffixes, a pool of n-grams.
_REMEMBERED_BYTES = 1024
_LIMIT_STEP = 16 << 20
# The context that is foreseen before loading; a longer one grows as its text does.
FORESEEN_TOKENS = 2048
# No model is loaded with a shorter context, unless its own is shorter.
_LEAST_CONTEXT = 1024
_CONTEXT_STEP = 256


class MemoryEstimate(NamedTuple):
    """What a model takes."""

    weights_bytes: int  # resident memory of the weights as kernels want them, and of the session
    address_bytes: int  # address space of weights and session, where mapped files count as a whole
    kv_cache_bytes: int  # for the context that is foreseen
    workspace_bytes: int  # of a pass
    file_bytes: int  # the weights as they are stored

    def host_bytes(self, free: FreeMemory) -> int:
        """What the model takes of the host's memory, counted as its free memory is."""
        opened_bytes = self.address_bytes if free.counts_files else self.weights_bytes
        return opened_bytes + self.kv_cache_bytes + self.workspace_bytes


def estimate_memory(
    manifest: Manifest, file_bytes: int, num_tokens: int | None = None, max_draft_tokens: int = MAX_DRAFT_TOKENS
) -> MemoryEstimate:
    """What a model with a weights file of file_bytes takes on the CPU.

    num_tokens is the context that is foreseen, 2048 or the model's own unless given; max_draft_tokens is the
    longest draft that it verifies in one pass.
    """
    num_tokens = min(num_tokens or FORESEEN_TOKENS, manifest.context_length)
    growth = _FLOATS_GROWTH.get(manifest.precision, _BLOCKS_GROWTH)
    resident, addressed = (int(each * file_bytes) + own for each, own in zip(growth, _SESSION_BYTES, strict=True))
    return MemoryEstimate(
        resident,
        addressed,
        cache_bytes(manifest.kv_cache, num_tokens, manifest.context_length),
        workspace_bytes(manifest, num_tokens, max_draft_tokens),
        file_bytes,
    )


def bytes_by_place(estimate: MemoryEstimate, place: str, free: FreeByPlace) -> Bytes:
    """What a model takes of each place. A device with memory of its own leaves only the session to the host.

    Such a device is taken to hold the weights as they are stored, which was measured on none.
    """
    if place == HOST:
        return {HOST: estimate.host_bytes(free[HOST])}
    device_bytes = estimate.file_bytes + estimate.kv_cache_bytes + estimate.workspace_bytes
    return {HOST: _SESSION_BYTES[free[HOST].counts_files], place: device_bytes}


def arena_bytes(estimate: MemoryEstimate, free_bytes: int) -> int:
    """What a pass may take on a device: all that is free but the weights and the KV cache, and a reserve.

    The estimate is of a target with the KV cache of its whole context, which such a device holds from the start.
    """
    return max(
        estimate.workspace_bytes, free_bytes - estimate.file_bytes - estimate.kv_cache_bytes - RESERVE_BYTES
    )


def sum_bytes(parts: Iterable[Bytes]) -> Bytes:
    """What several models take of each place together."""
    summed: Counter[str] = Counter()
    for part in parts:
        summed.update(part)
    return summed


def fitting_context(
    manifest: Manifest, file_bytes: int, place: str, free: FreeByPlace, max_draft_tokens: int = MAX_DRAFT_TOKENS
) -> int:
    """The longest context that plain decoding has room for beside the reserve; 1024, or the model's own, at least.

    Place is where the device that the model is to run on has its memory.
    """

    def is_short(num_tokens: int) -> bool:
        needed = bytes_by_place(
            estimate_full_context(manifest, file_bytes, num_tokens, max_draft_tokens), place, free
        )
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
    manifest: Manifest, file_bytes: int, num_tokens: int, max_draft_tokens: int = MAX_DRAFT_TOKENS
) -> MemoryEstimate:
    """What a model that is loaded with a context of num_tokens takes by the time that it is full."""
    if manifest.kv_cache.form == "static":
        return estimate_memory(manifest, file_bytes, max_draft_tokens=max_draft_tokens)
    shortened = replace(manifest, context_length=num_tokens)
    estimate = estimate_memory(shortened, file_bytes, num_tokens, max_draft_tokens)
    return estimate._replace(kv_cache_bytes=_peak_bytes(manifest.kv_cache, num_tokens))


def _peak_bytes(kv: KVCache, num_tokens: int) -> int:
    """The most that a cache holds on its way to the end of a context of num_tokens."""
    before = next_capacity(0, (num_tokens + 1) // 2, num_tokens)
    return cache_bytes(kv, before, num_tokens) + growth_bytes(kv, before, num_tokens, num_tokens)


def cache_bytes(kv: KVCache, num_tokens: int, context_length: int) -> int:
    """The size of a KV cache with room for num_tokens positions."""
    if kv.form == "static":
        return kv.bytes_per_token * context_length
    buffers = 2 if kv.form == "growing" else 1  # a growing one has a spare
    return buffers * kv.bytes_per_token * next_capacity(0, num_tokens, context_length)


def growth_bytes(kv: KVCache, num_held: int, num_tokens: int, context_length: int) -> int:
    """What the KV cache takes more when it grows from room for num_held tokens to room for num_tokens."""
    before, after = (cache_bytes(kv, num, context_length) for num in (num_held, max(num_held, num_tokens)))
    # A shared buffer is replaced layer by layer; a growing cache holds old and new at once.
    return after if kv.form == "growing" and before != after else after - before


def workspace_bytes(manifest: Manifest, num_tokens: int, max_draft_tokens: int = MAX_DRAFT_TOKENS) -> int:
    """What the widest passes take: a chunk of a prompt over num_tokens positions, and a draft with its logits."""
    rows = min(_CHUNK_TOKENS, num_tokens)
    scores = 4 * rows * num_tokens * manifest.kv_cache.num_kv_heads * _HEADS_PER_KV_HEAD
    return scores + draft_bytes(manifest, max_draft_tokens)


def draft_bytes(manifest: Manifest, max_draft_tokens: int = MAX_DRAFT_TOKENS) -> int:
    """What passes over drafts take more than passes over one token."""
    return 4 * (max_draft_tokens + 1) * _LOGITS_COPIES * manifest.vocab_size


def texts_bytes(manifest: Manifest, names: frozenset[str], max_draft_tokens: int = MAX_DRAFT_TOKENS) -> int:
    """What drafting from the text takes: wide passes, and what is remembered of it."""
    if not names:
        return 0
    num_remembered = min(FORESEEN_TOKENS, manifest.context_length) * len(names - {"ngram"})
    return draft_bytes(manifest, max_draft_tokens) + _REMEMBERED_BYTES * num_remembered


def require_memory(name: str, estimate: MemoryEstimate, place: str, free: FreeByPlace) -> None:
    """Raises MemoryExhausted: not even plain decoding on the device of a place fits, there or on the host.

    What a user asked for may take of the reserve of a machine or a device; only what makes it faster leaves that.
    """
    for at, num_bytes in bytes_by_place(estimate, place, free).items():
        needed_bytes, there = num_bytes + RESERVE_BYTES, free.get(at)
        if there is None or needed_bytes <= there.free_bytes:
            continue
        memory = "memory" if at == HOST else f"the memory of {at}"
        raise MemoryExhausted(
            f"{name} needs about {needed_bytes / 2**20:.0f} MiB of {memory} for plain decoding "
            f"({_list_parts(estimate, num_bytes, has_cache=at == place)}), but "
            f"{there.free_bytes / 2**20:.0f} MiB are free within {there.bound}; use a smaller model or one in "
            "fewer bits (edgespec export --precision int4), raise the limit"
            f"{_suggest_limit(needed_bytes, there)}, or close other programs",
            needed_bytes=needed_bytes,
            free_bytes=there.free_bytes,
        )


def _suggest_limit(needed_bytes: int, free: FreeMemory) -> str:
    """The limit that would do, where one was given; with a little more, since what a process holds varies."""
    if free.used_bytes is None:
        return ""
    steps = -(-(free.used_bytes + needed_bytes) // _LIMIT_STEP)
    return f" (--memory {steps * _LIMIT_STEP >> 20}M would do)"


def _list_parts(estimate: MemoryEstimate, num_bytes: int, *, has_cache: bool) -> str:
    cache_bytes, work_bytes = (estimate.kv_cache_bytes, estimate.workspace_bytes) if has_cache else (0, 0)
    parts = {
        "weights and session": num_bytes - cache_bytes - work_bytes,
        "KV cache": cache_bytes,
        "workspace": work_bytes,
        "reserve": RESERVE_BYTES,
    }
    return ", ".join(f"{name} {part / 2**20:.0f}" for name, part in parts.items() if part)
