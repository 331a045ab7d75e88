"""Keeps what is typed or pasted while no prompt is shown, unsent, for the input of the next one."""

import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread, current_thread, main_thread
from types import FrameType
from typing import Any

from prompt_toolkit.input import Input
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import Output

from edgespec.chat.command import is_open_block
from edgespec.system.terminal import is_in_foreground

_BACKGROUND_S = 0.2


class TypeAhead:
    """Reads the keys of a terminal between start and stop, in a thread of its own.

    The terminal would keep 4 kB of them, and a Ctrl-C behind these would have no effect. input is the one that the
    prompts read too: a paste that has begun here ends there. hide_keys sets the terminal so that keys are not
    echoed; it is called again when the process goes on after Ctrl-Z.
    """

    def __init__(self, input: Input, output: Output, hide_keys: Callable[[], None]) -> None:
        self._input, self._output, self._hide_keys = input, output, hide_keys
        self._keys: list[KeyPress] = []  # that wait for a prompt
        self._thread: Thread | None = None
        self._stop_file = -1
        self._before: Any = None

    def start(self) -> None:
        # What followed an Enter at the prompt itself lies with prompt_toolkit.
        self._keys += get_typeahead(self._input)
        self._bracket_pastes()
        if not hasattr(signal, "SIGCONT"):  # Windows keeps keys by itself, in an order that stop reads
            return
        if current_thread() is main_thread():
            self._before = signal.signal(signal.SIGCONT, self._resume)
        with suppress(OSError, ValueError, AttributeError):  # an input without a file, as of tests
            file = self._input.fileno()
            wake, self._stop_file = os.pipe()
            self._thread = Thread(target=self._read, args=(file, wake), name="type-ahead", daemon=True)
            self._thread.start()

    def take_ctrl_c(self) -> None:
        """Have a Ctrl-C that was typed right behind Enter, and taken for a key, interrupt as any other."""
        store_typeahead(self._input, _without_ctrl_c(get_typeahead(self._input)))

    def stop(self, *, splits: bool = True) -> bool:
        """Give what was typed to the next prompt, unsent; return whether Enter was typed.

        splits: Each line is a message of its own, one a prompt; else Enter begins a new line.
        """
        self.pause()
        is_sent = any(key.key == Keys.ControlM for key in self._keys)
        store_typeahead(self._input, self.take(splits=splits))
        return is_sent

    def take(self, *, splits: bool = True) -> list[KeyPress]:
        """What waits, unsent: its first line, or all of it; what is typed later is no part of the others."""
        keys, self._keys = next_message(self._keys) if splits else (self._keys, [])
        if self._keys and self._keys[-1].key != Keys.ControlM:
            self._keys.append(KeyPress(Keys.ControlM, "\r"))
        return [unsent(key) for key in keys]

    @property
    def num_lines(self) -> int:
        """How many lines wait for later prompts."""
        rest, num = self._keys, 0
        while rest:
            _, rest = next_message(rest)
            num += 1
        return num

    def pause(self) -> bool:
        """Read no more keys until start; return whether any wait."""
        if self._thread:
            os.close(self._stop_file)
            self._thread.join()
            self._thread = None
        elif not hasattr(signal, "SIGCONT"):
            self._keys += self._input.read_keys()
        if self._before is not None:
            signal.signal(signal.SIGCONT, self._before)
            self._before = None
        self._keys = [key for key in self._keys if key.key != Keys.CPRResponse]
        return bool(self._keys)

    def end(self) -> None:
        """Leave the terminal as it was; what was typed last goes."""
        self.pause()
        self._keys = []
        self._output.disable_bracketed_paste()
        self._output.flush()

    def _bracket_pastes(self) -> None:
        self._output.enable_bracketed_paste()
        self._output.flush()

    def _resume(self, number: int, frame: FrameType | None) -> None:
        if is_in_foreground():
            self._hide_keys()
            self._bracket_pastes()

    def _read(self, file: int, wake: int) -> None:
        try:
            while not self._input.closed:
                ready, _, _ = select.select([file, wake], [], [])
                if wake in ready and file not in ready:
                    return
                if is_in_foreground():
                    self._keys += _without_ctrl_c(self._input.read_keys())
                    if not self._input.closed:
                        continue
                # Reading a terminal that another job has would stop this one.
                if select.select([wake], [], [], _BACKGROUND_S)[0]:
                    return
        finally:
            os.close(wake)


def _without_ctrl_c(keys: list[KeyPress]) -> list[KeyPress]:
    """The other keys; a Ctrl-C that the terminal made no signal of becomes one here."""
    if any(key.key == Keys.ControlC for key in keys):
        if sys.platform == "win32":
            signal.raise_signal(signal.SIGINT)
        else:  # which wakes the main thread wherever it waits
            signal.pthread_kill(main_thread().ident or 0, signal.SIGINT)
    return [key for key in keys if key.key != Keys.ControlC]


def next_message(keys: Sequence[KeyPress]) -> tuple[list[KeyPress], list[KeyPress]]:
    """The keys of the first line that was typed, and those behind its Enter. A block in quotes counts as one."""
    for i, key in enumerate(keys):
        if key.key == Keys.ControlM and i and not is_open_block(_text(keys[:i])):
            return [*keys[:i]], [*keys[i + 1 :]]
    return [*keys], []


def _text(keys: Sequence[KeyPress]) -> str:
    return "".join("\n" if key.key == Keys.ControlM else key.data for key in keys)


def unsent(key: KeyPress) -> KeyPress:
    """The key, or in place of Enter the one that only begins a new line."""
    return KeyPress(Keys.ControlJ, "\n") if key.key == Keys.ControlM else key
