"""What a model takes of memory, in bytes, by what its manifest states. Pure; the shares were measured.

docs/log.md has the measurements.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from edgespec.cache import grown_capacity
from edgespec.errors import MemoryExhausted
from edgespec.headroom import HOST, Room, Rooms
from edgespec.ladder import Bytes
from edgespec.manifest import KVCache, Manifest

# The most that opening a model took, as a multiple of its weights file: held in memory, and of address space.
# Kernels pack the weights anew; half floats they widen (docs/log.md, 2026-11-21).
_IN_BLOCKS = (1.35, 1.5)
_OF_PRECISION = {"fp16": (2.4, 2.55), "fp32": (1.2, 1.2)}
# A session besides: its code, and in an address space what its threads keep for themselves.
_SESSION_BYTES = (40 << 20, 120 << 20)
# A pass: rows of a chunk, and floats that a row takes in all layers, as multiples of what the manifest knows.
_CHUNK_TOKENS = 256
_HEADS_PER_KV_HEAD = 4
# A draft in one pass, each row of which has its logits and what sampling makes of them.
_DRAFT_ROWS = 25
_LOGITS_COPIES = 3
# Free of what is foreseen: what texts, Python and the allocators' own rounding take.
RESERVE_BYTES = 96 << 20
_ADVICE = (
    "use a smaller model or one in fewer bits (edgespec export --precision int4), raise the limit{enough}, or "
    "close other programs"
)
# Of a token of the text, in an automaton of its suffixes or a pool of n-grams.
_REMEMBERED_BYTES = 1024
_LIMIT_STEP = 16 << 20
# A context that is foreseen before loading; a longer one grows as its text does.
FORESEEN_TOKENS = 2048
# No model is loaded with a shorter one, unless its own is.
_LEAST_CONTEXT = 1024
_CONTEXT_STEP = 256


class Need(NamedTuple):
    """What a model takes.

    weights: as kernels want them, with what of their file stays in use, and the session.
    address: the same of an address space, which holds files as a whole.
    kv_cache: for the context that is foreseen.
    workspace: of a pass.
    file: the weights as they are stored.
    """

    weights_bytes: int
    address_bytes: int
    kv_cache_bytes: int
    workspace_bytes: int
    file_bytes: int

    def within(self, room: Room) -> int:
        """Of a room."""
        opened_bytes = self.address_bytes if room.counts_files else self.weights_bytes
        return opened_bytes + self.kv_cache_bytes + self.workspace_bytes


def need_of(manifest: Manifest, file_bytes: int, num_tokens: int | None = None) -> Need:
    """What a model takes on the CPU.

    Args:
        file_bytes: Of its weights.
        num_tokens: Of the context that is foreseen; 2048 or the model's own unless given.
    """
    num_tokens = min(num_tokens or FORESEEN_TOKENS, manifest.context_length)
    multiples = _OF_PRECISION.get(manifest.precision, _IN_BLOCKS)
    held, addressed = (int(each * file_bytes) + own for each, own in zip(multiples, _SESSION_BYTES, strict=True))
    return Need(
        held,
        addressed,
        cache_bytes(manifest.kv_cache, num_tokens, manifest.context_length),
        workspace_bytes(manifest, num_tokens),
        file_bytes,
    )


def placed(need: Need, place: str, rooms: Rooms) -> Bytes:
    """Where a model's bytes go: one on a device with memory of its own leaves the host its session alone.

    A device is taken to hold the weights as they are stored, which was measured on none.
    """
    if place == HOST:
        return {HOST: need.within(rooms[HOST])}
    held_bytes = need.file_bytes + need.kv_cache_bytes + need.workspace_bytes
    return {HOST: _SESSION_BYTES[rooms[HOST].counts_files], place: held_bytes}


def arena_bytes(need: Need, free_bytes: int) -> int:
    """What a pass may take on a device: all that is free but the weights and the KV cache, and a reserve.

    Args:
        need: Of a target, with the KV cache of its whole context, which such a device holds from the start.
    """
    return max(need.workspace_bytes, free_bytes - need.file_bytes - need.kv_cache_bytes - RESERVE_BYTES)


def total(parts: Iterable[Bytes]) -> Bytes:
    """Of several models, by place."""
    summed: Counter[str] = Counter()
    for part in parts:
        summed.update(part)
    return summed


def fitting_context(manifest: Manifest, file_bytes: int, place: str, rooms: Rooms) -> int:
    """The longest context that plain decoding has room for; 1024, or what the model has at least, where none is.

    Args:
        file_bytes: Of its weights.
        place: Of the device that it is to run on.
    """

    def is_short(num_tokens: int) -> bool:
        held = placed(filled_need(manifest, file_bytes, num_tokens), place, rooms)
        return any(held.get(at, 0) + RESERVE_BYTES > room.free_bytes for at, room in rooms.items())

    lengths = context_lengths(manifest)
    return lengths[max(0, bisect_left(lengths, True, key=is_short) - 1)]


def context_lengths(manifest: Manifest) -> list[int]:
    """Those that a model may be loaded with, up to its own."""
    whole = manifest.context_length
    if manifest.kv_cache.form == "static":
        return [whole]
    return [*range(min(_LEAST_CONTEXT, whole), whole, _CONTEXT_STEP), whole]


def filled_need(manifest: Manifest, file_bytes: int, num_tokens: int) -> Need:
    """What a model takes that is loaded with a context of num_tokens, by the time that it is full."""
    if manifest.kv_cache.form == "static":
        return need_of(manifest, file_bytes)
    need = need_of(replace(manifest, context_length=num_tokens), file_bytes, num_tokens)
    return need._replace(kv_cache_bytes=_peak_bytes(manifest.kv_cache, num_tokens))


def _peak_bytes(kv: KVCache, num_tokens: int) -> int:
    """The most that a cache holds on its way to the end of a context of num_tokens."""
    before = grown_capacity(0, (num_tokens + 1) // 2, num_tokens)
    return cache_bytes(kv, before, num_tokens) + growth_bytes(kv, before, num_tokens, num_tokens)


def cache_bytes(kv: KVCache, num_tokens: int, context_length: int) -> int:
    """Of a KV cache that holds num_tokens positions."""
    if kv.form == "static":
        return kv.bytes_per_token * context_length
    buffers = 2 if kv.form == "growing" else 1  # a growing one has a spare
    return buffers * kv.bytes_per_token * grown_capacity(0, num_tokens, context_length)


def growth_bytes(kv: KVCache, num_held: int, num_tokens: int, context_length: int) -> int:
    """What the KV cache takes more when it grows from room for num_held tokens to room for num_tokens."""
    before, after = (cache_bytes(kv, num, context_length) for num in (num_held, max(num_held, num_tokens)))
    if before == after:
        return 0
    # A shared buffer gives way layer by layer; of a growing cache old and new are held at once.
    return after if kv.form == "growing" else after - before


def workspace_bytes(manifest: Manifest, num_tokens: int) -> int:
    """Of the widest passes: a chunk of a prompt over num_tokens positions, and a draft with its logits."""
    rows = min(_CHUNK_TOKENS, num_tokens)
    scores = 4 * rows * num_tokens * manifest.kv_cache.num_kv_heads * _HEADS_PER_KV_HEAD
    return scores + draft_bytes(manifest)


def draft_bytes(manifest: Manifest) -> int:
    """What passes over drafts take more than those of one token."""
    return 4 * _DRAFT_ROWS * _LOGITS_COPIES * manifest.vocab_size


def texts_bytes(manifest: Manifest, names: frozenset[str]) -> int:
    """What drafting from the text takes: wide passes, and what is remembered of it."""
    remembers = bool(names - {"ngram"})
    remembered_bytes = _REMEMBERED_BYTES * min(FORESEEN_TOKENS, manifest.context_length) if remembers else 0
    return draft_bytes(manifest) + remembered_bytes if names else 0


def expect_room(name: str, need: Need, room: Room) -> None:
    """Raises MemoryExhausted: not even plain decoding fits on the host."""
    expect_rooms(name, need, HOST, {HOST: room})


def expect_rooms(name: str, need: Need, place: str, rooms: Rooms) -> None:
    """Raises MemoryExhausted: not even plain decoding on the device of a place fits, there or on the host."""
    for at, held_bytes in placed(need, place, rooms).items():
        needed_bytes, room = held_bytes + RESERVE_BYTES, rooms.get(at)
        if room is None or needed_bytes <= room.free_bytes:
            continue
        of_what = "memory" if at == HOST else f"the memory of {at}"
        raise MemoryExhausted(
            f"{name} needs about {needed_bytes / 2**20:.0f} MiB of {of_what} to decode plainly "
            f"({_parts(need, held_bytes, has_cache=at == place)}) and {room.free_bytes / 2**20:.0f} MiB are free "
            f"within {room.bound}; {_ADVICE.format(enough=_enough(needed_bytes, room))}",
            needed_bytes=needed_bytes,
            free_bytes=room.free_bytes,
        )


def _enough(needed_bytes: int, room: Room) -> str:
    """Which limit would do, where one was given; with a little more, since what is held varies."""
    if room.used_bytes is None:
        return ""
    steps = -(-(room.used_bytes + needed_bytes) // _LIMIT_STEP)
    return f" (--memory {steps * _LIMIT_STEP >> 20}M would do)"


def _parts(need: Need, held_bytes: int, *, has_cache: bool) -> str:
    cache_bytes, work_bytes = (need.kv_cache_bytes, need.workspace_bytes) if has_cache else (0, 0)
    parts = {
        "weights and session": held_bytes - cache_bytes - work_bytes,
        "KV cache": cache_bytes,
        "workspace": work_bytes,
        "reserve": RESERVE_BYTES,
    }
    return ", ".join(f"{name} {part / 2**20:.0f}" for name, part in parts.items() if part)
