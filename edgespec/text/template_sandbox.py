"""Render a model's Jinja template: text that comes with a model and may be hostile.

Jinja's immutable sandbox keeps it from Python's objects; the operators and methods that make huge values most
easily are bounded or forbidden. Loops and values that grow step by step remain: so chat_template.py runs this file
as a process of its own, and ends it in time. It imports nothing of edgespec.

For each rendering it reads and writes one line of JSON: {"template": …, "names": {…}} in, and {"text": …},
{"refusal": …} (the template called raise_exception) or {"error": …} out. It ends when its stdin is closed.
"""

import json
import os
import sys
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from itertools import islice
from queue import SimpleQueue
from string import Formatter
from threading import Thread
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import do_indent
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_OUTPUT = 10_000_000  # characters, beside those of the messages
_MAX_VALUE = 1_000_000  # items or characters of a repeated value, and of whole numbers
_MAX_INDENT = 16  # characters, of tojson and indent
_MAX_FIELDS = 16  # of a text that str.format fills
_GROWING_METHODS = ("center", "expandtabs", "ljust", "rjust", "zfill")
_GROWING_FILTERS = ("center", "format", "indent", "wordwrap", "xmlattr")


class _Refusal(TemplateError):
    """The template says that it does not take these names."""


class _Generation(Extension):
    """The tag {% generation %} of transformers, around what models are trained on: writes what is in it."""

    tags = {"generation"}  # noqa: RUF012  as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**", "%"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Raises SecurityError: The result could be larger than any template needs."""
        if operator == "%" and isinstance(left, str):
            raise SecurityError("formatting with % is not allowed")
        sizes = [abs(side) if isinstance(side, (int, float)) else len(side) for side in (left, right)]
        if (operator == "**" and max(sizes) > 64) or (operator == "*" and sizes[0] * sizes[1] > _MAX_VALUE):
            raise SecurityError(f"{operator} makes a value that is too large")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        """str.format takes a width as wide as memory, so only a few bare fields are allowed."""
        wrapped = super().wrap_str_format(value)
        return _no_format if wrapped is not None and not _has_bare_fields(value.__self__) else wrapped

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _GROWING_METHODS and super().is_safe_attribute(obj, attr, value)


def render(template: str, names: dict[str, Any]) -> str:
    """Render a template with these names; it can raise anything.

    tools and documents are none where they are not among the names, as in transformers.
    """
    names = {"tools": None, "documents": None, **names}
    parts = _compile(template).generate(
        raise_exception=_refuse, strftime_now=lambda pattern: datetime.now().strftime(pattern), **names
    )
    return "".join(_limit(parts, _MAX_OUTPUT + _num_characters(names)))


@lru_cache(4)
def _compile(template: str) -> Template:
    """Takes some 10 ms, which a model's chats need once."""
    extensions = ["jinja2.ext.loopcontrols", _Generation]
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    for name in _GROWING_FILTERS:
        environment.filters.pop(name, None)
    environment.filters |= {"tojson": _tojson, "indent": _indent}
    return environment.from_string(template)


def _num_characters(value: Any) -> int:
    """The number of characters of all texts in a JSON value."""
    if isinstance(value, str):
        return len(value)
    each = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_num_characters, each))


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Jinja's filter `indent`, by spaces or by a text, limited to what cannot fill the memory."""
    size = len(width) if isinstance(width, str) else width
    if not isinstance(size, int) or not 0 <= size <= _MAX_INDENT or len(text) > _MAX_VALUE:
        raise SecurityError(f"indent is given {width!r} for {len(text)} characters; wanted at most {_MAX_INDENT}")
    return do_indent(str(text), width, first, blank)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it from transformers; Jinja's own filter escapes it for HTML and sorts keys."""
    if indent is not None and not 0 <= indent <= _MAX_INDENT:
        raise SecurityError(f"tojson indents by {indent}; wanted 0 to {_MAX_INDENT}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _has_bare_fields(text: str) -> bool:
    try:
        fields = [*islice(Formatter().parse(text), _MAX_FIELDS + 1)]
    except ValueError:
        return False
    return len(fields) <= _MAX_FIELDS and not any(spec or conversion for _, _, spec, conversion in fields)


def _no_format(*_: Any, **__: Any) -> NoReturn:
    raise SecurityError(f"str.format is not allowed but for up to {_MAX_FIELDS} bare fields")


def _refuse(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _limit(parts: Iterator[str], longest: int) -> Iterator[str]:
    size = 0
    for part in parts:
        size += len(part)
        if size > longest:
            raise SecurityError(f"it writes more than {longest} characters")
        yield part


def _read(lines: "SimpleQueue[bytes]") -> None:
    """Read requests also during a rendering: it may never end, and has to when the parent is gone."""
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)


def _serve() -> None:
    lines: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=_read, args=(lines,), daemon=True).start()
    while True:
        request = json.loads(lines.get())
        try:
            answer = {"text": render(request["template"], request["names"])}
        except _Refusal as refusal:
            answer = {"refusal": str(refusal)}
        except Exception as error:
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            answer = {"error": f"{kind}{error}"}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()
