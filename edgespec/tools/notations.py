"""Calls as text: read where their notation is read as a whole, and written for models without a template. Pure."""

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from edgespec.system.printable import HALF
from edgespec.tools.formats import Body, CallFormat, JsonBody, NamedBody, PairsBody, PythonBody, TagBody
from edgespec.tools.tool import Tool

_SCALAR = re.compile(r"[^,{}\[\]]*")
_PAIRS_NAME = re.compile(r"\s*(?:call:)?([\w-]+)\s*(?=\{)")
# Of functions and arguments as models write them, also where Python has no such name.
NAME_IN_PYTHON = r"[\w$@.-]++"
# A text or a comment is one piece; a text without an end takes all that follows, so that the time is linear.
_PYTHON_NAMES = re.compile(
    r"""(?s:(?P<quote>"{3}|'{3}|"|')(?:\\.|(?!(?P=quote))[^\\])*+(?P=quote)?)"""
    rf"|#.*|(?P<name>{NAME_IN_PYTHON})(?=\s*[(=])|{NAME_IN_PYTHON}"
)
# What Python reads with a warning, which a user would see: a number joined to a word, and escapes that are none.
# A filter for them would be set for the whole process, whose other threads would lose their own.
_WARNED = re.compile(
    r"""(?s:(?P<prefix>\w*+)(?P<quote>"{3}|'{3}|"|')(?:\\.|(?!(?P=quote))[^\\])*+(?P=quote)?)"""
    r"|#[^\r\n]*|(?P<joined>\d[\w.]*?(?:and|else|for|if|in|is|not|or))|\d[\w.]*+|\w++"
)
_ESCAPE = re.compile(r"\\(?:(?P<octal>[4-7][0-7]{2})|(?P<known>[\\'\"abfnrtvxNuU0-7\r\n])|)")
_KEY = re.compile(r"\s*+([^:{},\[\]\s]++(?:\s++[^:{},\[\]\s]++)*+)\s*+:\s*+")


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
    return HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def parse_python(text: str, argument_names: Mapping[str, Sequence[str]]) -> list[WrittenCall]:
    """Calls as Python writes them: one, a list, or one a line.

    argument_names: Of each function that is known, in the order of its schema.

    Raises ValueError: It is something else, or a call of an unknown function.
    """
    names: dict[str, str] = {}  # by what stands for them, which Python can read

    def replace_name(found: re.Match[str]) -> str:
        if not found["name"]:
            return found[0]
        names[replaced := f"_{found.start()}"] = found["name"]
        return replaced

    trees = _expressions(_PYTHON_NAMES.sub(replace_name, text))
    calls = trees[0].elts if len(trees) == 1 and isinstance(trees[0], (ast.List, ast.Tuple)) else trees
    if not calls:
        raise ValueError("an empty list")
    return [_python_call(call, names, argument_names) for call in calls]


def _expressions(text: str) -> list[ast.expr]:
    """The expressions of some lines. Raises ValueError: there is something else."""
    try:
        lines = ast.parse(_WARNED.sub(_without_warnings, text.strip())).body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"no Python: {error}") from None
    found = [each.value for each in lines if isinstance(each, ast.Expr)]
    if len(found) < len(lines):
        raise ValueError("a statement")
    return found


def _without_warnings(piece: re.Match[str]) -> str:
    """A piece of Python as Python reads it without a warning. Raises ValueError: No literal has it."""
    if piece["joined"] or (prefix := (piece["prefix"] or "").lower()) not in ("", "r", "u"):
        raise ValueError("no literal")
    return _ESCAPE.sub(_escape, piece[0]) if piece["quote"] and prefix != "r" else piece[0]


def _escape(found: re.Match[str]) -> str:
    if found["octal"]:
        return f"\\u{int(found['octal'], 8):04x}"
    return found[0] if found["known"] else "\\\\"


def parse_literal(text: str) -> Any:
    """A value as Python or JSON writes it. Raises ValueError: it is none, or JSON cannot hold it."""
    (expression,) = _expressions(text)
    return _literal(expression)


def _python_call(
    call: ast.expr, names: Mapping[str, str], argument_names: Mapping[str, Sequence[str]]
) -> WrittenCall:
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError("no call")
    name = names.get(call.func.id, "")
    places = argument_names.get(name)
    if places is None or len(call.args) > len(places) or any(each.arg not in names for each in call.keywords):
        raise ValueError("no known call")
    named = ((names[str(each.arg)], each.value) for each in call.keywords)
    given = [*zip(places, call.args, strict=False), *named]
    return WrittenCall(name, {key: _literal(value) for key, value in given})


def _literal(value: ast.expr) -> Any:
    """A value as Python or JSON writes it. Raises ValueError: it is none, or JSON cannot hold it."""
    try:
        found = ast.literal_eval(_JsonWords().visit(value))
        json.dumps(found, allow_nan=False)
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise ValueError("no literal") from None
    return found


class _JsonWords(ast.NodeTransformer):
    """JSON's words for values, as Python has them."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node


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


def write_calls(format: CallFormat, calls: Sequence[WrittenCall]) -> str:
    """Calls as a model of the family writes them."""
    written = [_write(format.body, call) for call in calls]
    if marks := format.list_marks:
        before, between, behind = marks
        written = [before + between.join(written) + behind]
    begin, end = format.frames[0]
    before, behind = format.outer
    return before + format.joint.join(begin + each + end for each in written) + behind


def describe_tools(format: CallFormat, tools: Iterable[Tool]) -> str:
    """A system message that tells a model of its tools, and how to call them."""
    described = "\n".join(_json(tool.as_dict()["function"]) for tool in tools)
    example = write_calls(format, [WrittenCall("NAME", {"ARGUMENT": "VALUE"})])
    return (
        f"You can call these functions:\n{described}\n\nTo call one, write nothing but its name and its arguments "
        f"in exactly this form:\n{example}\nYou are then told its result. If none helps, answer in words."
    )


def _write(body: Body, call: WrittenCall) -> str:
    match body:
        case JsonBody() | NamedBody():
            before, behind = body.around(call.name)
            return before + _json(dict(call.arguments)) + behind
        case TagBody():
            parts = [body.begin + call.name + body.name_end]
            for key, value in call.arguments.items():
                is_text = isinstance(value, str)
                text = value if is_text else _json(value)
                parts.append(body.opening(key, is_text=is_text) + text + body.space + body.value_end)
            return "\n".join([*parts, body.end])
        case PairsBody():
            return f"call:{call.name}{_pairs(dict(call.arguments), body.quote)}"
        case PythonBody():
            given = ", ".join(f"{key}={_python_value(value)}" for key, value in call.arguments.items())
            return f"{call.name}({given})"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _python_value(value: Any) -> str:
    if isinstance(value, str):
        return _json(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_json(key)}: {_python_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_python_value, value)) + "]"
    return repr(value)


def _pairs(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_pairs(each, quote)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_pairs(each, quote) for each in value) + "]"
    return _json(value)
