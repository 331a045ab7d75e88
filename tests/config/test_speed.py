import pytest

from edgespec.system.units import format_speed


@pytest.mark.parametrize(
    ("rate", "decimals", "text"),
    [(29.71, 1, "29.7"), (29.71, 0, "30"), (4.26, 0, "4.3"), (0.44, 0, "0.4"), (0.032, 1, "0.032"), (0.0, 0, "0")],
)
def test_a_slow_speed_does_not_round_to_nothing(rate: float, decimals: int, text: str) -> None:
    assert format_speed(rate, decimals) == text
