"""Conversations as rounds, and as files: JSON Lines, a header and then one message a line, written whole or not.

    {"format": "edgespec conversation", "version": 1, "model": "smollm2-135m", "num_dropped": 0,
     "sampling": {"temperature": 0.2, …}}
    {"role": "user", "content": "Why is the sky blue?"}
    {"role": "assistant", "content": "Because …", "finish_reason": "cancelled"}

A message of the user that is followed by another one got no word of an answer. Calls of tools and what these gave
stand between a message and its answer, as in OpenAI's API: with tool_calls, and with the role tool.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.decoding.sampling import SamplingParams
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.system.disk import replace_file
from edgespec.system.text_files import decode_text, explain_unreadable, read_plain
from edgespec.system.typed_json import read_lines_as
from edgespec.text.chat_template import ROLES, CallMessage, Message, ResultMessage, Turn, parse_calls

FORMAT, VERSION = "edgespec conversation", 1
# Leaving out rounds frees this share of the context at once, since the model must read the rest again each time.
_FREED_SHARE = 0.25
_MAX_BYTES = 64 << 20
_SAMPLING = tuple(each.name for each in fields(SamplingParams) if each.name != "logit_bias")


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """The messages of a conversation."""

    messages: tuple[Turn, ...] = ()
    model: str | None = None  # the user's name for it
    name: str | None = None  # that the user gave the conversation
    sampling: SamplingParams | None = None  # without logit_bias
    num_dropped: int = 0  # messages after the system message that are no longer sent to the model
    cut_short: tuple[tuple[int, str], ...] = ()  # positions of answers that did not end by themselves, and why

    @classmethod
    def read(cls, path: Path) -> "Transcript":
        """Raises UsageError: The file cannot be read, is damaged, or is no conversation."""
        with explain_unreadable(path, "a saved conversation"):
            text = decode_text(read_plain(path, _MAX_BYTES))
            header, *rest = list(read_lines_as(dict[str, Any], text)) or [{}]
            if header.get("format") != FORMAT:
                raise ValueError("it does not begin as one; nothing was loaded")
            if header.get("version") != VERSION:
                raise ValueError(
                    f"it is of version {header.get('version')!r}, and this edgespec reads {VERSION}; use a newer "
                    "one"
                )
            messages = tuple(_parse_message(number, each) for number, each in enumerate(rest, 2))
            num_dropped, model, name = header.get("num_dropped", 0), header.get("model"), header.get("name")
            if type(num_dropped) is not int or not 0 <= num_dropped <= len(messages):
                raise ValueError(f"it says that {num_dropped!r} of {len(messages)} messages were dropped")
            reasons = [each.get("finish_reason") for each in rest]
            found = cls(
                messages=messages,
                model=model if isinstance(model, str) else None,
                name=name if isinstance(name, str) else None,
                sampling=_parse_sampling(header.get("sampling")),
                num_dropped=num_dropped,
                cut_short=tuple((i, str(reason)) for i, reason in enumerate(reasons) if reason is not None),
            )
            try:
                read_rounds(found)
            except UsageError as error:
                raise ValueError(str(error)) from None
            return found

    def write(self, path: Path) -> None:
        """Write a file that only its owner may read. Raises OSError: it cannot be written and stays as it was."""
        replace_file(path, "".join(line + "\n" for line in self.lines()).encode())

    def save(self, path: Path) -> None:
        """Write a file where the user asked for it. Raises EdgeSpecError: it cannot be written there."""
        try:
            self.write(path)
        except (OSError, ValueError) as error:
            raise EdgeSpecError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None

    def documents(self) -> list[dict[str, Any]]:
        """The messages as OpenAI's API has them."""
        return [_document(message) for message in self.messages]

    def lines(self) -> list[str]:
        reasons = dict(self.cut_short)
        header: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "num_dropped": self.num_dropped,
        }
        if self.name:
            header["name"] = self.name
        if self.sampling:
            header["sampling"] = {name: getattr(self.sampling, name) for name in _SAMPLING}
        documents: list[dict[str, Any]] = [header]
        for i, document in enumerate(self.documents()):
            documents.append(document | ({"finish_reason": reasons[i]} if i in reasons else {}))
        return [json.dumps(document) for document in documents]


def _document(turn: Turn) -> dict[str, Any]:
    stated: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if isinstance(turn, CallMessage):
        return {**stated, "tool_calls": [call.as_dict() for call in turn.calls]}
    if isinstance(turn, ResultMessage):
        return {**stated, "tool_call_id": turn.call_id, "name": turn.name}
    return stated


def _parse_message(number: int, document: dict[str, Any]) -> Turn:
    """The message of a line. Raises ValueError: It is none."""
    role: Any = document.get("role")
    content = document.get("content")
    if role not in (*ROLES, "tool") or not isinstance(content, str):
        raise ValueError(f"line {number} is not a message; wanted a role ({', '.join(ROLES)}, tool) and a content")
    if role == "tool":
        return ResultMessage(content, str(document.get("tool_call_id", "")), str(document.get("name", "")))
    if role == "assistant" and "tool_calls" in document:
        try:
            return CallMessage(content, parse_calls(document["tool_calls"]))
        except UsageError as error:
            raise ValueError(f"line {number}: {error}") from None
    return Message(role, content)


def _parse_sampling(found: Any) -> SamplingParams | None:
    """Raises ValueError: It is none."""
    if found is None:
        return None
    try:
        return SamplingParams(**{name: value for name, value in found.items() if name in _SAMPLING})
    except (UsageError, AttributeError) as error:
        raise ValueError(f"its sampling makes no sense: {error}") from None


class Round(NamedTuple):
    """A message of the user and the answer to it; None where there is no word of an answer.

    steps: Calls of tools between both, each followed by what its tools gave.
    cut_short: Why the answer did not end by itself, as Chunk.finish_reason has it.
    """

    user: str
    answer: str | None
    steps: tuple[Turn, ...] = ()
    cut_short: str | None = None


class ConversationState(NamedTuple):
    """A conversation at one time, which undo, redo and a retry that gives no word put back.

    is_answer: The last answer is no reasoning where it has no mark: a person wrote it, or a format binds it.
    asked: Calls that it ended with, and that have no results yet; asked_behind: The steps before them.
    """

    rounds: tuple[Round, ...] = ()
    num_dropped: int = 0  # of the oldest rounds
    num_tries: int = 0  # of the last round
    is_answer: bool = False
    asked: CallMessage | None = None
    asked_behind: tuple[Turn, ...] = ()

    @property
    def is_unanswered(self) -> bool:
        """The last message has neither an answer nor calls."""
        return bool(self.rounds) and self.rounds[-1].answer is None and self.asked is None

    def with_last(self, **changes: Any) -> tuple[Round, ...]:
        """Its rounds, with changes of the last one."""
        return (*self.rounds[:-1], self.rounds[-1]._replace(**changes))


def messages_of(rounds: Sequence[Round], system: str | None = None) -> tuple[Turn, ...]:
    """The messages of rounds in their order, behind a system message; a round without an answer has one."""
    messages: list[Turn] = [Message("system", system)] if system else []
    for each in rounds:
        messages += [Message("user", each.user), *each.steps]
        if each.answer is not None:
            messages.append(Message("assistant", each.answer))
    return tuple(messages)


def cut_answers(rounds: Sequence[Round], system: str | None) -> tuple[tuple[int, str], ...]:
    """Positions of answers among messages_of that did not end by themselves, and why."""
    return tuple(
        (len(messages_of(rounds[:i], system)) - 1, each.cut_short)
        for i, each in enumerate(rounds, 1)
        if each.cut_short
    )


def answered_rounds(rounds: Sequence[Round]) -> list[Round]:
    """The rounds that have an answer, which chat templates want of all but the last."""
    return [each for each in rounds if each.answer is not None]


def drop_oldest(
    num_dropped: int, num_rounds: int, count: Callable[[int], int], context: int, max_tokens: int | None
) -> int:
    """How many of the oldest rounds not to send: so many as before, or more if an answer has little room.

    count: The tokens of all that is sent, by how many rounds are not.
    """
    last, share = num_rounds - 1, max(1, int(_FREED_SHARE * context))
    wanted = min(max_tokens, share) if max_tokens else share
    if num_dropped >= last or count(num_dropped) + wanted // 2 <= context:
        return num_dropped
    return bisect_left(range(last), True, num_dropped, key=lambda num: count(num) + wanted <= context)


def read_rounds(transcript: Transcript) -> tuple[str | None, list[Round]]:
    """System message and rounds.

    Raises UsageError: A message is neither a user's, nor the answer to one, nor a step between both.
    """
    messages = transcript.messages
    first = int(bool(messages) and messages[0].role == "system")
    reasons = dict(transcript.cut_short)
    rounds: list[Round] = []
    for i, message in enumerate(messages[first:], first):
        is_open = bool(rounds) and rounds[-1].answer is None
        if message.role == "user":
            rounds.append(Round(message.content, None))
        elif is_open and (isinstance(message, CallMessage) or (message.role == "tool" and rounds[-1].steps)):
            rounds[-1] = rounds[-1]._replace(steps=(*rounds[-1].steps, message))
        elif is_open and message.role == "assistant":
            rounds[-1] = rounds[-1]._replace(answer=message.content, cut_short=reasons.get(i))
        else:
            raise UsageError(
                f"message {i + 1} is of the role {message.role}; wanted a user's, the answer to one, or what "
                "a tool gave that an answer called"
            )
    return messages[0].content if first else None, rounds
