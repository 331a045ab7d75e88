"""Completes what is typed in a chat: commands, their arguments, models and files."""

from collections.abc import Iterable, Iterator

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document

from edgespec.chat.command import Argument, is_command
from edgespec.chat.commands import COMMANDS, find_command
from edgespec.chat.saved_chats import list_chats
from edgespec.chat.session import THINKING_VIEWS, VIEWS
from edgespec.chat.settings import SETTINGS
from edgespec.config.drafter_names import SELF, TARGET, TEXT
from edgespec.engine.conversation import OVERFLOWS
from edgespec.models.catalog import CATALOG
from edgespec.models.home import ModelHome, default_home


class CommandCompleter(Completer):
    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
        if not is_command(document.text):
            return
        name, space, argument = document.text_before_cursor.partition(" ")
        if not space:
            for each in COMMANDS:
                if each.name.startswith(name[1:]):
                    yield Completion(f"/{each.name}", -len(name), display_meta=each.meaning)
        elif command := find_command(name[1:]):
            for word in _words(command.argument):
                if word.startswith(argument):
                    yield Completion(word, -len(argument))
            if command.argument in (Argument.PATH, Argument.MODEL, Argument.DRAFTER):
                yield from self._paths.get_completions(Document(argument, len(argument)), event)


def _words(argument: Argument) -> Iterable[str]:
    if argument is Argument.MODEL:
        return _model_names()
    if argument is Argument.DRAFTER:
        return [*TARGET, "none", *TEXT, SELF, *_model_names()]
    if argument is Argument.THINKING:
        return ["on", "off", "auto", *THINKING_VIEWS]
    if argument is Argument.CHAT:
        return [each.title for each in list_chats(default_home() / "chats")]
    if argument is Argument.SETTING:
        return [*SETTINGS, *(f"overflow {policy}" for policy in OVERFLOWS), "loops stop", "loops keep"]
    if argument is Argument.HELP:
        return ["all", *(each.name for each in COMMANDS)]
    return {
        Argument.VIEW: VIEWS,
        Argument.PART: ("code", "all"),
        Argument.UNDO: ("undo",),
        Argument.ASK: ("ask",),
        Argument.SWITCH: ("on", "off"),
    }.get(argument, ())


def _model_names() -> list[str]:
    folder = ModelHome(default_home()).models
    try:
        own = [each.name for each in folder.iterdir() if each.is_dir() and not each.name.startswith(".")]
    except OSError:
        own = []
    return sorted({*CATALOG, *own})
