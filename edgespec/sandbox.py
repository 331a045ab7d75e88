"""Run a model's Jinja template: text that comes with a model and is hostile until shown otherwise.

Jinja's immutable sandbox keeps it from Python's objects. What remains is making huge values: operators and
methods that can are bounded or forbidden, and so is the length of the output.
"""

from collections.abc import Iterator
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgespec.errors import ModelError

_MAX_OUTPUT = 10_000_000  # characters
_MAX_VALUE = 1_000_000  # items or characters of a repeated value, and of whole numbers
_GROWING_METHODS = ("center", "expandtabs", "ljust", "rjust", "zfill")
_GROWING_FILTERS = ("center", "format", "indent", "wordwrap", "xmlattr")


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**", "%"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Raises SecurityError: the result could be larger than any template needs."""
        if operator == "%" and isinstance(left, str):
            raise SecurityError("formatting with % is not allowed")
        sizes = [abs(side) if isinstance(side, (int, float)) else len(side) for side in (left, right)]
        if (operator == "**" and max(sizes) > 64) or (operator == "*" and sizes[0] * sizes[1] > _MAX_VALUE):
            raise SecurityError(f"{operator} makes a value that is too large")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        """str.format takes a width as wide as memory; Jinja asks here before is_safe_attribute."""
        return _no_format if super().wrap_str_format(value) is not None else None

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _GROWING_METHODS and super().is_safe_attribute(obj, attr, value)


def render(template: str, **names: Any) -> str:
    """The template's text for these names.

    Raises:
        ModelError: The template is broken, refuses the conversation, or does what the sandbox forbids.
    """
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    for name in _GROWING_FILTERS:
        environment.filters.pop(name, None)
    try:
        parts = environment.from_string(template).generate(
            raise_exception=_refuse, strftime_now=lambda pattern: datetime.now().strftime(pattern), **names
        )
        return "".join(_bounded(parts))
    except Exception as error:  # a template can raise anything
        said = f"{type(error).__name__}: {error}" if not isinstance(error, TemplateError) else str(error)
        raise ModelError(f"the chat template of this model does not take the conversation: {said}") from None


def _no_format(*_: Any, **__: Any) -> NoReturn:
    raise SecurityError("str.format is not allowed")


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _bounded(parts: Iterator[str]) -> Iterator[str]:
    size = 0
    for part in parts:
        size += len(part)
        if size > _MAX_OUTPUT:
            raise SecurityError(f"it writes more than {_MAX_OUTPUT} characters")
        yield part
