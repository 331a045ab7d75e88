"""Keeps what is typed or pasted while no prompt is shown, unsent, for the input of the next one."""

import os
import select
import signal
from collections.abc import Callable
from contextlib import suppress
from threading import Thread, current_thread, main_thread
from types import FrameType
from typing import Any

from prompt_toolkit.input import Input
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import Output

from edgespec.system.terminal import is_in_foreground

_BACKGROUND_S = 0.2


class TypeAhead:
    """Reads the keys of a terminal between start and stop, in a thread of its own.

    The terminal would keep 4 kB of them, and a Ctrl-C behind these would have no effect. input is the one that the
    prompts read too: a paste that has begun here ends there. hide_keys sets the terminal so that keys are not
    echoed; it is called again when the process goes on after Ctrl-Z.
    """

    def __init__(self, input: Input, output: Output, hide_keys: Callable[[], None] = lambda: None) -> None:
        self._input, self._output, self._hide_keys = input, output, hide_keys
        self._keys: list[KeyPress] = []
        self._thread: Thread | None = None
        self._stop_file = -1
        self._before: Any = None

    def start(self) -> None:
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

    def stop(self) -> bool:
        """Give what was typed to the next prompt; return whether it has an Enter, which now begins a new line."""
        if self._thread:
            os.close(self._stop_file)
            self._thread.join()
            self._thread = None
        elif not hasattr(signal, "SIGCONT"):
            self._keys += self._input.read_keys()
        if self._before is not None:
            signal.signal(signal.SIGCONT, self._before)
            self._before = None
        # What followed an Enter at the prompt itself lies with prompt_toolkit already.
        keys, self._keys = [*get_typeahead(self._input), *self._keys], []
        store_typeahead(self._input, [unsent(key) for key in keys if key.key != Keys.CPRResponse])
        return any(key.key == Keys.ControlM for key in keys)

    def end(self) -> None:
        """Leave the terminal as it was; what was typed last goes."""
        self.stop()
        get_typeahead(self._input)
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
                    self._keys += self._input.read_keys()
                    if not self._input.closed:
                        continue
                # Reading a terminal that another job has would stop this one.
                if select.select([wake], [], [], _BACKGROUND_S)[0]:
                    return
        finally:
            os.close(wake)


def unsent(key: KeyPress) -> KeyPress:
    """The key, or in place of Enter the one that only begins a new line."""
    return KeyPress(Keys.ControlJ, "\n") if key.key == Keys.ControlM else key
