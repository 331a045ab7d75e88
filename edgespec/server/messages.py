"""The conversation that a request has: messages of chat completions, and the input of a response."""

from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

from edgespec import Turn, UsageError, parse_messages, split_begun
from edgespec.server.errors import ApiError, wrong
from edgespec.server.protocol import ChatMessage, Content, ContentPart, InputItem, ResponsesRequest, text_of

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}


class PlacedMessage(NamedTuple):
    """A message, and where the request has it, such as messages[2]."""

    place: str
    message: ChatMessage


def conversation_of(stated: Sequence[ChatMessage]) -> tuple[list[Turn], str]:
    """The messages of a request; as read_conversation gives them."""
    return read_conversation([PlacedMessage(f"messages[{i}]", each) for i, each in enumerate(stated)], "messages")


def read_conversation(stated: Sequence[PlacedMessage], param: str) -> tuple[list[Turn], str]:
    """The messages of a conversation, and the beginning of the answer: a last message of the assistant.

    param: The field of the request that has them.

    Raises ApiError: 400, there is none, or one has a role or a part that models here cannot read.
    """
    try:
        turns = parse_messages(_plain_message(each.place, each.message, param) for each in stated)
        return split_begun(turns, param)
    except UsageError as error:
        raise ApiError(400, str(error), param=param) from None


def _plain_message(place: str, stated: ChatMessage, param: str) -> dict[str, Any]:
    """The message as engines take it."""
    text = text_of(stated.content, place)
    if stated.role == "tool":
        return {"role": "tool", "content": text, "tool_call_id": stated.tool_call_id, "name": stated.name}
    if (role := _ROLES.get(stated.role)) is None:
        raise wrong(param, f"has the role '{stated.role[:40]}'; models here know {', '.join(_ROLES)}, tool", place)
    if role != "assistant":
        return {"role": role, "content": text}
    more = {"tool_calls": stated.tool_calls, "reasoning_content": stated.reasoning_content or stated.reasoning}
    return {"role": role, "content": text, **more}


def stated_messages(asked: ResponsesRequest) -> Iterator[PlacedMessage]:
    """Several items of the assistant, such as a text and calls, are one message.

    Raises ApiError: 400, an item of the input is none that models here can read.
    """
    if asked.instructions:
        yield PlacedMessage("instructions", ChatMessage(role="system", content=asked.instructions))
    if isinstance(asked.input, str):
        yield PlacedMessage("input", ChatMessage(role="user", content=asked.input))
        return
    said: Content | None = None  # by the assistant, beside calls that belong to the same turn
    calls: list[dict[str, Any]] = []
    call_ids: set[str] = set()
    begun = "input"  # where that turn begins
    for i, item in enumerate(asked.input):
        place = f"input[{i}]"
        if item.type == "reasoning":  # of an earlier answer; no template here takes it
            continue
        if item.type == "function_call":
            begun = begun if calls or said is not None else place
            calls.append(_call_of(item, place))
            call_ids.add(item.call_id or "")
            continue
        is_behind_calls = bool(calls) and item.type == "message" and item.role == "assistant"
        if (said is not None or calls) and not is_behind_calls:
            yield PlacedMessage(begun, ChatMessage(role="assistant", content=said, tool_calls=calls))
            said, calls = None, []
        if item.type == "function_call_output":
            _require_call(item, place, call_ids)
            yield PlacedMessage(place, ChatMessage(role="tool", content=item.output, tool_call_id=item.call_id))
        elif item.type == "item_reference":
            why = "and nothing is stored here; send the item itself (store: false)"
            raise wrong("input", f"is of the type 'item_reference', {why}", place)
        elif item.type != "message" or item.role is None:
            what = f"of the type '{item.type[:40]}'" if item.type != "message" else "a message without a role"
            known = "messages, reasoning, function_call and function_call_output"
            raise wrong("input", f"is {what}; models here read {known}", place)
        elif item.role == "assistant":
            begun = begun if calls else place
            said = _join_contents(said, item.content)
        else:
            yield PlacedMessage(place, ChatMessage(role=item.role, content=item.content))
    if said is not None or calls:
        yield PlacedMessage(begun, ChatMessage(role="assistant", content=said, tool_calls=calls))


def _call_of(item: InputItem, place: str) -> dict[str, Any]:
    """A call as chat completions state it. Raises ApiError: 400, it has no name."""
    if not item.name:
        raise wrong("input", "is a function_call without a name; give one", place)
    function = {"name": item.name, "arguments": item.arguments or "{}"}
    return {"id": item.call_id, "type": "function", "function": function}


def _require_call(item: InputItem, place: str, known: Set[str]) -> None:
    """Raises ApiError: 400, the result of a call stands before any call, or names one that is not there."""
    if not known or (item.call_id and item.call_id not in known):
        there = ", ".join(sorted(known)) or "none"
        raise wrong(
            "input",
            f"has the call_id '{(item.call_id or '')[:80]}', which no function_call before it has (there are: "
            f"{there[:400]}); send the function_call too",
            place,
        )


def _join_contents(first: Content | None, second: Content | None) -> Content | None:
    """The texts of one turn, each on lines of its own."""
    if not first or not second:
        return first or second
    return [*_parts(first), ContentPart(type="text", text="\n"), *_parts(second)]


def _parts(content: Content) -> list[ContentPart]:
    return [ContentPart(type="text", text=content)] if isinstance(content, str) else content
