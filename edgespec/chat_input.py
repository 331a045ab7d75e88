"""Lines from a user at a terminal: several at once, pasted, recalled, completed, or written in an editor."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import Application, create_app_session, get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import AnyFormattedText
from prompt_toolkit.history import History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output
from prompt_toolkit.output.defaults import create_output
from prompt_toolkit.output.plain_text import PlainTextOutput
from prompt_toolkit.styles import Style
from prompt_toolkit.utils import is_dumb_terminal

from edgespec.chat_commands import COMMANDS, Argument, find, is_command
from edgespec.chat_status import Standing, standing_line

_PROMPT = "> "
_MOST_HISTORY_BYTES = 1 << 20
_STYLE = Style.from_dict({"bottom-toolbar": "noreverse ansibrightblack", "prompt": "bold"})


class InputFile(History):
    """What was typed, in a file that only its owner may read: a JSON text a line.

    A file that cannot be read or written is told of once, and what is typed is kept for the session.

    report: Takes that line.
    """

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        super().__init__()
        self._path, self._report = path, report
        self._has_failed = False

    def load_history_strings(self) -> Iterable[str]:
        """The newest first."""
        try:
            with self._path.open("rb") as file:
                file.seek(max(0, self._path.stat().st_size - _MOST_HISTORY_BYTES))
                lines = file.read(_MOST_HISTORY_BYTES).split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            self._tell("read", error)
            return []
        return [text for line in reversed(lines) if (text := _text_of(line))]

    def store_string(self, string: str) -> None:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(handle, "ab") as file:
                file.write(json.dumps(string).encode() + b"\n")
        except OSError as error:
            self._tell("write", error)

    def _tell(self, what: str, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._report(f"what you type is not kept for later: cannot {what} {self._path} ({error.strerror})")


def _text_of(line: bytes) -> str | None:
    try:
        text = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return text if isinstance(text, str) else None


class CommandCompleter(Completer):
    """Commands, and what may follow them.

    words: What an argument of a kind may be, asked for when it is wanted.
    """

    def __init__(self, words: Callable[[Argument], Iterable[str]]) -> None:
        self._words = words
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
        text = document.text_before_cursor
        if not is_command(document.text):
            return
        name, space, argument = text.partition(" ")
        if not space:
            for each in COMMANDS:
                if each.name.startswith(name[1:]):
                    yield Completion(f"/{each.name}", -len(name), display_meta=each.meaning)
            return
        command = find(name[1:])
        if command is None:
            return
        for word in self._words(command.argument):
            if word.startswith(argument):
                yield Completion(word, -len(argument))
        if command.argument in (Argument.PATH, Argument.MODEL, Argument.DRAFTER):
            yield from self._paths.get_completions(Document(argument, len(argument)), event)


def _dialogue() -> Output:
    """Where what is said goes to a file or a pipe, the dialogue stays on the terminal."""
    stream = sys.stdout if sys.stdout.isatty() else sys.stderr
    return PlainTextOutput(stream) if is_dumb_terminal() else create_output(stdout=stream)


class ChatInput:
    """Asks for a message.

    history: Where what was typed is kept; None for the session alone.
    words: As of CommandCompleter.
    standing: Asked before each message for what stands below the input.
    """

    def __init__(
        self,
        history: History | None,
        words: Callable[[Argument], Iterable[str]],
        standing: Callable[[], Standing],
    ) -> None:
        self.is_multi_line = False
        self._standing_of = standing
        self._standing: Standing | None = None
        self._output = _dialogue()
        with create_app_session(output=self._output):
            self._session = self._made(history, words)

    def _made(self, history: History | None, words: Callable[[Argument], Iterable[str]]) -> PromptSession[str]:
        return PromptSession(
            history=history or InMemoryHistory(),
            completer=CommandCompleter(words),
            complete_while_typing=Condition(lambda: is_command(get_app().current_buffer.text)),
            multiline=True,
            prompt_continuation=" " * len(_PROMPT),
            key_bindings=self._keys(),
            enable_open_in_editor=True,
            tempfile_suffix=".md",
            style=_STYLE,
            include_default_pygments_style=False,
            bottom_toolbar=self._bottom,
        )

    def ask(self, default: str = "") -> str:
        """What the user says; default is there to be edited.

        Raises:
            EOFError: Ctrl-D was typed, or the terminal is gone.
            KeyboardInterrupt: Ctrl-C was typed, at an empty prompt.
        """
        self._standing = self._standing_of()
        with create_app_session(output=self._output):
            return self._session.prompt([("class:prompt", _PROMPT)], default=default)

    def _bottom(self) -> AnyFormattedText:
        columns = get_app().output.get_size().columns
        return standing_line(self._standing, columns) if self._standing else ""

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("enter", filter=Condition(lambda: not self.is_multi_line))
        @keys.add("escape", "enter", filter=Condition(lambda: self.is_multi_line))
        def send(event: KeyPressEvent) -> None:
            event.current_buffer.validate_and_handle()

        @keys.add("enter", filter=Condition(lambda: self.is_multi_line))
        @keys.add("escape", "enter", filter=Condition(lambda: not self.is_multi_line))
        @keys.add("c-j")
        def line(event: KeyPressEvent) -> None:
            event.current_buffer.newline(copy_margin=False)

        @keys.add("c-c")
        def interrupt(event: KeyPressEvent) -> None:
            """Empties the line first."""
            app: Application[str] = event.app
            if event.current_buffer.text:
                event.current_buffer.reset()
            else:
                app.exit(exception=KeyboardInterrupt, style="class:exiting")

        return keys
