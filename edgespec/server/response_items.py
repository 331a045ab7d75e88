"""The output of a response as it comes: reasoning, a message, calls of tools, and the events that tell of them."""

from collections.abc import Iterator, Sequence
from typing import Any

from edgespec import CallArguments, CallEnd, CallStart, ToolUse
from edgespec.server.answer_parts import new_identity

NamedEvent = tuple[str, dict[str, Any]]  # the type of an event and its fields


class ResponseItems:
    """Items in their order; the last one may be open."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._is_open = False
        self._waiting: list[dict[str, Any]] = []  # log-probabilities of tokens that spell no text yet

    def add_text(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[NamedEvent]:
        """Add to the message, which begins if none is open; white space between items is no message."""
        if not self._is_last_open("message"):
            self._waiting += logprobs
            text = text.lstrip() if self.items else text
            if not text:
                return
            yield from self.begin_message()
            logprobs, self._waiting = self._waiting, []
        part = self._part
        part["text"] += text
        part["logprobs"] += logprobs
        if text or logprobs:
            yield "response.output_text.delta", {**self._place, "delta": text, "logprobs": logprobs}

    def add_reasoning(self, text: str) -> Iterator[NamedEvent]:
        """Add to the reasoning, which begins if none is open."""
        if not self._is_last_open("reasoning"):
            item: dict[str, Any] = {
                "type": "reasoning",
                "id": new_identity("rs_").id,
                "summary": [],
                "encrypted_content": None,
            }
            yield from self._begin_with_part(item, {"type": "reasoning_text", "text": ""})
        self._part["text"] += text
        yield "response.reasoning_text.delta", {**self._place, "delta": text}

    def add_call(self, event: CallStart | CallArguments | CallEnd) -> Iterator[NamedEvent]:
        """Begin a call, add to its arguments, or end it."""
        if isinstance(event, CallStart):
            self._waiting = []  # of tokens that belong to no text
            stated = {"call_id": event.id, "name": event.name, "arguments": ""}
            yield from self._begin({"type": "function_call", "id": new_identity("fc_").id, **stated})
        elif isinstance(event, CallArguments):
            self.items[-1]["arguments"] += event.text
            yield "response.function_call_arguments.delta", {**self._item_place, "delta": event.text}
        else:
            yield from self.close("completed")

    def begin_message(self) -> Iterator[NamedEvent]:
        item = {"type": "message", "id": new_identity("msg_").id, "role": "assistant"}
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield from self._begin_with_part(item, part)

    def close(self, status: str) -> Iterator[NamedEvent]:
        """End the open item, if one is."""
        if not self._is_open:
            return
        item, self._is_open = self.items[-1], False
        item["status"] = status
        if item["type"] != "function_call":
            part = item["content"][0]
            said = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield f"response.{part['type']}.done", {**self._place, **said}
            yield "response.content_part.done", {**self._place, "part": part}
        else:
            said = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**self._item_place, **said}
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": item}

    def finish(self, status: str) -> Iterator[NamedEvent]:
        """End the output; one without an item becomes an empty message, and one of reasoning alone stays so."""
        if not self.items:
            yield from self.begin_message()
        if self._is_last_open("message"):
            yield from self.add_text("", self._waiting)
        yield from self.close(status)

    def _begin(self, item: dict[str, Any]) -> Iterator[NamedEvent]:
        yield from self.close("completed")
        item["status"] = "in_progress"
        self.items.append(item)
        self._is_open = True
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)}

    def _begin_with_part(self, item: dict[str, Any], part: dict[str, Any]) -> Iterator[NamedEvent]:
        item["content"] = []
        yield from self._begin(item)
        yield "response.content_part.added", {**self._place, "part": dict(part)}
        item["content"] = [part]

    @property
    def has_open_message(self) -> bool:
        return self._is_last_open("message")

    def _is_last_open(self, kind: str) -> bool:
        return self._is_open and self.items[-1]["type"] == kind

    @property
    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = self.items[-1]["content"][0]
        return part

    @property
    def _item_place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    @property
    def _place(self) -> dict[str, Any]:
        return {**self._item_place, "content_index": 0}


def flat_tools(use: ToolUse | None) -> list[dict[str, Any]]:
    """Tools as /v1/responses states them."""
    return [
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description or None,
            "parameters": dict(tool.parameters),
            "strict": tool.strict,
        }
        for tool in (use.tools if use else ())
    ]


def flat_choice(use: ToolUse | None) -> str | dict[str, str]:
    """A choice of tools as /v1/responses states it."""
    if use is None or use.choice in ("auto", "required"):
        return "auto" if use is None else use.choice
    return {"type": "function", "name": use.choice}
