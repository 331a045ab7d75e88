"""Sizes as users read them."""

import pytest

from edgespec.system.units import format_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (377_088, "377 kB"), (98_362_432, "98 MB"), (1_540_000_000, "1.5 GB")],
)
def test_no_size_is_shown_as_nothing(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
