"""The messages of a conversation, and the tokens that a model was trained on for them.

Special tokens that a message spells stay text. A chat template comes with a model: template_sandbox.py decides
what it may touch, and the process that renders it is ended if that takes too long or too much memory.
"""

import hashlib
import json
import reprlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, takewhile
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple, get_args

from edgespec.errors import ConversationError, ManifestError, ModelError, UsageError
from edgespec.system.line_process import LineProcess, WorkEnded, ask_bounded, dispose, start_python
from edgespec.system.printable import one_line
from edgespec.system.text_files import decode_text, read_plain
from edgespec.text.tokenizer import Tokenizer
from edgespec.tools.notations import WrittenCall, describe_tools, write_calls
from edgespec.tools.tool import Tool, ToolCall, is_too_deep
from edgespec.tools.tool_template import Render, ToolTemplate
from edgespec.types import Role, TokenIds

ROLES = get_args(Role)
_MAX_BYTES = 16 << 20
_NAMED = 400  # characters of ids that a message names
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"  # of short ids of calls
_RENDER_S, _RENDER_BYTES = 10.0, 400 << 20
_BYTES_PER_CHARACTER = 40  # of the request; its escapes and copies take some 20
_MAX_WORDS = 300  # characters of what a template says
_MAX_ROLES = 8  # of messages, that are named
_SANDBOX = Path(__file__).with_name("template_sandbox.py")
_REFUSED = "the chat template of this model does not take the conversation"


class Message(NamedTuple):
    """One turn of a conversation."""

    role: Role
    content: str
    reasoning: str = ""  # of the assistant before its content; most templates leave it out


class CallMessage(NamedTuple):
    """A turn of the assistant that calls tools."""

    content: str
    calls: tuple[ToolCall, ...]
    reasoning: str = ""

    @property
    def role(self) -> str:
        """Whose turn it is."""
        return "assistant"


class ResultMessage(NamedTuple):
    """The result of a call."""

    content: str
    call_id: str
    name: str = ""  # of the tool; empty where the message does not say

    @property
    def role(self) -> str:
        """Whose turn it is."""
        return "tool"


Turn = Message | CallMessage | ResultMessage


def parse_calls(given: Any) -> tuple[ToolCall, ...]:
    """The calls of a message of the assistant. Raises UsageError: they are none."""
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise UsageError(f"tool_calls is {reprlib.repr(given)}; wanted a list of calls")
    return tuple(_parse_call(each) for each in given)


def _parse_call(given: Any) -> ToolCall:
    if isinstance(given, ToolCall):
        return given
    stated = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(stated, Mapping) or not isinstance(stated.get("name"), str):
        raise UsageError(
            f"tool_calls has {reprlib.repr(given)}; wanted objects with id, type and function, which has name and "
            "arguments"
        )
    arguments = stated.get("arguments") or "{}"
    if not isinstance(arguments, str):  # as some clients send them
        if is_too_deep(arguments) or not isinstance(arguments, Mapping):
            raise UsageError(
                f"tool_calls has the arguments {reprlib.repr(arguments)}; wanted a JSON object as text"
            )
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id=str(given.get("id") or ""), name=stated["name"], arguments=arguments or "{}")


def require_answerable(messages: Sequence[object]) -> None:
    """Raises UsageError: The result of a call stands before any call, or names one that is not there."""
    known: set[str] = set()
    for message in messages:
        if isinstance(message, CallMessage):
            known |= {call.id for call in message.calls}
        elif isinstance(message, ResultMessage) and (
            not known or (message.call_id and message.call_id not in known)
        ):
            there = ", ".join(sorted(known))[:_NAMED] or "none"
            raise UsageError(
                f"messages has the role tool with the tool_call_id '{message.call_id[:80]}', which no tool_calls "
                f"before it has (there are: {there}); send the assistant's message with its tool_calls too"
            )


def read_template(path: Path) -> str:
    """Raises ManifestError: The file cannot be read or is not UTF-8."""
    try:
        return decode_text(read_plain(path, _MAX_BYTES))
    except (OSError, ValueError) as error:
        raise ManifestError(f"{path} cannot be read ({error}); export the model again") from None


class TemplateProcess:
    """A process that renders templates; it starts with start(), or with the first rendering."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._process: LineProcess | None = None

    def start(self) -> LineProcess:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                try:
                    self._process = start_python(str(_SANDBOX))
                except OSError as error:
                    raise ModelError(f"cannot start Python to render the chat template ({error})") from None
                self._end = weakref.finalize(self, dispose, self._process)
            return self._process

    def close(self) -> None:
        """End the process; a later rendering starts another."""
        if self._process is not None:
            self._end()
            self._process = None

    def render(self, template: str, **names: Any) -> str:
        """Render a template with these names, whose values JSON can hold.

        Raises:
            ConversationError: The template refuses the conversation.
            ModelError: The template is broken, does what the sandbox forbids, or takes more than 10 s or some
                400 MB.
        """
        request = json.dumps({"template": template, "names": names}).encode() + b"\n"
        with self._lock:
            try:
                most_bytes = _RENDER_BYTES + _BYTES_PER_CHARACTER * len(request)
                answer = json.loads(ask_bounded(self.start(), request, _RENDER_S, most_bytes))
            except BaseException as error:  # its late answer would be taken for the next request's
                self.close()
                if isinstance(error, WorkEnded):
                    raise ModelError(f"{_REFUSED}: {error}") from None
                raise
        if "refusal" in answer:
            said, roles = one_line(answer["refusal"], _MAX_WORDS), _roles(names.get("messages", ()))
            raise ConversationError(
                f"the chat template of this model refuses the conversation: {said} (the roles of its messages are "
                f"{roles}); send messages that the template takes"
            )
        if "error" in answer:
            raise ModelError(f"{_REFUSED}: {answer['error']}")
        return str(answer["text"])


def _roles(messages: Sequence[Mapping[str, Any]]) -> str:
    """The roles of messages in their order, the first of them."""
    shown = [one_line(str(each.get("role")), 20) for each in messages[:_MAX_ROLES]]
    num_more = len(messages) - len(shown)
    return ", ".join([*shown, *([f"and {num_more} more"] if num_more else [])]) or "none"


def encode_chat(
    template: str | None,
    render: Render,
    messages: Sequence[Turn],
    tokenizer: Tokenizer,
    special: dict[str, str],
    switches: Mapping[str, Any] | None = None,
    tools: Sequence[Tool] = (),
    find_tool_template: Callable[[], ToolTemplate] = ToolTemplate,
) -> TokenIds:
    """Tokens of a conversation up to where the assistant speaks next.

    A model without a template is not a chat model: it continues the contents, joined by blank lines. special has
    special tokens by the names that templates use: bos_token, eos_token.

    Args:
        switches: Further names that the template reads, such as enable_thinking.
        find_tool_template: How the template takes tools; asked where the conversation has some.

    Raises:
        ConversationError: The template refuses this conversation, or every private-use character stands in it.
        ModelError: The template cannot be rendered.
    """
    mark = _unused_character("".join(_texts([messages, [tool.as_dict() for tool in tools], dict(switches or {})])))
    has_tools = tools or any(not isinstance(message, Message) for message in messages)
    how = find_tool_template() if has_tools else ToolTemplate()

    def escape(text: str) -> str:
        for token in tokenizer.special_tokens:
            text = text.replace(token, token[0] + mark + token[1:])
        return text

    names = names_for(how, messages, tools, escape)
    for message in names["messages"]:  # templates look for these marks in earlier answers, to leave reasoning out
        if message["role"] == "assistant" and message["content"]:
            for token in tokenizer.think_marks:
                message["content"] = message["content"].replace(token[0] + mark + token[1:], token)
    if template is None:
        text = "\n\n".join(str(message["content"]) for message in names["messages"])
        return tokenizer.encode(text.replace(mark, ""))
    text = render(
        template, **names, add_generation_prompt=True, **special, **_escape_all(dict(switches or {}), escape)
    )
    text = text.replace(_escaped(mark), mark)
    # Cut at the template's own special tokens first; the marks in messages are dropped after that.
    return tokenizer.encode(text, special=True, ignore=mark)


def _unused_character(contents: str) -> str:
    used = set(contents)
    private_use = map(chr, chain(range(0xE000, 0xF8FF), range(0xF0000, 0xFFFFD)))
    free = (each for each in private_use if each not in used and _escaped(each) not in contents)
    if (unused := next(free, None)) is None:
        raise ConversationError("the messages have every private-use character; leave one of them out")
    return unused


def _escaped(character: str) -> str:
    """A character as templates write it that keep their JSON to ASCII."""
    return json.dumps(character)[1:-1]


def _texts(value: Any) -> Iterable[str]:
    """All texts within lists, tuples and dicts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, ToolCall):
        yield value.id + value.name
        yield from _texts(_arguments(value))  # in which escapes of JSON are characters
    elif isinstance(value, dict):
        yield from chain.from_iterable(map(_texts, [*value, *value.values()]))
    elif isinstance(value, (list, tuple)):
        yield from chain.from_iterable(map(_texts, value))


def names_for(
    how: ToolTemplate, turns: Sequence[Any], tools: Sequence[Tool], escape: Callable[[str], str]
) -> dict[str, Any]:
    """The variables messages, and the one that takes the tools.

    Args:
        turns: Messages, CallMessages and ResultMessages.
        escape: Keeps special tokens that a text spells from being taken for such.
    """
    messages = _messages(how, turns, escape)
    if not tools:
        return {"messages": messages}
    if how.variable is None:
        escaped = [
            Tool(
                name=escape(tool.name),
                description=escape(tool.description),
                parameters=_escape_all(dict(tool.parameters), escape),
            )
            for tool in tools
        ]
        described = describe_tools(how.format, escaped)
        return {"messages": _instruct(messages, described, takes_system=how.takes_system)}
    stated = [_escape_all(tool.as_dict(describes_all=how.describes_all), escape) for tool in tools]
    if how.variable == "message":
        if not messages or messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": ""})
        functions = json.dumps([tool["function"] for tool in stated], ensure_ascii=False)
        messages[0] = {**messages[0], "tools": functions}
        return {"messages": messages}
    return {"messages": messages, how.variable: stated}


def _messages(how: ToolTemplate, turns: Sequence[Any], escape: Callable[[str], str]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    tool_of: dict[str, str] = {}
    turns = _spread_calls(turns) if how.has_one_call else turns
    for i, turn in enumerate(turns):
        content = escape(turn.content)
        if isinstance(turn, CallMessage):
            tool_of |= {call.id: call.name for call in turn.calls}
            messages.append(_call_message(how, content, turn.calls, escape) | _reasoning(turn, escape))
        elif not isinstance(turn, ResultMessage):
            messages.append({"role": turn.role, "content": content, **_reasoning(turn, escape)})
        elif how.takes_results:
            name = turn.name or tool_of.get(turn.call_id, "")
            call_id = _short(turn.call_id) if how.has_short_ids else escape(turn.call_id)
            messages.append({"role": "tool", "content": content, "tool_call_id": call_id, "name": escape(name)})
        else:
            content = f"<tool_response>\n{content}\n</tool_response>"
            if i and isinstance(turns[i - 1], ResultMessage):  # turns of user and assistant alternate
                messages[-1]["content"] += "\n" + content
            else:
                messages.append({"role": "user", "content": content})
    return messages


def _spread_calls(turns: Sequence[Any]) -> list[Any]:
    """Each call in a message of its own, and its result behind it; results without an id in the order of calls."""
    spread: list[Any] = []
    rest = [*turns]
    while rest:
        turn = rest.pop(0)
        calls = turn.calls if isinstance(turn, CallMessage) else ()
        results = [*takewhile(lambda each: isinstance(each, ResultMessage), rest)] if calls else []
        if len(calls) < 2:
            spread.append(turn)
            continue
        del rest[: len(results)]
        for number, call in enumerate(calls):
            spread.append(CallMessage("", (call,)) if number else turn._replace(calls=(call,)))
            found = next((each for each in results if each.call_id in (call.id, "")), None)
            if found is not None:
                spread.append(results.pop(results.index(found)))
        spread += results
    return spread


def _reasoning(turn: Message | CallMessage, escape: Callable[[str], str]) -> dict[str, Any]:
    return {"reasoning_content": escape(turn.reasoning)} if turn.reasoning else {}


def _call_message(
    how: ToolTemplate, content: str, calls: Sequence[ToolCall], escape: Callable[[str], str]
) -> dict[str, Any]:
    content = "" if how.drops_said else content
    if not how.writes_calls or (content and not how.writes_both):
        written = write_calls(
            how.format, [WrittenCall(escape(call.name), _escape_all(_arguments(call), escape)) for call in calls]
        )
        return {"role": "assistant", "content": content + "\n" + written if content else written}
    stated = []
    for call in calls:
        arguments: Any = _escape_all(_arguments(call), escape)
        if how.has_text_arguments:
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": escape(call.name), "arguments": arguments}
        call_id = _short(call.id) if how.has_short_ids else escape(call.id)
        stated.append({"id": call_id, "type": "function", "function": function})
    return {"role": "assistant", "content": content or how.empty, "tool_calls": stated}


def _arguments(call: ToolCall) -> dict[str, Any]:
    """The arguments of an earlier call; text that is no object, as one that was cut short, becomes one."""
    try:
        found = call.parse()
    except ValueError:
        return {"arguments": call.arguments}
    return {"arguments": call.arguments} if is_too_deep(found) else found


def _instruct(messages: list[dict[str, Any]], text: str, *, takes_system: bool) -> list[dict[str, Any]]:
    """Messages that begin with what the model is told of its tools."""
    role = "system" if takes_system else "user"
    if not takes_system and messages and messages[0]["role"] == "system":  # which the template drops in this place
        return [messages[0], *_instruct(messages[1:], text, takes_system=False)]
    if messages and messages[0]["role"] == role:
        first = messages[0]
        parts = [first["content"], text] if takes_system else [text, first["content"]]
        return [{**first, "content": "\n\n".join(part for part in parts if part)}, *messages[1:]]
    return [{"role": role, "content": text}, *messages]


def _short(call_id: str) -> str:
    """An id of nine letters or digits."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).digest()[:8], "big")
    return "".join(_DIGITS[number // 62**i % 62] for i in range(9))


def _escape_all(value: Any, escape: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, dict):
        return {escape(str(key)): _escape_all(each, escape) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_escape_all(each, escape) for each in value]
    return value
