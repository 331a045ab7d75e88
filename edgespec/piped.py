"""What waits to be read, found out without reading: a pipe may be a script's own, and never end."""

import os
import stat
from typing import TextIO


def waits(stream: TextIO) -> bool:
    """Whether a pipe or a regular file has bytes that were not read yet; of anything else, no."""
    try:
        file = stream.fileno()
        found = os.fstat(file)
        if stat.S_ISREG(found.st_mode):
            return os.lseek(file, 0, os.SEEK_CUR) < found.st_size
        return stat.S_ISFIFO(found.st_mode) and _num_waiting(file) > 0
    except (OSError, ValueError):  # it is closed, or no file
        return False


def _num_waiting(pipe: int) -> int:
    try:
        import fcntl
        import termios
    except ImportError:  # Windows does not tell
        return 0
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), "little")
