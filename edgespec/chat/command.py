"""What a command of a chat is: a line that begins with a slash, what may follow it, and what comes of it."""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from edgespec.chat.attachments import Attachment
from edgespec.chat.session import ChatSession
from edgespec.engine.answer_stream import Reply


class Argument(Enum):
    """What may follow a command."""

    NONE = ""
    TEXT = "[TEXT]"
    PATH = "FILE"
    MODEL = "[MODEL]"
    DRAFTER = "[DRAFTER]"
    SETTING = "[NAME VALUE]"
    VIEW = "VIEW"
    COUNT = "[N]"
    PART = "[code|all]"
    ATTACHED = "[NAME]"
    SWITCH = "[on|off]"
    CHAT = "NAME"
    UNDO = "[undo]"
    THINKING = "[WORD]"
    ASK = "[ask]"
    HELP = "[all|COMMAND]"


class Next(NamedTuple):
    """What follows a command: an answer, a message to edit, the last answer shown again, or the end."""

    reply: Reply | None = None
    edit: str = ""
    shows_last: bool = False
    is_exit: bool = False
    edits_answer: bool = False  # edit is the last answer
    compacts: bool = False  # the reply is a summary of the conversation
    attached: tuple[Attachment, ...] = ()  # what is attached again if the edit of a message is given up


NOTHING = Next()
Action = Callable[[ChatSession, str], Next | None]


class Command(NamedTuple):
    name: str
    argument: Argument
    meaning: str
    action: Action


def is_command(text: str) -> bool:
    """Whether the line is not for the model; a message may begin with a slash that is written twice."""
    return text.startswith("/") and not text.startswith("//")


def unescape_message(text: str) -> str:
    return text[1:] if text.startswith("//") else text


def split_command(text: str) -> tuple[str, str]:
    """Split a line into the command's name, without its slash, and its argument."""
    name, *rest = text[1:].split(maxsplit=1) or [""]
    return name, rest[0].strip() if rest else ""
