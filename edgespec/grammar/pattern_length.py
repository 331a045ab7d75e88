"""How long a text may have to become before it matches a regular expression, once a match has been begun."""

import re
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

UNKNOWN = 40  # bytes, of an expression in a dialect that Python does not read
_MOST = 1 << 16
_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)


def longest_way(pattern: str) -> int:
    """A bound of the bytes that the shortest match has, whichever branch and optional part was begun.

    Of `b|a{30}` it is 30, and of `x(abc)?` 4.
    """
    try:
        return min(_length(parser.parse(pattern)), _MOST)
    except (re.error, RecursionError, OverflowError, ValueError):
        return UNKNOWN


def _length(parsed: Any) -> int:
    return sum(_length_of_part(code, argument) for code, argument in parsed)


def _length_of_part(code: Any, argument: Any) -> int:
    if code is codes.LITERAL:
        return _bytes_of(argument)
    if code is codes.IN:
        return max(_bytes_of(each[0] if kind is codes.RANGE else each) if kind in _CHARACTERS else 1
                   for kind, each in argument)  # fmt: skip
    if code in _REPEATS:
        least, _, inner = argument
        return min(max(int(least), 1), _MOST) * _length(inner)
    if code is codes.SUBPATTERN:
        return _length(argument[-1])
    if code is codes.BRANCH:
        return max(map(_length, argument[1]))
    return 0 if code is codes.AT else 1


_CHARACTERS = (codes.LITERAL, codes.RANGE)


def _bytes_of(character: int) -> int:
    return len(chr(character).encode("utf-8", "replace"))
