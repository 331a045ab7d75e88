"""How models write calls of tools: a declaration for each family, found by what its chat template says.

CallFormat is data, which formats.toml holds; call_body.py reads by it, and notations.py writes.
"""

import json
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

from edgespec.system.tables import read_table
from edgespec.tools import channels


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonBody:
    """Calls as JSON: an object with name and arguments, or a list of them.

    names, arguments: Keys of both; the first of each is what templates write, others are read too.
    is_keyed: The object has one key, the name, whose value is the arguments.
    is_list: Templates write a list.
    """

    names: tuple[str, ...] = ("name", "tool_name", "function")
    arguments: tuple[str, ...] = ("arguments", "parameters", "args")
    is_keyed: bool = False
    is_list: bool = False

    def around(self, name: str) -> tuple[str, str]:
        """The texts before and behind the arguments of a call, as templates write them."""
        written = json.dumps(name, ensure_ascii=False)
        if self.is_keyed:
            return f"{{{written}: ", "}"
        return f'{{"{self.names[0]}": {written}, "{self.arguments[0]}": ', "}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedBody:
    """The name, then its arguments as a JSON object.

    before: Texts of which one may come before the name.
    between: The first is between name and arguments, others may come before it.
    after: What comes behind the arguments.
    text_name: A name that stands for text, which follows.
    """

    between: tuple[str, ...]
    before: tuple[str, ...] = ()
    after: str = ""
    text_name: str | None = None

    def around(self, name: str) -> tuple[str, str]:
        """The texts before and behind the arguments of a call, as templates write them."""
        return "".join(self.before[:1]) + name + self.between[0], self.after


@dataclass(frozen=True, slots=True, kw_only=True)
class TagBody:
    """The name, then each argument between tags. Texts stand as they are, other values as JSON.

    begin, name_end: Around the name. A name_end of "" ends at the white space or the tag behind it.
    key, key_end, value, value_end: Around each argument's name and value.
    kinds: Behind the name, what tells that a value is text, and what that it is JSON; else the schema tells.
    end: Behind the last argument.
    space: Around values.
    quotes: What may stand around a text too.
    """

    begin: str
    name_end: str
    key: str
    key_end: str
    value_end: str
    value: str = ""
    kinds: tuple[str, str] = ("", "")
    end: str = ""
    space: str = "\n"
    quotes: tuple[str, str] = ("", "")

    def opening(self, key: str, *, is_text: bool) -> str:
        """The text before the value of an argument."""
        kind = self.kinds[0] if is_text else self.kinds[1]
        return self.key + key + kind + self.key_end + ("\n" + self.value if self.value else "") + self.space


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonBody:
    """Calls as Python writes them: [name(key="value")].

    has_lines: Templates write each on a line of its own, and no list.
    """

    has_lines: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsBody:
    """call:name{key:value}, with quote around texts."""

    quote: str


Body = JsonBody | NamedBody | TagBody | PythonBody | PairsBody


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How one family of models writes calls.

    signs: Texts that tell the family's chat templates: all of one of these rows are in them. Where none are given,
        the beginning of the first frame does.
    frames: What stands before and behind a call, or a list of calls; the first is what templates write. A frame
        without an end lasts as long as its calls. White space within frames may be missing.
    noise: Texts that may stand around frames and mean nothing.
    is_bare: JSON that is a call counts without a frame too, as the first thing of an answer.
    is_open: The prompt ends in the beginning of a frame.
    joint: What templates write between two frames.
    outer: What templates write around all frames.
    said: What stands before text that is no call.
    asides: What stands around the texts that may come before, each once, in this order.
    """

    name: str
    frames: tuple[tuple[str, str], ...]
    body: Body
    _: KW_ONLY
    signs: tuple[tuple[str, ...], ...] = ()
    noise: tuple[str, ...] = ()
    is_bare: bool = False
    is_open: bool = False
    joint: str = "\n"
    outer: tuple[str, str] = ("", "")
    said: str = ""
    asides: tuple[tuple[str, str], ...] = ()

    @property
    def list_marks(self) -> tuple[str, str, str] | None:
        """What templates write before, between and behind calls in one frame; None where each has its own."""
        match self.body:
            case PythonBody(has_lines=True):
                return "", "\n", ""
            case PythonBody() | JsonBody(is_list=True):
                return "[", ", ", "]"
        return None

    def marks(self) -> Iterator[str]:
        """The texts that a parser has to see, also where they are special tokens."""
        for pair in (*self.frames, self.outer):
            yield from pair
        yield from self.noise
        if isinstance(self.body, NamedBody):
            yield from (*self.body.before, *self.body.between, self.body.after)
        if isinstance(self.body, PairsBody):
            yield self.body.quote


_BODIES: dict[str, type[Body]] = {
    "json": JsonBody,
    "named": NamedBody,
    "tags": TagBody,
    "python": PythonBody,
    "pairs": PairsBody,
}
_HARMONY = CallFormat(
    "harmony",
    ((f"{channels.CALL}functions.", ""),),
    NamedBody(between=(channels.CALL_BODY,)),
    signs=((channels.CHANNEL, "<|call|>"),),
    noise=(channels.NEXT,),
    joint=channels.NEXT,
    said=channels.FINAL,
    asides=((channels.ANALYSIS, channels.NEXT), (channels.COMMENTARY, channels.NEXT)),
)


def _read(name: str, stated: dict[str, Any]) -> CallFormat:
    kind = next(kind for kind in _BODIES if kind in stated)
    body = _BODIES[kind](**stated.pop(kind))
    return CallFormat(name, body=body, **stated)


FORMATS = (_HARMONY, *(_read(*each) for each in read_table(__file__, "formats.toml").items()))
HERMES = FORMATS[-1]


def find_format(template: str) -> CallFormat | None:
    """The format that a chat template states; None where it states none that is known."""
    for each in FORMATS:
        signs = each.signs or ((each.frames[0][0].strip(),),)
        if any(all(text in template for text in row) for row in signs):
            return each
    return None
