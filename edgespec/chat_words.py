"""What a chat completes, and where it keeps what was typed: the model home."""

from collections.abc import Callable, Iterable
from pathlib import Path

from prompt_toolkit.history import History

from edgespec.catalog import CATALOG
from edgespec.chat_actions import SETTINGS
from edgespec.chat_commands import Argument
from edgespec.chat_input import InputFile
from edgespec.chat_session import VIEWS
from edgespec.conversation import OVERFLOWS
from edgespec.drafter_names import SELF, TARGET, TEXT
from edgespec.home import ModelHome, default_home


def history(report: Callable[[str], None]) -> History:
    return InputFile(default_home() / "history", report)


def chats() -> Path:
    """The folder of transcripts."""
    return default_home() / "chats"


def words(argument: Argument) -> Iterable[str]:
    """What an argument of a kind may be, files aside."""
    if argument is Argument.MODEL:
        return _models()
    if argument is Argument.DRAFTER:
        return [*TARGET, "none", *TEXT, SELF, *_models()]
    if argument is Argument.SETTING:
        return [*SETTINGS, *(f"overflow {policy}" for policy in OVERFLOWS)]
    return {Argument.VIEW: VIEWS, Argument.PART: ("code", "all")}.get(argument, ())


def _models() -> list[str]:
    """Of the catalogue and the model home."""
    folder = ModelHome(default_home()).models
    try:
        own = [each.name for each in folder.iterdir() if each.is_dir() and not each.name.startswith(".")]
    except OSError:
        own = []
    return sorted({*CATALOG, *own})
