"""How much memory is free where models are to run, and the target with a context that fits there."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from edgespec.loading.open_model import ModelFolder, weights_size
from edgespec.loading.placement import Placement
from edgespec.memory.device_memory import Places
from edgespec.memory.estimate import (
    MemoryEstimate,
    arena_bytes,
    bytes_by_place,
    estimate_memory,
    fitting_caches,
    fitting_context,
    require_memory,
)
from edgespec.memory.free_memory import HOST, FreeByPlace, ReadFreeMemory
from edgespec.memory.ladder import Bytes
from edgespec.policy.limits import MAX_DRAFT_TOKENS
from edgespec.runtimes.devices import Device, limit_arena

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MemoryFit:
    """A target as it fits into the memory that is free."""

    read_free_memory: Places  # reads the free memory of each place again
    free_memory: FreeByPlace  # what it read before anything was opened
    target_place: str
    drafter_place: str
    target: ModelFolder  # with the context length that fits
    needed: Bytes  # bytes that plain decoding takes in each place
    downgrades: list[str]  # lines that say what was given up

    def fit_parallel(self, asked: int | None, max_answers: int) -> int:
        """How many answers memory allows at once, up to max_answers; a line is added where fewer than asked."""
        fitting = fitting_caches(
            self.target.manifest, self.needed, self.target_place, self.free_memory, max_answers
        )
        if asked is not None and fitting < asked:
            self.downgrades.append(
                f"{fitting} of {asked} answers are made at once: memory has no space for more KV caches"
            )
        return fitting

    def has_memory_to_join(self) -> bool:
        """Whether the target's weights fit a second time, as a session of another graph holds them."""
        free = self.read_free_memory().get(HOST)
        if free is None:
            return True
        weights = self._estimate_target()
        opened_bytes = weights.address_bytes if free.counts_files else weights.weights_bytes
        return free.free_bytes - free.reserve.opening_bytes >= opened_bytes + weights.workspace_bytes

    def limit(self, device: Device) -> Device:
        """The target's device, limited to the memory that is free on it."""
        room = self.free_memory.get(self.target_place)
        if room is None:
            return device
        return limit_arena(device, arena_bytes(self._estimate_target(), room.free_bytes))

    def _estimate_target(self) -> MemoryEstimate:
        manifest = self.target.manifest
        return estimate_memory(manifest, weights_size(self.target), manifest.context_length)


def fit_memory(
    stated: ModelFolder,
    placement: Placement,
    host: ReadFreeMemory,
    report: Callable[[str], None],
    max_draft_tokens: int = MAX_DRAFT_TOKENS,
) -> MemoryFit:
    """Shorten a target's context to the memory that is free.

    Raises MemoryExhausted: Not even plain decoding with a short context fits.
    """
    memories = placement.device.place, placement.drafter_device.place
    places = Places(memories, host, report)
    target_place, drafter_place = (places.place_of(memory) for memory in memories)
    free_memory = places()
    size = weights_size(stated)
    fitting = fitting_context(stated.manifest, size, target_place, free_memory, max_draft_tokens)
    target = stated._replace(manifest=replace(stated.manifest, context_length=fitting))
    estimate = estimate_memory(target.manifest, size, max_draft_tokens=max_draft_tokens)
    require_memory(target.manifest.name, estimate, target_place, free_memory)
    needed = bytes_by_place(estimate, target_place, free_memory)
    for place, free in free_memory.items():
        figures = needed.get(place, 0) // 10**6, place, free.free_bytes // 10**6, free.bound
        _LOG.debug("the model takes about %d MB of %s memory; %d MB are free within %s", *figures)
    downgrades: list[str] = []
    if fitting < (whole := stated.manifest.context_length):
        free_parts = (f"{free.free_bytes >> 20} MiB are free within {free.bound}" for free in free_memory.values())
        downgrades.append(f"the context is {fitting} of {whole} tokens: {'; '.join(free_parts)}")
    return MemoryFit(
        read_free_memory=places,
        free_memory=free_memory,
        target_place=target_place,
        drafter_place=drafter_place,
        target=target,
        needed=needed,
        downgrades=downgrades,
    )
