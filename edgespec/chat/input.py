"""Reads messages at a terminal: typed, pasted, recalled from a file, completed, or written in an editor."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import current_thread, main_thread

from prompt_toolkit import PromptSession
from prompt_toolkit.application import Application, create_app_session, get_app, get_app_session
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition, is_searching
from prompt_toolkit.history import History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import Output
from prompt_toolkit.output.defaults import create_output
from prompt_toolkit.output.plain_text import PlainTextOutput
from prompt_toolkit.styles import Style
from prompt_toolkit.utils import is_dumb_terminal

from edgespec import CATALOG, ModelHome
from edgespec.chat.command import is_command, is_open_block
from edgespec.chat.commands import COMMANDS, find_command
from edgespec.chat.saved_chats import list_chats
from edgespec.chat.session import THINKING_VIEWS, VIEWS
from edgespec.chat.settings import SETTINGS
from edgespec.chat.status import Status, format_status
from edgespec.chat.tool_box import Permission, ask_permission
from edgespec.chat.type_ahead import TypeAhead
from edgespec.config.config_file import default_home
from edgespec.config.drafter_names import SELF, TARGET, TEXT
from edgespec.config.options import OPTIONS
from edgespec.system.console import lines_wait
from edgespec.system.signals import HeldCtrlC

_MAX_BYTES = 1 << 20  # of the history, from its end
_PROMPT = "> "
_WAITS = "what you typed meanwhile waits here; Enter sends it"
_STYLE = Style.from_dict({"bottom-toolbar": "noreverse ansibrightblack", "prompt": "bold"})


class HistoryFile(History):
    """Typed lines in a file for its owner alone, a JSON text a line. If it fails, they stay in memory."""

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        super().__init__()
        self._path, self._report = path, report
        self._has_failed = False

    def load_history_strings(self) -> Iterable[str]:
        """Return the lines of the file's end, the newest first."""
        try:
            with self._path.open("rb") as file:
                file.seek(max(0, self._path.stat().st_size - _MAX_BYTES))
                lines = file.read(_MAX_BYTES).split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            self._report_once("read", error)
            return []
        return [text for line in reversed(lines) if (text := _parse(line))]

    def store_string(self, string: str) -> None:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(handle, "ab") as file:
                file.write(json.dumps(string).encode() + b"\n")
        except OSError as error:
            self._report_once("write", error)

    def _report_once(self, act: str, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._report(f"what you type is not saved: cannot {act} {self._path} ({error.strerror})")


def _parse(line: bytes) -> str | None:
    try:
        text = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return text if isinstance(text, str) else None


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
            if command.argument in ("FILE", "[MODEL]", "[DRAFTER]"):
                yield from self._paths.get_completions(Document(argument, len(argument)), event)


def _words(argument: str) -> Iterable[str]:
    """What may follow a command, by how its help shows that: words in small letters, and those with a name."""
    match argument:
        case "[MODEL]":
            return _model_names()
        case "[DRAFTER]":
            return [*TARGET, "none", *TEXT, SELF, *_model_names()]
        case "[WORD]":
            return ["on", "off", "auto", *THINKING_VIEWS]
        case "NAME":
            return [each.title for each in list_chats(default_home() / "chats")]
        case "[NAME VALUE]":
            overflow = [f"overflow {policy}" for policy in OPTIONS["overflow"].choices]
            return [*SETTINGS, *overflow, "loops stop", "loops keep"]
        case "[all|COMMAND]":
            return ["all", *(each.name for each in COMMANDS)]
        case "VIEW":
            return VIEWS
    return re.findall("[a-z]+", argument)  # as in [code|all]


def _model_names() -> list[str]:
    return sorted({*CATALOG, *ModelHome(default_home()).names()})


def _create_output() -> Output:
    """The terminal's output, also where answers go to a file or a pipe."""
    stream = sys.stdout if sys.stdout.isatty() else sys.stderr
    return PlainTextOutput(stream) if is_dumb_terminal() else create_output(stdout=stream)


def _without_clicks() -> KeyBindings:
    """Bindings without a mouse: colours in a text that is pasted without brackets look like clicks to
    prompt_toolkit, which fails at them.
    """
    keys = KeyBindings()

    @keys.add(Keys.Vt100MouseEvent)
    def leave_out(event: KeyPressEvent) -> None:
        pass

    return keys


class ChatInput:
    """Asks for messages; without a history it knows those of this chat alone. status is called before each.

    A context manager: within it, what is typed between two messages waits in the next one's input. hide_keys keeps
    it from being echoed.
    """

    def __init__(
        self, history: History | None, status: Callable[[], Status], hide_keys: Callable[[], None] = lambda: None
    ) -> None:
        self.is_multi_line = False
        self._is_open = self._is_sent = False
        self._edits = False  # the input began with a text to change
        self._waits = False  # the input has a line that was typed before it
        self._status = status
        self._output = _create_output()
        self._input = get_app_session().input
        self._type_ahead = TypeAhead(self._input, self._output, hide_keys)
        with create_app_session(self._input, self._output):
            self._session: PromptSession[str] = PromptSession(
                history=history or InMemoryHistory(),
                completer=CommandCompleter(),
                complete_while_typing=Condition(lambda: is_command(get_app().current_buffer.text)),
                multiline=True,
                prompt_continuation=" " * len(_PROMPT),
                key_bindings=self._key_bindings(),
                enable_open_in_editor=True,
                enable_suspend=True,
                tempfile_suffix=".md",
                style=_STYLE,
                include_default_pygments_style=False,
            )
            self._question: PromptSession[str] = PromptSession(
                style=_STYLE, include_default_pygments_style=False, key_bindings=_without_clicks()
            )

    def __enter__(self) -> "ChatInput":
        self._is_open = True
        self._type_ahead.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_open = False
        self._type_ahead.end()

    def ask(self, default: str = "", edited: str = "") -> str:
        """Return what the user types; default is there to be edited, and edited says what that is.

        From Enter on, Ctrl-C is held until release_ctrl_c or catch_ctrl_c.

        Raises EOFError: Ctrl-D was typed, or the terminal is gone; KeyboardInterrupt: Ctrl-C, at an empty prompt
        or while default is edited, which is then given up.
        """
        if self._is_open and current_thread() is main_thread():
            HeldCtrlC(self._interrupt)
        status = self._status()  # which counts tokens: once, and not at each key
        self._edits = bool(default)
        if self._edits:
            status = replace(status, hint=f"you change {edited}; Ctrl-C leaves it as it was")
        self._waits = self._type_ahead.stop(splits=not self.is_multi_line)
        try:
            self._is_sent = False
            with lines_wait(), create_app_session(self._input, self._output):
                line = self._session.prompt(
                    [("class:prompt", _PROMPT)],
                    default=default,
                    bottom_toolbar=lambda: format_status(
                        self._hint_at_waiting(status), get_app().output.get_size().columns
                    ),
                    handle_sigint=False,
                )
            if self._is_open:
                self._type_ahead.take_ctrl_c()
            return line
        finally:
            if self._is_open:
                self._type_ahead.start()

    def _hint_at_waiting(self, status: Status) -> Status:
        """The status, with what is typed already: Ctrl-C drops these lines one by one."""
        if not self._waits:
            return status
        more = self._type_ahead.num_lines
        return replace(status, hint=f"{_WAITS}; lines after it: {more}" if more else _WAITS)

    def _interrupt(self) -> bool:
        """Give Ctrl-C to the prompt; False where the line is sent, whose answer it is for."""
        app = self._session.app
        if self._is_sent:
            return False
        if app.loop is None:
            raise KeyboardInterrupt
        app.loop.call_soon_threadsafe(app.key_processor.send_sigint)
        return True

    def permit(self, name: str, show: Callable[[str], None]) -> Permission | None:
        """Ask whether a tool may be run; None: Ctrl-C. What was typed before waits for the next message."""
        try:
            return ask_permission(name, self._ask_line, show, is_typing=self._type_ahead.pause())
        except KeyboardInterrupt:
            return None
        finally:
            if self._is_open:
                self._type_ahead.start()

    def _ask_line(self, question: str) -> str:
        try:
            with create_app_session(self._input, self._output):
                return self._question.prompt([("class:prompt", question)])
        except EOFError:  # Ctrl-D
            return "no"

    def _key_bindings(self) -> KeyBindings:
        keys = _without_clicks()

        # In a search (Ctrl-R), Enter takes the line that was found, and Ctrl-C leaves: prompt_toolkit does both.
        @keys.add("enter", filter=Condition(lambda: not self.is_multi_line) & ~is_searching)
        @keys.add("escape", "enter", filter=Condition(lambda: self.is_multi_line))
        def send(event: KeyPressEvent) -> None:
            self._is_sent = True
            event.current_buffer.validate_and_handle()

        @keys.add("enter", filter=Condition(lambda: self.is_multi_line) & ~is_searching)
        @keys.add("escape", "enter", filter=Condition(lambda: not self.is_multi_line))
        @keys.add("enter", filter=Condition(lambda: is_open_block(get_app().current_buffer.text)))
        @keys.add("c-j")
        def break_line(event: KeyPressEvent) -> None:
            event.current_buffer.newline(copy_margin=False)

        @keys.add("c-c", filter=~is_searching)
        def clear_or_interrupt(event: KeyPressEvent) -> None:
            app: Application[str] = event.app
            if event.current_buffer.text and not self._edits:
                event.current_buffer.reset()
                waiting = self._type_ahead.take()
                self._waits = bool(waiting)
                event.key_processor.feed_multiple(waiting, first=True)  # before keys typed since
            else:
                app.exit(exception=KeyboardInterrupt, style="class:exiting")

        return keys
