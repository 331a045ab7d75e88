"""The grammar of answers that call tools, from the declaration of a family's format.

In the Lark dialect of llguidance, in which <[7]> is the token 7 and %json a value of a schema.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from edgespec.errors import FormatError, UsageError
from edgespec.grammar.endings import largest_opening
from edgespec.grammar.exact_schema import exact
from edgespec.grammar.response_format import ResponseFormat
from edgespec.grammar.schema import is_note, prepare_schema, with_inner
from edgespec.system.context_managers import contextmanager
from edgespec.tools.formats import CallFormat, JsonBody, NamedBody, PythonBody, TagBody
from edgespec.tools.notations import NAME_IN_PYTHON
from edgespec.tools.tool import Tool, ToolUse, parts_of, schema_refusal

# Keywords of texts that are values of JSON, and not of those that stand as they are.
_TEXT_BOUNDS = ("format", "anyOf", "oneOf", "allOf", "$ref", "not", "if")
# Keywords that bound arguments together, and none by itself.
_JOINT_BOUNDS = (
    *("$ref", "anyOf", "oneOf", "allOf", "not", "if", "enum", "const", "minProperties", "maxProperties"),
    *("patternProperties", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
)
# Keywords of the parts of a schema that state arguments.
_STATING = frozenset(
    {
        *("properties", "patternProperties", "additionalProperties", "enum", "const"),
        *("$ref", "anyOf", "oneOf", "allOf"),
    }
)
_SHARED = ("#/$defs/", "#/definitions/")  # references that hold for each argument alone, too
_WHOLE = "(all arguments)"
_ANY_TEXT = "(?s:.*)"
_NAME_BEFORE_JSON = r"\s*[\w:-]+\s*\{"
# The white space that templates put into JSON, from which models learned it, and no other.
_SPACED: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# None, as in answers where no tools are given.
_COMPACT = {"whitespace_flexible": False}
# Any white space that is not too much.
_JSON_GAP = r"[ \t\r\n]{0,9}"
_SPACED_FREELY = {"whitespace_pattern": r"[ \t\n]{0,20}"}
_MOST_AROUND = 120  # characters that stand around the name and the arguments of a call


def constrained_format(format: CallFormat) -> CallFormat:
    """The format of calls that a grammar lets through: as templates write them, or without a frame."""
    return replace(format, frames=format.frames[:1])


def call_grammar(
    use: ToolUse, format: CallFormat, special: Mapping[str, int], text_schema: Mapping[str, Any] | None = None
) -> ResponseFormat:
    """A grammar of answers that call tools of use, or may, as their choice has it.

    Args:
        special: Tokens that a grammar has to name, by their spelling.
        text_schema: What an answer without calls has to match; None for any text, also before calls.

    Raises UsageError: There is no grammar for the format; ToolError: there is none for the schema of a tool.
    """
    for tool in use.possible:
        _require_usable(tool)
    longest = max(_most_characters(tool, format) for tool in use.possible)
    text = largest_opening({"anyOf": [text_schema]}) if text_schema else 0
    return ResponseFormat("grammar", _Writer(use, format, special).grammar(text_schema), max(longest, text))


def _most_characters(tool: Tool, format: CallFormat) -> int:
    """A bound of the characters of a tool's shortest call."""
    frame = sum(map(len, (*format.frames[0], *format.outer, format.joint)))
    return frame + len(tool.name) + _MOST_AROUND + largest_opening({"anyOf": [closed(tool.parameters)]})


class _Writer:
    def __init__(self, use: ToolUse, format: CallFormat, special: Mapping[str, int]) -> None:
        self._use, self._format = use, format
        self._chosen = use.possible
        self._special = dict(special)
        names = sorted(special, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    def grammar(self, text_schema: Mapping[str, Any] | None) -> str:
        chosen = self._chosen
        rules = ["tool: " + " | ".join(f"tool_{i}" for i in range(len(chosen)))]
        for i, tool in enumerate(chosen):
            with _naming(tool):
                rules += self._tool_rules(f"tool_{i}", tool)
        opening = self._format.outer[0] + self._format.frames[0][0]
        if self._format.is_open:  # the prompt has it
            rules.append(f"calls: {self._calls('')}")
            return "\n".join([*self._start_behind(opening, text_schema), *rules, ""])
        rules.append(f"calls: {self._calls(opening)}")
        trigger = next(iter(self._parts(opening.strip())), "")
        if trigger and self._literal(trigger)[0] != "<":
            rules.append(f"rest: {self._calls(opening[len(trigger) :])}")
        return "\n".join([*self._start(trigger, text_schema), *rules, ""])

    def _calls(self, opening: str) -> str:
        """One call, or several, behind what opens the first."""
        begin, end = self._format.frames[0]
        behind = self._literal(self._format.outer[1])
        if marks := self._format.list_marks:
            before, between, after = marks
            several = f"({self._literal(between)} tool)*" if self._use.is_parallel else ""
            return _join(self._literal(opening + before), "tool", several, self._literal(after + end), behind)
        more = _join(self._literal(self._format.joint + begin), "tool", self._literal(end))
        several = f"({more})*" if self._use.is_parallel else ""
        return _join(self._literal(opening), "tool", self._literal(end), several, behind)

    def _start(self, trigger: str, text_schema: Mapping[str, Any] | None) -> list[str]:
        """The rule of the whole answer: calls, or text, or text before calls."""
        if self._use.choice != "auto":
            return ["start: calls"]
        if text_schema is not None:
            said = _join(self._literal(self._format.said), _json(text_schema, _COMPACT))
            return ["start: calls | text", f"text: {said}"]
        if self._format.said:
            asides = [" TEXT ".join(map(self._literal, each)) for each in self._format.asides]
            once = " ".join(f"({each})?" for each in asides)  # with more of them a way to the end is hard to find
            said = f"said: {self._literal(self._format.said)} TEXT?"
            return [f"start: {once} (calls | said)", said, "TEXT: /(?s:.+)/"]
        if not trigger:  # calls stand alone, as JSON
            return ["start: calls | TEXT?", rf"TEXT: /[^{{\[\s]{_ANY_TEXT}/"]
        bare, text = "", ""
        rules = []
        if isinstance(self._format.body, JsonBody) and self._format.is_bare:
            bare, text = " | bare", f" & ~/{self._bare_head(self._chosen)}{_ANY_TEXT}/"
            rules = self._bare_rules(self._format.body)
        if self._literal(trigger)[0] == "<":  # a token, which no text holds
            return [f"start: TEXT? calls{bare} | TEXT?", f"TEXT: /(?s:.+)/{text}", *rules]
        return [
            f"start: before rest{bare} | TEXT?",
            f"before[lazy]: /{_ANY_TEXT}{_escape(trigger)}/{text}",
            f"TEXT: {_without(trigger)}{text}",
            *rules,
        ]

    def _bare_rules(self, body: JsonBody) -> list[str]:
        """A call without its frame, which some models write in its place: with any white space, perhaps fenced."""
        end = "/" + _JSON_GAP.join(["", r"\}", r"\]?", "(```)?", ""]) + "/"
        rules = ["bare: " + " | ".join(f"bare_{i}" for i in range(len(self._chosen)))]
        for i, tool in enumerate(self._chosen):
            given = _JSON_GAP.join(["", ",", f'"{body.arguments[0]}"', ":", ""])
            head = f"/{self._bare_head([tool])}{given}/"
            rules.append(f"bare_{i}: {head} {_json(closed(tool.parameters), _SPACED_FREELY)} {end}")
        return rules

    def _bare_head(self, tools: Sequence[Tool]) -> str:
        """The beginning of a call without a frame, as a regular expression."""
        assert isinstance(self._format.body, JsonBody)
        key = self._format.body.names[0]
        names = "|".join(tool.name for tool in tools)
        opening = _JSON_GAP.join(["", "(```(json)?)?", r"\[?", r"\{", f'"{key}"', ":", ""])
        return f'{opening}"({names})"'

    def _start_behind(self, opening: str, text_schema: Mapping[str, Any] | None) -> list[str]:
        """The first rules where the prompt already ends in what opens a call, or a text with a name."""
        if self._use.choice != "auto":
            return ["start: calls"]
        assert isinstance(self._format.body, NamedBody)
        stated = self._format.body.text_name
        name = self._literal(f"{stated}\n") if stated else ""
        if text_schema is not None:
            return ["start: calls | text", f"text: {name} {_json(text_schema, _COMPACT)}"]
        other = "" if stated else f" & ~/{_NAME_BEFORE_JSON}{_ANY_TEXT}/"  # no text looks like a call
        if (mark := self._literal(opening))[0] == "<":  # a token, which no text holds
            return [f"start: ({name} TEXT {mark})? calls | {name} TEXT?", f"TEXT: /(?s:.+)/{other}"]
        before = f"before[lazy]: /{_ANY_TEXT}{_escape(opening)}/{other}"
        start = f"start: calls | {name} before calls | {name} TEXT?"
        return [start, before, f"TEXT: {_without(opening)}{other}"]

    def _tool_rules(self, rule: str, tool: Tool) -> list[str]:
        match body := self._format.body:
            case JsonBody() | NamedBody():
                before, behind = map(self._literal, body.around(tool.name))
                arguments = f"{rule}_arguments"
                call = f"{rule}: {_join(before, arguments, behind)}"
                return [call, f"{arguments}: {_json(closed(tool.parameters))}"]
            case TagBody():
                return self._tag_rules(rule, tool, body)
            case PythonBody():
                return self._python_rules(rule, tool)
        raise UsageError(
            "tool_choice and strict need a grammar, and there is none for calls of the form "
            f"'{self._format.name}'; say auto, and leave strict out"
        )

    def _tag_rules(self, rule: str, tool: Tool, body: TagBody) -> list[str]:
        """Arguments in the order of the schema, each between its tags."""
        schema = _separable(tool)
        required, parts, rules = schema.get("required", ()), [], []
        for i, (key, inner) in enumerate(schema["properties"].items()):
            value = f"{rule}_{i}"
            kind = inner.get("type") if isinstance(inner, Mapping) else None
            begin = body.opening(key, is_text=kind == "string")
            if kind == "string" and ("enum" in inner or "const" in inner):
                end = self._literal(body.space + body.value_end)
                texts = [inner["const"]] if "const" in inner else inner["enum"]
                texts = [each for each in texts if isinstance(each, str) and body.value_end not in each]
                if not texts:
                    raise schema_refusal(
                        tool,
                        f"no text is left for its argument '{key}' that may stand between tags: one must not hold "
                        f"{body.value_end}; give others",
                    )
                words = " | ".join(self._literal(each) or '""' for each in texts)
                rules.append(f"{value}: ({words}) {end}")
            elif kind == "string":
                inner = exact(inner)  # which has patterns for dates and times
                _require_held(inner, tool, key)
                space, end = _escape(body.space), _escape(body.value_end)
                bounds = [f"/{each}{space}{end}/" for each in _texts(inner)]
                # Who reads it takes the first end, also of a text that does not keep to its bounds by then.
                bounds = [*bounds, f"~/{_ANY_TEXT}{end}(?s:.+)/"] if bounds else [f"/{_ANY_TEXT}{end}/"]
                rules.append(f"{value}[lazy]: " + " & ".join(bounds))
            else:
                rules.append(
                    f"{value}: {_json(_argument(schema, inner))} {self._literal(body.space + body.value_end)}"
                )
            part = _join(self._literal(begin), value, self._literal("\n"))
            parts.append(part if key in required else f"({part})?")
        head = self._literal(body.begin + tool.name + body.name_end + "\n")
        return [f"{rule}: {_join(head, *parts, self._literal(body.end))}", *rules]

    def _python_rules(self, rule: str, tool: Tool) -> list[str]:
        """Arguments by name, in the order of the schema, with commas between those that are there."""
        schema = _separable(tool)
        first, more, rules = '""', "", []
        for i, (key, inner) in reversed([*enumerate(schema["properties"].items())]):
            if not re.fullmatch(NAME_IN_PYTHON, key):
                if not self._use.binds(tool):
                    continue
                raise schema_refusal(
                    tool,
                    f"its argument '{key}' is not a name in calls as this model writes them; wanted letters, "
                    "digits, underscores and hyphens",
                )
            rules.append(f"{rule}_{i}: {_join(self._literal(f'{key}='), _json(_argument(schema, inner)))}")
            begun, is_needed = _join(f"{rule}_{i}", more), key in schema.get("required", ())
            rules.append(f"{rule}_from_{i}: {begun if is_needed else f'{begun} | {first}'}")
            first, more = f"{rule}_from_{i}", _join(f'(", " {rule}_{i})' + "?" * (not is_needed), more)
        return [f"{rule}: {_join(self._literal(tool.name + '('), first, self._literal(')'))}", *rules]

    def _literal(self, text: str) -> str:
        """A text as it has to stand, with special tokens where it spells them."""
        return _join(
            *(
                f"<[{self._special[piece]}]>" if piece in self._special else json.dumps(piece, ensure_ascii=False)
                for piece in self._parts(text)
            )
        )

    def _parts(self, text: str) -> list[str]:
        """A text, cut at special tokens."""
        return [piece for piece in (self._cut.split(text) if self._cut else [text]) if piece]


def _texts(schema: Mapping[str, Any]) -> list[str]:
    """Regular expressions of a text, which has to match all of them; none for any text."""
    found = []
    if "minLength" in schema or "maxLength" in schema:
        found.append(f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})")
    if isinstance(pattern := schema.get("pattern"), str):
        # A search, as in JSON schemas; of what stands between anchors all.
        before, behind = (_ANY_TEXT if not pattern.startswith("^") else ""), _ANY_TEXT
        pattern = pattern.removeprefix("^")
        if re.search(r"(?<!\\)(\\\\)*\$\Z", pattern):
            pattern, behind = pattern[:-1], ""
        inner = re.sub(r"\\.|/|\n", lambda part: {"/": "\\/", "\n": "\\n"}.get(part[0], part[0]), pattern)
        found.append(f"{before}({inner}){behind}")
    return found


def _require_held(schema: Mapping[str, Any], tool: Tool, key: str) -> None:
    """Raises ToolError: It bounds a text, which stands as it is, by what no regular expression holds."""
    bounds = [each for each in _TEXT_BOUNDS if each in schema]
    if is_note(schema.get("format")):
        bounds.remove("format")
    if bounds:
        raise schema_refusal(
            tool,
            f"it bounds its argument '{key}' by {', '.join(bounds)}, which the grammar of calls between tags "
            "cannot hold; state an enum or a pattern",
        )


def _require_usable(tool: Tool) -> None:
    """Raises ToolError: Its schema is no JSON, or none that a grammar is made of."""
    try:
        json.dumps(dict(tool.parameters), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise schema_refusal(tool, f"it is not JSON ({error})") from None
    with _naming(tool):
        prepare_schema(closed(tool.parameters))


@contextmanager
def _naming(tool: Tool) -> Iterator[None]:
    """Raises ToolError where the schema of a tool is refused."""
    try:
        yield
    except FormatError as error:
        raise schema_refusal(tool, str(error)) from None


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _json(schema: Mapping[str, Any], spaced: Mapping[str, Any] = _SPACED) -> str:
    prepared = exact(prepare_schema(dict(schema)))
    return "%json " + json.dumps({"x-guidance": spaced, **prepared}, ensure_ascii=False)


def closed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A schema whose object has no other arguments than are stated, unless it says that it may.

    One that has parts which state arguments too is left open.
    """
    is_open = "$ref" in parameters or not all(_STATING.isdisjoint(part) for part in parts_of(parameters))
    closing = {} if is_open else {"additionalProperties": False}
    return {**closing, "type": "object", "properties": {}, **parameters}


def _separable(tool: Tool) -> dict[str, Any]:
    """The schema of arguments that are written one by one. Raises ToolError: It bounds them together."""
    schema = closed(tool.parameters)
    if bounds := [each for each in _JOINT_BOUNDS if each in schema]:
        raise schema_refusal(
            tool,
            f"it bounds its arguments together by {', '.join(bounds)}, which the grammar of calls that are no "
            "JSON cannot hold; state properties and required alone",
        )
    if lacking := [each for each in schema.get("required", ()) if each not in schema["properties"]]:
        raise schema_refusal(tool, f"it requires '{lacking[0]}', which is none of its properties; add it to them")
    return schema


def _argument(schema: Mapping[str, Any], inner: Any) -> dict[str, Any]:
    """The schema of one argument alone, with all that its references lead to."""
    if not isinstance(inner, Mapping):
        return {}
    alone = {**{each: schema[each] for each in ("$defs", "definitions") if each in schema}, **inner}
    if (moved := _moved(alone)) == alone:
        return alone
    return {**moved, "$defs": {**moved.get("$defs", {}), _WHOLE: _moved(schema)}}


def _moved(schema: Any) -> Any:
    """A schema whose references to all arguments lead to them under their name in $defs."""
    if not isinstance(schema, Mapping):
        return schema
    changed = with_inner(schema, _moved)
    reference = unquote(str(schema.get("$ref", "")))
    if reference == "#" or (reference.startswith("#/") and not reference.startswith(_SHARED)):
        changed["$ref"] = f"#/$defs/{_WHOLE}{schema['$ref'][1:]}"
    return changed


def _without(text: str) -> str:
    """A terminal: any text in which another one does not occur."""
    return f"/(?s:.+)/ & ~/{_ANY_TEXT}{_escape(text)}{_ANY_TEXT}/"


def _escape(text: str) -> str:
    """A text as a regular expression."""
    special = ".+*?()|[]{}^$/\\"
    return "".join("\\n" if each == "\n" else f"\\{each}" if each in special else each for each in text)
