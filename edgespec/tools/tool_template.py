"""The way in which a chat template takes tools, found by rendering it and not by the name of a model."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
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
from edgespec.tools.notations import load_json
from edgespec.tools.tool import Tool

# Texts that no template holds.
_TOOL, _RESULT, _SAID, _THOUGHT = "qzv_weather", "Qzvresult", "Qzvsaid", "Qzvthought"
_VALUES = ("Qzvcity", "Qzvtown")
_PROBE = Tool(
    name=_TOOL,
    description="Qzvtool",
    parameters={"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
)
_USER = {"role": "user", "content": "Qzvuser"}
_SPOKEN = {"role": "assistant", "content": _SAID}
_IDS = ("abcdefghi", "abcdefghj")  # nine characters, as Mistral's templates demand
_SHORT_IDS = r"length\s*[!=]=\s*9\b"
_READS_PARTS = r"\btext\b"
_REASONING = "reasoning_content"  # the key that most templates read
_READS_THINKING_PARTS = r"""['"]thinking['"]"""
_READS_REASONING = r"\b(?:thinking|thought|reasoning)\b"  # other names for it
_VARIABLES = ("tools", "xml_tools")
_RESPONSES = "tool_responses"  # of a message with calls, in the templates of Gemma 4
_OBSERVATION, _CALLED = "observation", "metadata"  # of results, and a tool's name, in those of GLM-4-0414

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
    has_one_call: It takes one call a message.
    drops_said: It takes a content beside calls in no way, so that it is left out.
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
    has_one_call: bool = False
    drops_said: bool = False

    @property
    def description(self) -> str:
        """The format, and who tells the model of it, for people."""
        by = "the chat template" if self.variable else "a system message of edgespec"
        lost = "; what is said beside calls is left out" if self.drops_said else ""
        return f"{self.format.name}, by {by}{lost}"


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
    )
    return found if format is None else probe.find_messages(found, names)


def fit_messages(template: str | None, render: Render, special: Mapping[str, str]) -> Render:
    """Renders with contents and reasoning as this template takes them.

    Contents are texts, or parts for roles whose texts it loses; reasoning is a key of a message, or a part.
    Results of calls are messages, or in that of the calls. System messages are one where it loses or refuses a
    later one.
    """
    if template is None:
        return render
    if _RESPONSES in template:
        render = _fit_results(template, render, special, _join_results)
    elif _OBSERVATION in template and _CALLED in template:
        render = _fit_results(template, render, special, _observe_results)
    render = _fit_reasoning(template, render, special)
    if search(_READS_PARTS, template) is None:
        return _fit_systems(template, render, special)
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
    return _fit_systems(template, _with_parts(render, in_parts) if in_parts else render, special)


_Change = Callable[[Sequence[Mapping[str, Any]]], Sequence[Mapping[str, Any]]]
"""Messages to messages."""


def _fit_results(template: str, render: Render, special: Mapping[str, str], change: _Change) -> Render:
    """Renders with changed messages, unless the template makes the same of results in messages of their own."""
    called = [_USER, _call("", False), _result()]
    changed, plain = _Probe(template, _with(render, change), special), _Probe(template, render, special)
    is_needed = changed.shows(_RESULT, called) and changed.text(called) != plain.text(called)
    return changed.render if is_needed else render


def _fit_systems(template: str, render: Render, special: Mapping[str, str]) -> Render:
    """Renders with all system messages as one, unless the template takes a later one, or none at all."""
    later = [_USER, _SPOKEN, {"role": "system", "content": _RESULT}, _USER]
    if _Probe(template, render, special).shows(_RESULT, later):
        return render
    joined = _with(render, _join_systems)
    return joined if _Probe(template, joined, special).shows(_RESULT, later) else render


def _join_systems(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages that begin with the system messages as one."""
    systems = [each for each in messages if each["role"] == "system"]
    content = "\n\n".join(each["content"] for each in systems)
    first = [{**systems[0], "content": content}] if systems else []
    return [*first, *(each for each in messages if each["role"] != "system")]


def _with(render: Render, change: _Change) -> Render:
    def render_changed(template: str, *, messages: Sequence[Mapping[str, Any]], **names: Any) -> str:
        return render(template, messages=change(messages), **names)

    return render_changed


def _observe_results(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages in which a result is an observation, and a call a message with the name of the tool."""
    found: list[Mapping[str, Any]] = []
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        if message["role"] == "tool":
            found.append({**message, "role": _OBSERVATION})
        elif not calls or message.get("content"):
            found.append({name: value for name, value in message.items() if name != "tool_calls"})
        for call in calls:
            given = call["arguments"]
            written = given if isinstance(given, str) else dumps(given, ensure_ascii=False)
            found.append({"role": "assistant", _CALLED: call["name"], "content": written})
    return found


def _join_results(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages without results of calls, which are responses of the calls; what is said beside calls is apart."""
    found: list[dict[str, Any]] = []
    for message in messages:
        before = found[-1] if found else {}
        calls = {call.get("id"): call["function"]["name"] for call in before.get("tool_calls") or ()}
        if message["role"] == "tool" and calls:
            name = calls.get(message.get("tool_call_id")) or message.get("name")
            response = {"name": name, "response": _parsed(message["content"])}
            before[_RESPONSES] = [*before.get(_RESPONSES, ()), response]
            continue
        if message.get("tool_calls") and (said := message.get("content")):
            found.append({"role": message["role"], "content": said})
            message = {**message, "content": ""}
        found.append({**message})
    return found


def _parsed(content: Any) -> Any:
    """The object that a result spells in JSON; other results as they are."""
    with suppress(ValueError, TypeError):
        if isinstance(value := load_json(content), dict):
            return value
    return content


def _with_parts(render: Render, roles: Collection[str]) -> Render:
    return _with(
        render, lambda messages: [_in_parts(each) if each["role"] in roles else each for each in messages]
    )


def _fit_reasoning(template: str, render: Render, special: Mapping[str, str]) -> Render:
    """Renders with the reasoning of messages under the key that the template reads, or as a part of contents."""
    if search(_READS_REASONING, template) is None:
        return render
    probe = _Probe(template, render, special)
    thought = {_REASONING: _THOUGHT}
    messages = ([_USER, _SPOKEN | thought], [_USER, _call("", False) | thought, _result()])
    as_part = [""] if search(_READS_THINKING_PARTS, template) else []
    for key in (_REASONING, "thinking", "reasoning", "thought", *as_part):
        fitted = _with_reasoning(render, key, is_alone=False)
        if not any(replace(probe, render=fitted).shows(_THOUGHT, each) for each in messages):
            continue
        # Some take it before a call, and then no content beside it.
        both = [_USER, _call(_SAID, False) | thought, _result()]
        if key == _REASONING or replace(probe, render=fitted).text(both):
            return render if key == _REASONING else fitted
        return _with_reasoning(render, key, is_alone=True)
    return render


def _with_reasoning(render: Render, key: str, *, is_alone: bool) -> Render:
    """Renders with reasoning under a key, or as a part where that is empty.

    is_alone: What is said before calls becomes its end.
    """

    def fit(message: Mapping[str, Any]) -> Mapping[str, Any]:
        if not (thought := message.get(_REASONING)):
            return message
        rest = {name: value for name, value in message.items() if name != _REASONING}
        content = rest.get("content")
        if not key:
            said = [{"type": "text", "text": content}] if content and isinstance(content, str) else content or []
            return {**rest, "content": [{"type": "thinking", "thinking": thought}, *said]}
        if is_alone and content and "tool_calls" in rest:
            return {**rest, "content": "", key: f"{thought}\n\n{content}"}
        return {**rest, key: thought}

    return _with(render, lambda messages: [*map(fit, messages)])


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
        answered = [_USER, _SPOKEN, _result()]
        format = found.format
        for has_text in (False, True):
            for empty in ("", None):
                if not self._comes_back(format, _call(empty, has_text), names):
                    continue
                said = _call(_SAID, has_text)
                before, _, behind = self.text([_USER, said, _result()], **names).partition(_RESULT)
                is_late = _SAID in behind  # where some end a turn by it, so that the prompt begins none
                has_both = self._comes_back(format, said, names) and _SAID in before
                return replace(
                    found,
                    writes_calls=True,
                    writes_both=has_both,
                    has_text_arguments=has_text,
                    empty=empty,
                    takes_results=self.shows(_RESULT, [_USER, _call(empty, has_text), _result()], **names),
                    has_one_call=not self._comes_back(format, _call(empty, has_text, 2), names),
                    # A call without a mark is none behind a text, and in some templates turns have to alternate.
                    drops_said=is_late
                    or (
                        not has_both
                        and not (format.frames[0][0] and self.text([*answered, _SPOKEN, _USER], **names))
                    ),
                )
        return replace(found, takes_results=self.shows(_RESULT, answered, **names))

    def _comes_back(self, format: CallFormat, message: Mapping[str, Any], names: Mapping[str, Any]) -> bool:
        """True if the calls can be read from what the template writes for them."""
        wanted = [{"place": value} for value in _VALUES[: len(message["tool_calls"])]]
        results = [_result(number) for number in range(len(wanted))]
        for follows in (results, []):  # some templates write calls only if results follow, others otherwise
            whole = self.text([_USER, message, *follows], **names)
            same = len(commonprefix([whole, self.text([_USER], **names)]))  # noqa: RUF071  characters are meant
            # What both begin with may hold the first characters of a call: <think> and <tool_call>.
            for start in {same, max(whole.rfind(begin, 0, same) for begin in "<[>")} - {-1}:
                written = whole[start:].partition(_RESULT)[0]
                for is_open in {False, format.is_open}:
                    parser = CallParser(replace(format, is_open=is_open), [_PROBE], holds_arguments=True)
                    read = read_channels(written) if format.said else written
                    calls = join_calls(parser.push(read) + parser.flush())
                    if [call.parse() for call in calls] == wanted:
                        return True
        return False


def _call(content: str | None, has_text: bool, num_calls: int = 1) -> dict[str, Any]:
    calls = []
    for call_id, value in [*zip(_IDS, _VALUES, strict=True)][:num_calls]:
        arguments: Any = {"place": value}
        function = {"name": _TOOL, "arguments": dumps(arguments) if has_text else arguments}
        calls.append({"id": call_id, "type": "function", "function": function})
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _result(number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "content": _RESULT, "tool_call_id": _IDS[number], "name": _TOOL}
