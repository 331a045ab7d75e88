"""How much memory is free where models are to run, and the target with a context that fits there."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from typing import NamedTuple

from edgespec.config.drafter_names import MAX_DRAFT_TOKENS
from edgespec.manifest import Manifest
from edgespec.memory.device_memory import Places
from edgespec.memory.estimate import (
    MemoryEstimate,
    MemoryNeeds,
    WeightsSize,
    arena_bytes,
    bytes_by_place,
    estimate_full_context,
    estimate_memory,
    fitting_context,
    require_memory,
)
from edgespec.memory.free_memory import HOST, Bytes, FreeByPlace, ReadFreeMemory, Reserve, free_on_host
from edgespec.runtimes.devices import Device, limit_arena
from edgespec.setup.device_choice import Placement
from edgespec.setup.open_model import ModelFolder
from edgespec.system.units import format_bytes
from edgespec.types import Report

_LOG = logging.getLogger(__name__)


class MemoryReading(NamedTuple):
    """The memory of the devices of a target and a drafter: how much was free, and how to read it again.

    unknown: Lines that say of which place no driver reports it.
    """

    read: Callable[[], FreeByPlace]
    free: FreeByPlace
    target_place: str
    drafter_place: str
    unknown: Sequence[str] = ()

    def rooms(self, kept: Callable[[Reserve], int]) -> Bytes:
        """Bytes that models may take in each place: all but a part of its reserve."""
        return {place: room.free_bytes - kept(room.reserve) for place, room in self.free.items()}


def read_memory(placement: Placement, host: ReadFreeMemory, report: Report) -> MemoryReading:
    """Read how much memory is free; report takes a line for each place that is not checked any more later."""
    kinds, unknown = (placement.device.place, placement.drafter_device.place), list[str]()
    if kinds == ("cpu", "cpu"):
        return MemoryReading(partial(free_on_host, host), free_on_host(host), HOST, HOST)
    places = Places(kinds, host, unknown.append)
    free = places()
    places.report = report
    return MemoryReading(places, free, places.place_of(kinds[0]), places.place_of(kinds[1]), unknown)


def memory_needs(
    placement: Placement,
    space: MemoryReading,
    models: Sequence[tuple[Manifest, WeightsSize | int]],
    kept: Callable[[Reserve], int],
) -> MemoryNeeds:
    """The needs of models, the target first; arguments as of MemoryReading.rooms."""
    places = {placement.drafter_device.name: space.drafter_place, placement.device.name: space.target_place}
    devices = chain([placement.device.name], repeat(placement.drafter_device.name))
    sizes = {(manifest.name, device): size for (manifest, size), device in zip(models, devices, strict=False)}

    def needed(manifest: Manifest, context: int, device: str) -> Bytes:
        estimate = estimate_full_context(manifest, sizes[manifest.name, device], context)
        return bytes_by_place(estimate, places[device], space.free)

    return MemoryNeeds(needed, space.rooms(kept))


@dataclass(frozen=True, kw_only=True)
class MemoryFit:
    """A target as it fits into the memory that is free."""

    reading: MemoryReading
    target: ModelFolder  # with the context length that fits
    estimate: MemoryEstimate  # of the target once that context is full
    needed: Bytes  # bytes that plain decoding takes in each place
    downgrades: tuple[str, ...]  # lines that say what was given up

    @property
    def joined_bytes(self) -> int:
        """The host's memory that the target's weights take a second time, in a session of another graph."""
        free, target = self.reading.free.get(HOST), self.estimate
        opened_bytes = target.address_bytes if free and free.counts_files else target.weights_bytes
        return opened_bytes + target.workspace_bytes

    def limit(self, device: Device) -> Device:
        """The target's device, limited to the memory that is free on it."""
        place = self.reading.target_place
        if place == HOST or (room := self.reading.free.get(place)) is None:
            return device
        return limit_arena(device, arena_bytes(self.estimate, room.free_bytes))


def fit_memory(
    stated: ModelFolder, size: WeightsSize, reading: MemoryReading, max_draft_tokens: int = MAX_DRAFT_TOKENS
) -> MemoryFit:
    """Shorten a target's context to the memory that is free.

    size: Of the target's weights.

    Raises MemoryExhausted: Not even plain decoding with a short context fits.
    """
    place, free_memory = reading.target_place, reading.free
    fitting = fitting_context(stated.manifest, size, place, free_memory, max_draft_tokens)
    target = stated._replace(manifest=replace(stated.manifest, context_length=fitting))
    estimate = estimate_memory(target.manifest, size, max_draft_tokens=max_draft_tokens)
    require_memory(target.manifest.name, estimate, place, free_memory)
    needed = bytes_by_place(estimate, place, free_memory)
    for at, free in free_memory.items():
        figures = needed.get(at, 0) // 10**6, at, free.free_bytes // 10**6, free.bound
        _LOG.debug("the model takes about %d MB of %s memory; %d MB are free within %s", *figures)
    downgrades: tuple[str, ...] = ()
    if fitting < (whole := stated.manifest.context_length):
        free_parts = (
            f"{format_bytes(free.free_bytes)} are free within {free.bound}" for free in free_memory.values()
        )
        downgrades = (f"the context is {fitting} of {whole} tokens: {'; '.join(free_parts)}",)
    return MemoryFit(
        reading=reading,
        target=target,
        estimate=estimate_memory(target.manifest, size, fitting),
        needed=needed,
        downgrades=downgrades,
    )
