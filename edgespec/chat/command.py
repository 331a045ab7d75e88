"""Lines of a chat: commands, which begin with a slash, their help, and messages of several lines.

A message between three double quotes begins with them and ends at the next ones.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from edgespec import Reply
from edgespec.chat.attachments import Attachment
from edgespec.chat.session import ChatSession
from edgespec.system.tables import read_table

_QUOTES = '"""'
_HELP = read_table(__file__, "help.toml")


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
    """argument: What may follow the name, as help shows it, with an example; both are empty where nothing may."""

    name: str
    argument: str
    meaning: str
    example: str
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
    return "\n".join([*_columns(_HELP["commands"]), "", *_HELP["keys_in_short"]])


def full_help(commands: Sequence[Command]) -> str:
    rows = [*map(_row, commands), ("", ""), *_HELP["keys"]]
    return "\n".join([*_columns(rows), "", _HELP["drafting"]])


def explain(command: Command, commands: Sequence[Command]) -> str:
    """One command, with the one of its name and a !, if there is one."""
    name = command.name.removesuffix("!")
    lines = [*_columns([_row(each) for each in commands if each.name in (name, f"{name}!")])]
    return "\n".join([*lines, "", f"for example: /{name} {command.example}"] if command.example else lines)


def _row(command: Command) -> tuple[str, str]:
    return f"/{command.name} {command.argument}".rstrip(), command.meaning


def _columns(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    width = max(len(left) for left, _ in rows)
    return (f"{left:<{width}}  {right}".rstrip() for left, right in rows)
