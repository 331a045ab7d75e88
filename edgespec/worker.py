"""A command of the command line in a worker: what is told when that dies, and a chat that is begun once more."""

import argparse
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path

from edgespec.crash import Death
from edgespec.errors import EdgeSpecError
from edgespec.interrupts import held_back
from edgespec.supervisor import Note, die_of, supervise
from edgespec.talk import say


def run_in_worker(options: argparse.Namespace) -> int:
    """Run a command as options.run would here. Returns its exit code, in both processes.

    The command finds options.note, which takes what is to be known if it dies: "chat" once a user may type, and
    "transcript" the file of the conversation.
    """
    ended = _watched(options)
    if isinstance(ended, Death) and ended.cause == "crash" and ended.note("chat"):
        say("edgespec: the chat begins once more, with drafts from the text alone")
        ended = _watched(_revived(options, ended.note("transcript")))
    if isinstance(ended, int):
        return ended
    if kept := ended.note("transcript"):
        say(f"edgespec: the conversation is kept in {kept}; edgespec chat --continue goes on with it")
    return ended.exit_code if ended.cause in ("crash", "memory") else die_of(ended.number)


def _watched(options: argparse.Namespace) -> int | Death:
    ended = supervise(partial(_run, options))
    if isinstance(ended, Death) and ended.cause:
        say(f"edgespec: {ended.words()}")
        if ended.cause == "crash":
            _write(ended, options.command)
    return ended


def _run(options: argparse.Namespace, note: Note) -> int:
    with held_back():  # else Ctrl-C within it is told as a broken installation
        import_module("numpy")
    return int(options.run(argparse.Namespace(**{**vars(options), "note": note})))


def _write(death: Death, command: str) -> None:
    from edgespec.config import default_home

    with suppress(OSError, EdgeSpecError):
        say(f"edgespec: where it was stands in {death.write(default_home(), command)}, for a report")


def _revived(options: argparse.Namespace, transcript: str | None) -> argparse.Namespace:
    """The same chat where it was, drafting off the devices: one of them, most likely, has crashed it."""
    changed = {"drafter": "none" if options.drafter == "none" else "suffix"}
    if transcript is None:
        return argparse.Namespace(**{**vars(options), **changed})
    model = options.parser.get_default("model")  # for that of the conversation, which /model may have changed
    return argparse.Namespace(**{**vars(options), **changed, "model": model, "transcript": Path(transcript)})
