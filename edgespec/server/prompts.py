"""Texts as requests state them: one or several, each a string or token ids."""

from typing import Any

from edgespec.server.errors import ApiError

Text = str | list[int]


def texts_of(field: str, stated: str | list[Any]) -> list[Text]:
    """The texts of a field. Raises ApiError: 400, one is none or empty."""
    several = [stated] if isinstance(stated, str) or all(type(each) is int for each in stated) else stated
    for each in several:
        is_ids = isinstance(each, list) and all(type(token) is int for token in each)
        if not each or not (isinstance(each, str) or is_ids):
            raise ApiError(
                400, f"{field} is empty or mixed; wanted a text, token ids, or a list of either", param=field
            )
    return several
