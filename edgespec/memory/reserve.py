"""How much memory stays free for other programs and for what no estimate foresees. Pure.

A limit that somebody set for this process, such as --memory or a container's, says how much may be used, so nearly
all of it is. The memory of a machine and of a GPU is shared with other programs, so more of it stays free.
"""

from typing import NamedTuple

# For texts, Python and the rounding of allocators, whatever bounds the memory.
RESERVE_BYTES = 96 << 20
# Of a whole machine: a tenth, and 1 GiB from 10 GiB on. A desktop with less free begins to swap.
_MACHINE_SHARE, _MACHINE_BYTES = 10, 1 << 30
# Of a GPU, which may drive the screen, and whose libraries load kernels as they are first used.
_DEVICE_SHARE, _DEVICE_BYTES = 16, 512 << 20


class Reserve(NamedTuple):
    """Bytes that stay free.

    opening_bytes: what must remain once a drafter model is open.
    floor_bytes: with less than this free, drafter models are closed. It is half of what opening leaves, so that a
        model that was just opened is not closed by the next reading.
    """

    opening_bytes: int
    floor_bytes: int

    @property
    def context_bytes(self) -> int:
        """What must remain beside the target once its context is full."""
        return max(RESERVE_BYTES, self.floor_bytes)


def reserve_of(opening_bytes: int) -> Reserve:
    """A reserve that asks half as much to keep a model open as to open one."""
    return Reserve(opening_bytes, opening_bytes // 2)


LIMIT_RESERVE = reserve_of(RESERVE_BYTES)


def machine_reserve(total_bytes: int) -> Reserve:
    """What stays free of a machine with total_bytes of memory."""
    return reserve_of(max(RESERVE_BYTES, min(_MACHINE_BYTES, total_bytes // _MACHINE_SHARE)))


def device_reserve(total_bytes: int) -> Reserve:
    """What stays free of a device with total_bytes of memory of its own."""
    return reserve_of(max(RESERVE_BYTES, min(_DEVICE_BYTES, total_bytes // _DEVICE_SHARE)))
