"""What is free where models are to run, and a target with the context that there is room for."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from edgespec.budget import expect_rooms, fitting_context, need_of, placed
from edgespec.device_memory import Places
from edgespec.headroom import Headroom, Rooms
from edgespec.ladder import Bytes
from edgespec.opening import ModelFolder, weights_bytes
from edgespec.setting import Setting

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Space:
    """What is free, and the target as it fits there.

    places: Reads what is free of each place; rooms is what it read before anything was opened.
    target: With the context that there is room for.
    needed: What plain decoding takes.
    news: Lines that say what was given up.
    """

    places: Places
    rooms: Rooms
    target_place: str
    drafter_place: str
    target: ModelFolder
    needed: Bytes
    news: Sequence[str]


def space_for(stated: ModelFolder, setting: Setting, host: Headroom, report: Callable[[str], None]) -> Space:
    """Look what is free for a target and its drafters.

    Args:
        host: What is free of the host.

    Raises:
        MemoryExhausted: Not even plain decoding with a short context fits.
    """
    memories = setting.device.memory, setting.drafter_device.memory
    places = Places(memories, host, report)
    target_place, drafter_place = (places.of(memory) for memory in memories)
    rooms = places()
    target = _shortened(stated, target_place, rooms)
    need = need_of(target.manifest, weights_bytes(target))
    expect_rooms(target.manifest.name, need, target_place, rooms)
    needed = placed(need, target_place, rooms)
    for place, room in rooms.items():
        parts = needed.get(place, 0) // 10**6, place, room.free_bytes // 10**6, room.bound
        _LOG.debug("it takes about %d MB of the %s, and %d are free within %s", *parts)
    return Space(
        places=places,
        rooms=rooms,
        target_place=target_place,
        drafter_place=drafter_place,
        target=target,
        needed=needed,
        news=_news(stated, target, rooms),
    )


def _shortened(stated: ModelFolder, place: str, rooms: Rooms) -> ModelFolder:
    context_length = fitting_context(stated.manifest, weights_bytes(stated), place, rooms)
    return stated._replace(manifest=replace(stated.manifest, context_length=context_length))


def _news(stated: ModelFolder, target: ModelFolder, rooms: Rooms) -> list[str]:
    whole, fitting = (model.manifest.context_length for model in (stated, target))
    if fitting == whole:
        return []
    free = "; ".join(f"{room.free_bytes >> 20} MiB are free within {room.bound}" for room in rooms.values())
    return [f"the context is {fitting} of {whole} tokens: {free}"]
