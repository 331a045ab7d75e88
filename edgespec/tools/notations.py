"""Calls in notations that are read as a whole: Python's, and that of pairs. Pure."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_SCALAR = re.compile(r"[^,{}\[\]]*")
_PAIRS_NAME = re.compile(r"\s*(?:call:)?([\w-]+)\s*(?=\{)")
_HALF = re.compile("[\ud800-\udfff]")
_KEY = re.compile(r"\s*([^:{},\[\]]+?)\s*:\s*")


class WrittenCall(NamedTuple):
    """A call as it was read."""

    name: str
    arguments: Mapping[str, Any]


def load_json(text: str) -> Any:
    """A value of JSON. Raises ValueError: it is none, such as NaN, or a number too large to be written."""
    found = json.loads(text, parse_constant=_refuse)
    json.dumps(found, allow_nan=False)
    return found


def write_json(value: Any) -> str:
    """JSON that UTF-8 can hold: half of a surrogate pair, which is no character, as its escape."""
    return escape_halves(json.dumps(value, ensure_ascii=False))


def escape_halves(text: str) -> str:
    """JSON with each half of a surrogate pair as its escape."""
    return _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def parse_python(text: str, argument_names: Mapping[str, Sequence[str]]) -> list[WrittenCall]:
    """Calls as Python writes them, one or a list.

    Args:
        argument_names: Of each function that is known, in the order of its schema.

    Raises ValueError: It is something else, or a call of an unknown function.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"no Python: {error}") from None
    calls = tree.elts if isinstance(tree, (ast.List, ast.Tuple)) else [tree]
    if not calls:
        raise ValueError("an empty list")
    return [_python_call(call, argument_names) for call in calls]


def _python_call(call: ast.expr, argument_names: Mapping[str, Sequence[str]]) -> WrittenCall:
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError("no call")
    name = call.func.id
    places = argument_names.get(name)
    if places is None or len(call.args) > len(places) or any(each.arg is None for each in call.keywords):
        raise ValueError("no known call")
    given = [*zip(places, call.args, strict=False), *((each.arg, each.value) for each in call.keywords)]
    try:
        return WrittenCall(name, {str(key): _literal(value) for key, value in given})
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise ValueError("an argument is no literal") from None


def _literal(value: ast.expr) -> Any:
    """A value as Python or JSON writes it. Raises ValueError: it is none, or JSON cannot hold it."""
    words = {"true": True, "false": False, "null": None}
    found = words[value.id] if isinstance(value, ast.Name) and value.id in words else ast.literal_eval(value)
    json.dumps(found, allow_nan=False)
    return found


def parse_pairs(text: str, quote: str) -> WrittenCall:
    """A call as name{key:value,…}, with quote around texts. Raises ValueError: it is none."""
    found = _PAIRS_NAME.match(text)
    if not found:
        raise ValueError("no name")
    value, at = _pairs_value(text, found.end(), quote)
    if text[at:].strip() or not isinstance(value, dict):
        raise ValueError("no arguments")
    return WrittenCall(found[1], value)


def _pairs_value(text: str, at: int, quote: str, depth: int = 0) -> tuple[Any, int]:
    """The value that begins at a place, and where it ends."""
    if depth > 100:
        raise ValueError("nested too deep")
    if text.startswith(quote, at):
        end = text.find(quote, at + len(quote))
        if end < 0:
            raise ValueError("a text does not end")
        return text[at + len(quote) : end], end + len(quote)
    if text[at : at + 1] in ("{", "["):
        return _pairs_items(text, at, quote, depth)
    scalar = _SCALAR.match(text, at)
    assert scalar
    word = scalar[0].strip()
    try:
        return load_json(word), scalar.end()
    except ValueError:
        return word, scalar.end()


def _pairs_items(text: str, at: int, quote: str, depth: int) -> tuple[Any, int]:
    is_object, pairs, items = text[at] == "{", {}, []
    close = "}" if is_object else "]"
    at += 1
    while text[at : at + 1] != close:
        if is_object:
            if not (key := _KEY.match(text, at)):
                raise ValueError("no key")
            pairs[key[1]], at = _pairs_value(text, key.end(), quote, depth + 1)
        else:
            item, at = _pairs_value(text, at, quote, depth + 1)
            items.append(item)
        if text[at : at + 1] == ",":
            at += 1
        elif text[at : at + 1] != close:
            raise ValueError("no end")
    return (pairs if is_object else items), at + 1
