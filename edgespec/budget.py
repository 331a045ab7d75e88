"""What a model takes of memory, in bytes, by what its manifest states. Pure; the shares were measured.

docs/log.md has the measurements.
"""

from typing import NamedTuple

from edgespec.cache import grown_capacity
from edgespec.errors import MemoryExhausted
from edgespec.headroom import Room
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
    "use a smaller model or one in fewer bits (edgespec export --precision int4), raise the limit, or close other "
    "programs"
)
# Of a token of the text, in an automaton of its suffixes or a pool of n-grams.
_REMEMBERED_BYTES = 1024
# A context that is foreseen before loading; a longer one grows as its text does.
FORESEEN_TOKENS = 2048


class Need(NamedTuple):
    """What a model takes.

    weights: as kernels want them, with what of their file stays in use, and the session.
    address: the same of an address space, which holds files as a whole.
    kv_cache: for the context that is foreseen.
    workspace: of a pass.
    """

    weights_bytes: int
    address_bytes: int
    kv_cache_bytes: int
    workspace_bytes: int

    def within(self, room: Room) -> int:
        """Of a room."""
        opened_bytes = self.address_bytes if room.counts_files else self.weights_bytes
        return opened_bytes + self.kv_cache_bytes + self.workspace_bytes


class Placed(NamedTuple):
    """What is needed of the host, and of a device with a memory of its own."""

    host_bytes: int
    device_bytes: int


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
    )


def placed(need: Need, room: Room, *, is_on_host: bool) -> Placed:
    """Where a model's bytes go: one on a device of its own leaves the host its session alone."""
    if is_on_host:
        return Placed(need.within(room), 0)
    session_bytes = _SESSION_BYTES[room.counts_files]
    return Placed(
        session_bytes, need.weights_bytes + need.kv_cache_bytes + need.workspace_bytes - _SESSION_BYTES[0]
    )


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
    """Raises MemoryExhausted: not even plain decoding fits."""
    needed_bytes = need.within(room) + RESERVE_BYTES
    if needed_bytes <= room.free_bytes:
        return
    cache, work = (f"{part / 2**20:.0f}" for part in need[2:])
    weights = f"{(needed_bytes - RESERVE_BYTES - sum(need[2:])) / 2**20:.0f}"
    needed, free, reserve = (f"{part / 2**20:.0f}" for part in (needed_bytes, room.free_bytes, RESERVE_BYTES))
    raise MemoryExhausted(
        f"{name} needs about {needed} MiB of memory to decode plainly (weights and session {weights}, KV cache "
        f"{cache}, workspace {work}, reserve {reserve}) and {free} MiB are free within {room.bound}; {_ADVICE}",
        needed_bytes=needed_bytes,
        free_bytes=room.free_bytes,
    )
