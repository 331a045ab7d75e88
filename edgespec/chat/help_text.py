"""What /help shows: a first page that fits a window of 24 rows, all commands and keys, or one command."""

from collections.abc import Iterator, Sequence

from edgespec.chat.command import Command

# The commands that are used most, in groups, and what they do.
FIRST_PAGE = (
    ("/retry, /edit, /undo", "answer again; change your last message, or remove it"),
    ("/go, /answer", "go on with the last answer; change it"),
    ("/copy, /save FILE", "copy the last answer; save the chat to a file"),
    ("/clear, /compact", "start a new chat; shorten this one to a summary"),
    ("/chats, /open NAME", "list the saved chats; continue one"),
    ("/attach FILE", "send a file's text with your next message"),
    ("/model, /drafter", "show or switch the model, or what drafts for it"),
    ("/system TEXT, /set", "set the system message; show and change settings"),
    ("/think", "on or off: whether the model reasons first"),
    ("/context, /stats", "show how full the context is; whether drafting helps"),
    ("/exit", "leave"),
)
_FIRST_KEYS = (
    "Enter sends, Alt-Enter makes a new line, Tab completes, Up brings back a line.",
    "Ctrl-C stops the answer; pressed twice, it leaves, and so does Ctrl-D.",
    "/help all lists all commands and keys; /help COMMAND explains one.",
)
_KEYS = (
    ("Enter", "send"),
    ("Alt-Enter, Ctrl-J", "make a new line"),
    ("Ctrl-X Ctrl-E", "write the message in $EDITOR"),
    ("Up, Ctrl-R", "find earlier messages"),
    ("Tab", "complete commands, files and models"),
    ("Ctrl-C", "stop the answer; press it twice to leave"),
    ("Ctrl-D", "leave"),
)
_DRAFTING = (
    "Drafting makes answers faster: a drafter guesses the next tokens, and the model checks several guesses in "
    "one pass. The text stays the same to the byte wherever deterministic mode holds: edgespec doctor says so."
)


def first_page() -> str:
    return "\n".join([*_columns(FIRST_PAGE), "", *_FIRST_KEYS])


def full_help(commands: Sequence[Command]) -> str:
    """All commands, the keys, and what drafting is."""
    rows = [*map(_row, commands), ("", ""), *_KEYS]
    return "\n".join([*_columns(rows), "", _DRAFTING])


def explain(command: Command, commands: Sequence[Command]) -> str:
    """One command, with the one of its name and a !, if there is one."""
    name = command.name.removesuffix("!")
    return "\n".join(_columns([_row(each) for each in commands if each.name in (name, f"{name}!")]))


def _row(command: Command) -> tuple[str, str]:
    return f"/{command.name} {command.argument.value}".rstrip(), command.meaning


def _columns(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    width = max(len(left) for left, _ in rows)
    return (f"{left:<{width}}  {right}".rstrip() for left, right in rows)
