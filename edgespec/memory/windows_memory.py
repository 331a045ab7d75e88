"""What Windows reports of its memory beyond what psutil reads, through the functions of kernel32.

Reads figures and decides nothing. It has run only with an imitation of kernel32, not on Windows.
"""

import ctypes
import sys
from collections.abc import Callable
from typing import Any

# MEMORY_RESOURCE_NOTIFICATION_TYPE of memoryapi.h
_LOW, _HIGH = 0, 1


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of sysinfoapi.h"""

    _fields_ = (
        ("dwLength", ctypes.c_uint32),
        ("dwMemoryLoad", ctypes.c_uint32),
        ("ullTotalPhys", ctypes.c_uint64),
        ("ullAvailPhys", ctypes.c_uint64),
        ("ullTotalPageFile", ctypes.c_uint64),
        ("ullAvailPageFile", ctypes.c_uint64),
        ("ullTotalVirtual", ctypes.c_uint64),
        ("ullAvailVirtual", ctypes.c_uint64),
        ("ullAvailExtendedVirtual", ctypes.c_uint64),
    )


def open_kernel32() -> Any:
    """The library; None on other systems."""
    if sys.platform != "win32":
        return None
    library = ctypes.WinDLL("kernel32", use_last_error=True)
    library.CreateMemoryResourceNotification.restype = ctypes.c_void_p
    library.QueryMemoryResourceNotification.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return library


def read_commit_bytes(kernel32: Any) -> int:
    """Bytes that Windows still promises to this process, in memory and page file; raises OSError: it does not say.

    Windows refuses an allocation beyond them, however much physical memory is free.
    """
    status = _MemoryStatus(dwLength=ctypes.sizeof(_MemoryStatus))
    if not kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise OSError("GlobalMemoryStatusEx failed")
    return int(status.ullAvailPageFile)


def open_memory_signals(kernel32: Any) -> Callable[[], tuple[bool, bool]]:
    """A reader of whether Windows signals that memory is low, and that it is plentiful.

    Raises OSError: It gives no such signals.
    """
    handles = [kernel32.CreateMemoryResourceNotification(kind) for kind in (_LOW, _HIGH)]
    if not all(handles):
        raise OSError("CreateMemoryResourceNotification failed")

    def read() -> tuple[bool, bool]:
        is_low, is_plentiful = (_query(kernel32, handle) for handle in handles)
        return is_low, is_plentiful

    return read


def _query(kernel32: Any, handle: Any) -> bool:
    state = ctypes.c_int(0)  # BOOL
    if not kernel32.QueryMemoryResourceNotification(handle, ctypes.byref(state)):
        raise OSError("QueryMemoryResourceNotification failed")
    return bool(state.value)
