"""Sizes in bytes, speeds in tokens per second and counts, as users write and read them."""

import re

from edgespec.errors import UsageError

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?))?B?", re.IGNORECASE)
_MIN_BYTES, _MAX_BYTES = 10**6, 10**18


def format_bytes(num_bytes: float, decimals: int = 1) -> str:
    """A size as text: 1.5 GB, 97 MB, 378 kB or 12 bytes. Only gigabytes have decimals."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.{decimals}f} GB"
    if num_bytes >= 1e6:
        return f"{num_bytes / 1e6:.0f} MB"
    return f"{num_bytes / 1e3:.0f} kB" if num_bytes >= 1e3 else f"{num_bytes:.0f} bytes"


def parse_bytes(size: int | str, what: str = "the memory limit (--memory)") -> int:
    """The number of bytes in 512M, 2G, 1.5GiB or a plain number; K is 1000, and Ki is 1024.

    what: The option that states the size, for messages.

    Raises UsageError: The size has another form, or is below a megabyte.
    """
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match:
        # Thousands of digits make an infinite float, which int() refuses.
        unit = (1024 if match[3] else 1000) ** _POWERS[(match[2] or "").upper()]
        num_bytes = int(min(float(match[1]) * unit, _MAX_BYTES))
    elif type(size) is int:
        num_bytes = size
    else:
        raise UsageError(f"{what} is {size!r:.40}; wanted bytes, such as 2G or 512M")
    if not _MIN_BYTES <= num_bytes < _MAX_BYTES:
        raise UsageError(f"{what} is {size!r:.40}; wanted 1M to a million T, such as 2G or 512M")
    return num_bytes


def format_count(number: int, what: str) -> str:
    """1 token, 2 tokens."""
    return f"{number} {what}{'s' * (number != 1)}"


def format_speed(tokens_per_second: float, decimals: int = 1) -> str:
    """29.7, 0.4 or 0.032: a slow speed never rounds to 0. decimals: of speeds from 10 on."""
    if tokens_per_second >= 10:
        return f"{tokens_per_second:.{decimals}f}"
    return f"{tokens_per_second:.1f}" if tokens_per_second >= 0.1 else f"{tokens_per_second:.2g}"


def format_time(seconds: float) -> str:
    """A length of time as text: 45 s below two minutes, 12 min above."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
