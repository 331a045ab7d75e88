"""The way in which a chat template takes tools, found by rendering it and not by the name of a model."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from json import dumps
from os.path import commonprefix
from re import search
from typing import Any

from edgespec.errors import ConversationError, ModelError
from edgespec.tools.call_events import join_calls
from edgespec.tools.call_parser import CallParser
from edgespec.tools.channels import read_channels
from edgespec.tools.formats import HERMES, CallFormat, find_format
from edgespec.tools.tool import Tool

# Texts that no template holds.
_TOOL, _VALUE, _RESULT, _SAID = "qzv_weather", "Qzvcity", "Qzvresult", "Qzvsaid"
_PROBE = Tool(
    name=_TOOL,
    description="Qzvtool",
    parameters={"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
)
_USER = {"role": "user", "content": "Qzvuser"}
_SPOKEN = {"role": "assistant", "content": _SAID}
_ID = "abcdefghi"  # nine characters, as Mistral's templates demand
_SHORT_IDS = r"length\s*[!=]=\s*9\b"
_READS_PARTS = r"\btext\b"
_VARIABLES = ("tools", "xml_tools")


Render = Callable[..., str]
"""Renders a template, its argument, with names, its keywords. Raises what rendering raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolTemplate:
    """How a conversation with tools is given to a chat template.

    format: How the model writes calls.
    variable: The name by which the template takes tools; "message" where the system message has them; None where
        it takes none, and a system message has to describe them.
    describes_all: It takes no tool with an argument that nothing describes.
    writes_calls: It writes the calls of earlier messages; otherwise they have to be part of a content.
    writes_both: It also writes a content beside them.
    has_text_arguments: It takes arguments as text rather than as objects.
    empty: What it takes for the content of a message that has none.
    takes_results: It takes messages of the role tool.
    takes_system: It takes a system message.
    has_short_ids: It takes ids of nine letters or digits alone.
    has_thinking: It takes the reasoning before a call as thinking, and not beside a content.
    """

    format: CallFormat = HERMES
    variable: str | None = None
    describes_all: bool = False
    writes_calls: bool = False
    writes_both: bool = False
    has_text_arguments: bool = False
    empty: str | None = ""
    takes_results: bool = False
    takes_system: bool = True
    has_short_ids: bool = False
    has_thinking: bool = False

    @property
    def description(self) -> str:
        """The format, and who tells the model of it, for people."""
        return f"{self.format.name}, by {'the chat template' if self.variable else 'a system message of edgespec'}"


def probe_template(template: str | None, render: Render, special: Mapping[str, str]) -> ToolTemplate:
    """Try what a template takes.

    special: Special tokens by the names that templates use.
    """
    if template is None:
        return ToolTemplate()
    probe = _Probe(template, render, special)
    format = find_format(template)
    variable, describes_all = (None, False) if format is None else probe.find_variable()
    names = probe.tools_for(variable, describes_all)
    found = ToolTemplate(
        format=format or HERMES,
        variable=variable,
        describes_all=describes_all,
        takes_system=probe.shows(_SAID, [{"role": "system", "content": _SAID}, _USER]),
        has_short_ids=search(_SHORT_IDS, template) is not None,
        has_thinking=search(r"\.thinking\b", template) is not None,
    )
    if format is None:
        return found
    return probe.find_messages(found, names)


def fit_contents(template: str | None, render: Render, special: Mapping[str, str]) -> Render:
    """Renders with contents as this template takes them: texts, or parts for roles whose texts it loses."""
    if template is None or search(_READS_PARTS, template) is None:
        return render
    in_parts: frozenset[str] = frozenset()
    for turn in (_USER, {"role": "system", "content": _SAID}, _SPOKEN):
        messages = {"user": [_USER], "system": [turn, _USER]}.get(turn["role"], [_USER, turn, _USER])
        # What a template takes from no role, and results of tools, it takes as the user's contents.
        more = in_parts | ({"user", "tool"} if turn is _USER else {turn["role"]})
        shown = [
            _Probe(template, _with_parts(render, roles), special).shows(turn["content"], messages)
            for roles in (in_parts, more)
        ]
        if not shown[0] and (shown[1] or in_parts):
            in_parts = more
    return _with_parts(render, in_parts) if in_parts else render


def _with_parts(render: Render, roles: Collection[str]) -> Render:
    def render_parts(template: str, *, messages: Sequence[Mapping[str, Any]], **names: Any) -> str:
        given = [_in_parts(each) if each["role"] in roles else each for each in messages]
        return render(template, messages=given, **names)

    return render_parts


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content is a list of parts: of one text, or of none."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}] if content else []}


@dataclass(frozen=True, slots=True)
class _Probe:
    template: str
    render: Render
    special: Mapping[str, str]

    def text(self, messages: Sequence[Any], **names: Any) -> str:
        """The text that the template makes of messages; empty where it does not take them."""
        try:
            return self.render(
                self.template, messages=messages, add_generation_prompt=True, **{**self.special, **names}
            )
        except (ConversationError, ModelError):
            return ""

    def shows(self, wanted: str, messages: Sequence[Any], **names: Any) -> bool:
        return wanted in self.text(messages, **names)

    def tools_for(self, variable: str | None, describes_all: bool) -> dict[str, Any]:
        if variable is None or variable not in _VARIABLES:
            return {}
        return {variable: [_PROBE.as_dict(describes_all=describes_all)]}

    def find_variable(self) -> tuple[str | None, bool]:
        """The name for the tools, and whether all of their arguments have to be described."""
        for variable in _VARIABLES:
            for describes_all in (False, True) if variable in self.template else ():
                if self.shows(_TOOL, [_USER], **self.tools_for(variable, describes_all)):
                    return variable, describes_all
        in_system = {"role": "system", "content": "", "tools": dumps([_PROBE.as_dict()["function"]])}
        return "message" if self.shows(_TOOL, [in_system, _USER]) else None, False

    def find_messages(self, found: ToolTemplate, names: Mapping[str, Any]) -> ToolTemplate:
        """How calls and results are given, by which of them come back."""
        results = self.shows(_RESULT, [_USER, _SPOKEN, _result()], **names)
        for has_text in (False, True):
            for empty in ("", None):
                if not self._comes_back(found.format, _call(empty, has_text), names):
                    continue
                said = _call(_SAID, has_text)
                return replace(
                    found,
                    writes_calls=True,
                    writes_both=self._comes_back(found.format, said, names)
                    and self.shows(_SAID, [_USER, said, _result()], **names),
                    has_text_arguments=has_text,
                    empty=empty,
                    takes_results=self.shows(_RESULT, [_USER, _call(empty, has_text), _result()], **names),
                )
        return replace(found, takes_results=results)

    def _comes_back(self, format: CallFormat, message: Mapping[str, Any], names: Mapping[str, Any]) -> bool:
        """True if a call can be read from what the template writes for it."""
        for follows in ([_result()], []):  # some templates write calls only if results follow, others otherwise
            whole = self.text([_USER, message, *follows], **names)
            same = len(commonprefix([whole, self.text([_USER], **names)]))  # noqa: RUF071  characters are meant
            # What both begin with may hold the first characters of a call: <think> and <tool_call>.
            for start in {same, max(whole.rfind(begin, 0, same) for begin in "<[>")} - {-1}:
                written = whole[start:].partition(_RESULT)[0]
                for is_open in {False, format.is_open}:
                    parser = CallParser(replace(format, is_open=is_open), [_PROBE], holds_arguments=True)
                    read = read_channels(written) if format.said else written
                    calls = join_calls(parser.push(read) + parser.flush())
                    if len(calls) == 1 and calls[0].parse() == {"place": _VALUE}:
                        return True
        return False


def _call(content: str | None, has_text: bool) -> dict[str, Any]:
    arguments: Any = {"place": _VALUE}
    function = {"name": _TOOL, "arguments": dumps(arguments) if has_text else arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": _ID, "type": "function", "function": function}],
    }


def _result() -> dict[str, Any]:
    return {"role": "tool", "content": _RESULT, "tool_call_id": _ID, "name": _TOOL}
