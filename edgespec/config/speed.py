"""Speeds in tokens per second, as users read them."""


def format_speed(tokens_per_second: float, decimals: int = 1) -> str:
    """29.7, 0.4 or 0.032: a slow speed never rounds to 0. decimals: of speeds from 10 on."""
    if tokens_per_second >= 10:
        return f"{tokens_per_second:.{decimals}f}"
    return f"{tokens_per_second:.1f}" if tokens_per_second >= 0.1 else f"{tokens_per_second:.2g}"
