"""The most memory that a block of code held, on a device and on the host."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import Any

import psutil

from edgespec.memory.device_memory import Places
from edgespec.memory.free_memory import HOST, free_memory
from edgespec.runtimes.devices import Device
from edgespec.system.console import print_stderr

_POLL_S = 0.02


@contextmanager
def record_peak_memory(device: Device, found: dict[str, Any]) -> Iterator[None]:
    """Record the growth of the device's memory in use at its peak, and the peak of this process on the host."""
    places, ended = Places([device.place], free_memory, print_stderr), Event()
    place = places.place_of(device.memory)
    reads: dict[str, Callable[[], int]] = {"host": lambda: psutil.Process().memory_info().rss}
    if place != HOST and place in places():
        before = places()[place].free_bytes
        reads["device"] = lambda: before - places()[place].free_bytes
    peaks = dict.fromkeys(reads, 0)

    def poll() -> None:
        while not ended.wait(_POLL_S):
            with suppress(KeyError):  # the driver no longer reports it
                for each, read in reads.items():
                    peaks[each] = max(peaks[each], read())

    thread = Thread(target=poll, name="memory")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        found["peak_bytes"] = {"device": peaks.get("device"), "host": peaks["host"]}
    gc.collect()
