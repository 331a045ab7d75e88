"""How much memory is free where models are to run, and the target with a context that fits there."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from edgespec.loading.open_model import ModelFolder, weights_size
from edgespec.loading.placement import Placement
from edgespec.memory.device_memory import Places
from edgespec.memory.estimate import bytes_by_place, estimate_memory, fitting_context, require_memory
from edgespec.memory.free_memory import FreeByPlace, ReadFreeMemory
from edgespec.memory.ladder import Bytes
from edgespec.policy.limits import MAX_DRAFT_TOKENS

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
