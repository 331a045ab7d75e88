"""The process that runs a command for a supervisor, and notes what is to be known if it dies."""

import argparse
import atexit
import faulthandler
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path

from edgespec.cli.crash import note_line
from edgespec.cli.supervisor import WORKER
from edgespec.system.child_process import follow_parent
from edgespec.system.signals import defer_signals

Note = Callable[[str, str], None]
"""Takes a name and a value that are to be known if this process dies."""


def run_worker() -> int:
    """Run the command that this process was started with; its exit code."""
    parent, name, again = os.environ.pop(WORKER).split("\n", 2)
    note = _open_notes(name)
    follow_parent(int(parent))
    from edgespec.cli.main import main

    return main(prepare=partial(prepare, note=note, again=again))


def prepare(options: argparse.Namespace, note: Note, again: str) -> None:
    """Give the command options.note, and make a chat that is begun once more go on where it was.

    note takes "chat" once a user may type, and "transcript" with a file; again is the third line of WORKER.
    """
    with defer_signals():  # else Ctrl-C within it is reported as a broken installation
        import_module("numpy")
    options.note = note
    if not again:
        return
    if options.drafter != "none":
        options.drafter = "suffix"  # most likely a device has crashed it
    options.overwrite = True  # the files that the first worker began
    if transcript := again.partition(" ")[2]:
        options.transcript = Path(transcript)
        options.model = options.parser.get_default("model")  # the transcript has it, as /model may have changed it


def _open_notes(name: str) -> Note:
    """Make the file that the supervisor reads if this process dies; faulthandler adds the stacks of a crash."""
    try:
        path = os.path.join(tempfile.gettempdir(), name)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    except OSError:  # no temporary folder: no notes
        return lambda name, value: None
    if not faulthandler.is_enabled():  # else the user wants the stacks elsewhere
        faulthandler.enable(file)

    def note(name: str, value: str) -> None:
        with suppress(OSError):
            os.write(file, note_line(name, value))

    def remove() -> None:
        faulthandler.disable()
        with suppress(OSError):
            os.close(file)
            os.unlink(path)

    atexit.register(remove)
    return note
