"""Rounds of a conversation, a message of the user and its answer each, to messages and back."""

from collections.abc import Sequence
from typing import NamedTuple

from edgespec.engine.transcript import Transcript
from edgespec.errors import UsageError
from edgespec.tokenization.chat_template import Message


class Round(NamedTuple):
    """A message of the user and the answer to it; None where there is no word of an answer."""

    user: str
    answer: str | None


def messages_of(rounds: Sequence[Round]) -> list[Message]:
    """The messages of rounds in their order; a round without an answer has one."""
    messages = []
    for each in rounds:
        messages.append(Message("user", each.user))
        if each.answer is not None:
            messages.append(Message("assistant", each.answer))
    return messages


def answered_rounds(rounds: Sequence[Round]) -> list[Round]:
    """The rounds that have an answer, which chat templates want of all but the last."""
    return [each for each in rounds if each.answer is not None]


def read_rounds(transcript: Transcript) -> tuple[str | None, list[Round], dict[int, str]]:
    """System message, rounds, and why answers were cut short, by round.

    Raises UsageError: A message is neither a user's nor the answer to one.
    """
    messages = transcript.messages
    first = int(bool(messages) and messages[0].role == "system")
    reasons = dict(transcript.cut_short)
    rounds: list[Round] = []
    cut_short = {}
    for i, message in enumerate(messages[first:], first):
        if message.role == "user":
            rounds.append(Round(message.content, None))
        elif message.role == "assistant" and rounds and rounds[-1].answer is None:
            rounds[-1] = Round(rounds[-1].user, message.content)
            if i in reasons:
                cut_short[len(rounds) - 1] = reasons[i]
        else:
            raise UsageError(
                f"message {i + 1} is of the role {message.role}; wanted a user's or the answer to one"
            )
    return messages[0].content if first else None, rounds, cut_short
