"""The name and the time of an answer."""

import secrets
from time import time
from typing import NamedTuple


class Identity(NamedTuple):
    id: str
    created: int  # seconds of the epoch


def new_identity(kind: str) -> Identity:
    """An id that begins with a kind, such as chatcmpl-1f3c… or resp_1f3c…"""
    return Identity(f"{kind}{secrets.token_hex(12)}", int(time()))
