"""What may be typed in a chat beside messages: names, arguments, meanings. Data and its reading; does nothing."""

import difflib
from enum import Enum
from typing import NamedTuple


class Argument(Enum):
    """What follows a command."""

    NONE = ""
    TEXT = "TEXT"
    PATH = "FILE"
    MODEL = "MODEL"
    DRAFTER = "DRAFTER"
    SETTING = "NAME VALUE"
    VIEW = "VIEW"
    PART = "[code|all]"


class Command(NamedTuple):
    name: str
    argument: Argument
    meaning: str


COMMANDS = (
    Command("help", Argument.NONE, "this list"),
    Command("model", Argument.MODEL, "go on with another model; without one, say which it is"),
    Command("drafter", Argument.DRAFTER, "draft with auto, none, ngram, suffix, lookahead, self or a model"),
    Command("system", Argument.TEXT, "what the model is told first; without text, show it; - for none"),
    Command("set", Argument.SETTING, "sampling and limits, such as temperature 0.8; alone, show all"),
    Command("retry", Argument.NONE, "answer the last message once more, with the next seed"),
    Command("undo", Argument.NONE, "take back the last message and its answer"),
    Command("edit", Argument.NONE, "take the last message up again, to change and send it"),
    Command("save", Argument.PATH, "write the conversation to a file (JSON Lines)"),
    Command("load", Argument.PATH, "go on with the conversation of a file"),
    Command("clear", Argument.NONE, "forget the conversation, not the system message"),
    Command("copy", Argument.PART, "the last answer, its code, or all, to the clipboard"),
    Command("context", Argument.NONE, "how much of the context is used, and by what"),
    Command("stats", Argument.NONE, "is drafting helping, what drafts, and what is off and why"),
    Command("plan", Argument.NONE, "what the planner has to say of this model and its drafters"),
    Command("trace", Argument.PATH, "when target and drafter worked on the last answer"),
    Command("multi", Argument.NONE, "let Enter make a new line and Alt-Enter send, or not"),
    Command("show", Argument.VIEW, "answers as markdown, plain, or drafted: in colours of who drafted"),
    Command("exit", Argument.NONE, "leave, as Ctrl-D does"),
)
_OTHER_NAMES = {"quit": "exit", "bye": "exit", "?": "help", "regen": "retry"}
KEYS = (
    ("Enter", "send"),
    ("Alt-Enter, Ctrl-J", "a new line"),
    ("Ctrl-X Ctrl-E", "write in $EDITOR"),
    ("Up, Ctrl-R", "what was typed before"),
    ("Tab", "complete commands, files and models"),
    ("Ctrl-C", "stop the answer; twice, leave"),
    ("Ctrl-D", "leave"),
)


def is_command(text: str) -> bool:
    """Whether it is not for the model; what begins with // is, less a slash."""
    return text.startswith("/") and not text.startswith("//")


def as_message(text: str) -> str:
    return text[1:] if text.startswith("//") else text


def taken_apart(text: str) -> tuple[str, str]:
    """The name of a command, without its slash, and what follows."""
    name, *rest = text[1:].split(maxsplit=1) or [""]
    return name, rest[0].strip() if rest else ""


def find(name: str) -> Command | None:
    name = _OTHER_NAMES.get(name, name)
    return next((command for command in COMMANDS if command.name == name), None)


def unknown(name: str) -> str:
    """What to say of a name that no command has."""
    near = difflib.get_close_matches(name, [command.name for command in COMMANDS], n=1)
    meant = f"did you mean /{near[0]}? " if near else ""
    return f"there is no command /{name}: {meant}/help lists them; a message that begins with / is written with //"


def help_lines() -> list[str]:
    named = [(f"/{each.name} {each.argument.value}".rstrip(), each.meaning) for each in COMMANDS]
    width = max(len(left) for left, _ in (*named, *KEYS))
    return [f"{left:<{width}}  {right}" for left, right in (*named, ("", ""), *KEYS)]
