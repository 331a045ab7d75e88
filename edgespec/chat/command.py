"""Lines of a chat: commands, which begin with a slash, their help, and messages of several lines.

A message between three double quotes begins with them and ends at the next ones.
"""

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from edgespec import Reply
from edgespec.chat.attachments import Attachment
from edgespec.chat.session import ChatSession

_QUOTES = '"""'
# The commands that are used most, in groups, and what they do.
FIRST_PAGE = (
    ("/retry, /edit, /undo", "answer again; edit or remove your last message"),
    ("/go, /answer", "continue the last answer; edit it"),
    ("/copy, /save FILE", "copy the last answer; save the chat to a file"),
    ("/clear, /compact", "start a new chat; replace this one by a summary"),
    ("/chats, /open NAME", "list the saved chats; continue one"),
    ("/attach FILE", "send a file's text with your next message"),
    ("/model, /drafter", "show or switch the model, or what drafts for it"),
    ("/system TEXT, /set", "set the system message; show and change settings"),
    ("/think", "on or off: whether the model thinks before it answers"),
    ("/context, /stats", "show how full the context is; whether drafting helps"),
    ("/exit", "leave"),
)
_FIRST_KEYS = (
    "Enter sends, Alt-Enter starts a new line, Tab completes, Up recalls input.",
    "Ctrl-C stops the answer; press it twice, or Ctrl-D, to leave.",
    "/help all lists all commands and keys; /help COMMAND explains one.",
)
_KEYS = (
    ("Enter", "send"),
    ("Alt-Enter, Ctrl-J", "start a new line"),
    ("Ctrl-X Ctrl-E", "write the message in $EDITOR"),
    ("Up, Ctrl-R", "recall or search earlier input"),
    ("Tab", "complete commands, files and models"),
    ("Ctrl-C", "stop the answer; press it twice to leave"),
    ("Ctrl-D", "leave"),
)
_DRAFTING = (
    "Drafting makes answers faster: a drafter guesses the next tokens, and the model checks several guesses in "
    "one pass. Where deterministic mode holds, as edgespec doctor tells, the text stays the same to the byte."
)


class Argument(Enum):
    """The argument that may follow a command."""

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


# What may follow a command, for its help.
_EXAMPLES = {
    Argument.PATH: "talk.jsonl",
    Argument.MODEL: "smollm2-360m",
    Argument.DRAFTER: "ngram",
    Argument.SETTING: "temperature 0.7",
    Argument.VIEW: "plain",
    Argument.COUNT: "2",
    Argument.PART: "code",
    Argument.ATTACHED: "notes.md",
    Argument.SWITCH: "on",
    Argument.UNDO: "undo",
    Argument.THINKING: "off",
    Argument.HELP: "attach",
}
_EXAMPLES_BY_NAME = {
    "system": "Answer in one sentence.",
    "attach": "notes.md src/*.py",
    "open": "2, or the beginning of its title",
    "name": "Plans for May",
    "trace": "trace.svg",
}


class Next(NamedTuple):
    """The next step after a command: an answer, a message to edit, the last answer shown again, or the end."""

    reply: Reply | None = None
    shows_begun: bool = False  # what the reply was given to begin with is shown with it
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
    """True if a line is not for the model; a message may begin with a slash that is written twice."""
    return text.startswith("/") and not text.startswith("//")


def escape_message(text: str) -> str:
    """A message as it is typed, so that it is no command."""
    return f"/{text}" if text.startswith("/") else text


def unescape_message(text: str) -> str:
    return text[1:] if text.startswith("//") else text


def split_command(text: str) -> tuple[str, str]:
    """Split a line into the command's name, without its slash, and its argument."""
    name, *rest = text[1:].split(maxsplit=1) or [""]
    return name, rest[0].strip() if rest else ""


def whole_number(text: str) -> int:
    """The number that a text states in digits, of which nine count; 0 where it states none."""
    return int(text[:9]) if text.isascii() and text.isdigit() else 0


def is_open_block(text: str) -> bool:
    """True if a text that is typed begins a block and has not ended it, so that Enter makes a new line."""
    text = text.lstrip()
    return text.startswith(_QUOTES) and _QUOTES not in text[len(_QUOTES) :]


def block_text(text: str) -> str | None:
    """The text between the quotes; None for a text that is no block, such as code that has more behind them."""
    text = text.strip()
    inner = text[len(_QUOTES) : -len(_QUOTES)]
    is_block = text.startswith(_QUOTES) and text.endswith(_QUOTES) and len(text) >= 2 * len(_QUOTES)
    return inner.strip("\n") if is_block and _QUOTES not in inner else None


def first_page() -> str:
    return "\n".join([*_columns(FIRST_PAGE), "", *_FIRST_KEYS])


def full_help(commands: Sequence[Command]) -> str:
    """All commands, the keys, and what drafting is."""
    rows = [*map(_row, commands), ("", ""), *_KEYS]
    return "\n".join([*_columns(rows), "", _DRAFTING])


def explain(command: Command, commands: Sequence[Command]) -> str:
    """One command, with the one of its name and a !, if there is one."""
    name = command.name.removesuffix("!")
    lines = [*_columns([_row(each) for each in commands if each.name in (name, f"{name}!")])]
    example = _EXAMPLES_BY_NAME.get(name, _EXAMPLES.get(command.argument, ""))
    return "\n".join([*lines, "", f"for example: /{name} {example}"] if example else lines)


def _row(command: Command) -> tuple[str, str]:
    return f"/{command.name} {command.argument.value}".rstrip(), command.meaning


def _columns(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    width = max(len(left) for left, _ in rows)
    return (f"{left:<{width}}  {right}".rstrip() for left, right in rows)
