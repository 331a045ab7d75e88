"""Rounds of a conversation, a message of the user and its answer each, to messages and back."""

from collections.abc import Sequence
from typing import NamedTuple

from edgespec.engine.transcript import Transcript
from edgespec.errors import UsageError
from edgespec.tokenization.chat_template import Message, Turn
from edgespec.tools.messages import CallMessage


class Round(NamedTuple):
    """A message of the user and the answer to it; None where there is no word of an answer.

    steps: Calls of tools between both, each followed by what its tools gave.
    """

    user: str
    answer: str | None
    steps: tuple[Turn, ...] = ()


def messages_of(rounds: Sequence[Round]) -> list[Turn]:
    """The messages of rounds in their order; a round without an answer has one."""
    messages: list[Turn] = []
    for each in rounds:
        messages += [Message("user", each.user), *each.steps]
        if each.answer is not None:
            messages.append(Message("assistant", each.answer))
    return messages


def answered_rounds(rounds: Sequence[Round]) -> list[Round]:
    """The rounds that have an answer, which chat templates want of all but the last."""
    return [each for each in rounds if each.answer is not None]


def read_rounds(transcript: Transcript) -> tuple[str | None, list[Round], dict[int, str]]:
    """System message, rounds, and why answers were cut short, by round.

    Raises UsageError: A message is neither a user's, nor the answer to one, nor a step between both.
    """
    messages = transcript.messages
    first = int(bool(messages) and messages[0].role == "system")
    reasons = dict(transcript.cut_short)
    rounds: list[Round] = []
    cut_short = {}
    for i, message in enumerate(messages[first:], first):
        is_open = bool(rounds) and rounds[-1].answer is None
        if message.role == "user":
            rounds.append(Round(message.content, None))
        elif is_open and (isinstance(message, CallMessage) or (message.role == "tool" and rounds[-1].steps)):
            rounds[-1] = rounds[-1]._replace(steps=(*rounds[-1].steps, message))
        elif is_open and message.role == "assistant":
            rounds[-1] = rounds[-1]._replace(answer=message.content)
            if i in reasons:
                cut_short[len(rounds) - 1] = reasons[i]
        else:
            raise UsageError(
                f"message {i + 1} is of the role {message.role}; wanted a user's, the answer to one, or what "
                "a tool gave that an answer called"
            )
    return messages[0].content if first else None, rounds, cut_short
