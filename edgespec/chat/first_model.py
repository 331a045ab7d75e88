"""The question whether a chat shall use a better model than the small default one; asked once.

Nothing is downloaded without a yes. The answer is remembered as the option model of the configuration, and a model
that is stated anywhere is never questioned.
"""

import argparse
import shutil
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from edgespec import (
    CATALOG,
    CatalogEntry,
    EdgeSpecError,
    Engine,
    HubRepository,
    ModelHome,
    can_fetch,
    file_bytes,
    free_memory,
    in_flags,
    memory_bytes,
)
from edgespec.config.config_file import config_path, default_home, set_option
from edgespec.config.options import DEFAULT_MODEL
from edgespec.system.command_line import quote
from edgespec.system.units import format_bytes, parse_bytes

# Free to use without an account, and good for their size; the best comes first.
CANDIDATES = ("qwen2.5-1.5b", "qwen2.5-0.5b")
_PROBE_S = 1.5  # that a hub which does not answer may cost a chat
_NOTE_FILE = "first-model-note"
_NOTE_S = 7 * 86_400.0  # between two notes that the hub cannot be reached


class Offer(NamedTuple):
    """A model of the catalogue, and whether it is prepared on this machine."""

    name: str
    is_here: bool

    @property
    def entry(self) -> CatalogEntry:
        return CATALOG[self.name]

    @property
    def repository(self) -> HubRepository:
        source = self.entry.source
        assert isinstance(source, HubRepository)
        return source


def load_first(options: argparse.Namespace, load: Callable[[argparse.Namespace], Engine]) -> Engine:
    """Load the model of a chat: as its options say, or the one that the user wants instead of the default.

    Raises what load raises.
    """
    if not _may_ask(options):
        return load(options)
    limit = None if options.memory is None else parse_bytes(options.memory)
    offer = find_offer(ModelHome(default_home()), free_memory(limit).free_bytes)
    if offer is None:
        return load(options)
    if not offer.is_here and (options.offline or not can_fetch(offer.repository, _PROBE_S)):
        _note_once(default_home() / _NOTE_FILE, offer)
        return load(options)
    if not (wanted := ask(format_question(offer), sys.stdin.readline, _print)):
        if wanted is not None:
            _remember(DEFAULT_MODEL)
            _print(f"{DEFAULT_MODEL} is used. To use the other one later: edgespec config set model {offer.name}")
        return load(options)
    default, options.model = options.model, offer.name
    try:
        engine = load(options)
    except EdgeSpecError as error:
        _print(f"edgespec: {error}\n{offer.name} cannot be used now; continuing with {DEFAULT_MODEL}")
        options.model = default
        return load(options)
    _remember(offer.name)
    return engine


def find_offer(home: ModelHome, free_bytes: int) -> Offer | None:
    """The first candidate that memory and disk can hold; None where there is none."""
    free_disk = _free_disk(home.path)
    for name in CANDIDATES:
        entry = CATALOG[name]
        is_here = home.find(name) is not None
        if memory_bytes(entry) <= free_bytes and (is_here or disk_bytes(entry) <= free_disk):
            return Offer(name, is_here)
    return None


def disk_bytes(entry: CatalogEntry) -> int:
    """Bytes that must be free on the disk: for the download, and for the model that is made of it."""
    return entry.fetch_bytes + file_bytes(entry)


def format_question(offer: Offer) -> str:
    """The question: which model is offered, its size, its source and licence, and what it costs."""
    entry, default = offer.entry, CATALOG[DEFAULT_MODEL]
    size = f"{format_bytes(entry.fetch_bytes)} to download, then {format_bytes(file_bytes(entry))} on disk"
    source = f"from {entry.page}, licence {entry.license}"
    growth = file_bytes(entry) / file_bytes(default)
    lines = (
        f"The default model, {default.title}, is tiny, and its answers are often wrong. This machine can run:",
        f"  {entry.title} ({quote(offer.name)})",
        f"  {'on this machine already, ' if offer.is_here else f'{size}, '}{source}",
        f"  {format_bytes(memory_bytes(entry))} of memory; {growth:.0f} times as large, and so slower",
        f"  tested with edgespec: {_tested(entry)}",
    )
    wanted = "Use it for chats?" if offer.is_here else "Download it and use it for chats?"
    width = max(20, min(100, shutil.get_terminal_size().columns - 1))
    wrap = textwrap.TextWrapper(
        width, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False
    ).fill
    return "\n".join(map(wrap, [*lines, f"{wanted} [y/N]"])) + " "


def _tested(entry: CatalogEntry) -> str:
    if entry.was_run:
        return entry.was_run
    twins = [each for each in CATALOG.values() if each.shape == entry.shape and each.was_run]
    return "no" + "".join(f"; {each.title}, which has the same shape: {each.was_run}" for each in twins[:1])


def ask(question: str, read_line: Callable[[], str], show: Callable[[str], None]) -> bool | None:
    """Ask until the answer is yes or no; Enter is no. None: the input has ended, so there is no answer."""
    show(question)
    while line := read_line():
        answer = line.strip().lower()
        if answer in ("y", "yes"):
            return True
        if answer in ("", "n", "no"):
            return False
        show("please answer y or n: ")
    return None


def _may_ask(options: argparse.Namespace) -> bool:
    """True if a person is there to be asked who has named neither a model nor a drafter for one."""
    is_seen = all(each.isatty() for each in (sys.stdin, sys.stdout, sys.stderr))
    named = {"model", "drafter"} & (options.configured | options.stated.keys())
    is_named = options.model is not options.parser.get_default("model") or named
    goes_on = options.continues is not None or options.transcript
    return is_seen and not (is_named or goes_on or options.quiet)


def _free_disk(folder: Path) -> int:
    """Free bytes where a folder is or will be; 0 where that cannot be found."""
    for place in (folder, *folder.parents):
        with suppress(OSError):
            return shutil.disk_usage(place).free
    return 0


def _note_once(path: Path, offer: Offer) -> None:
    """Say that there is a better model, now and then."""
    with suppress(OSError):
        if abs(time.time() - path.stat().st_mtime) < _NOTE_S:
            return
    _print(
        f"(a better model than {DEFAULT_MODEL} could run here, but the hub cannot be reached now; when it can: "
        f"edgespec chat {offer.name})"
    )
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)


def _remember(model: str) -> None:
    try:
        set_option(config_path(), "model", model)
    except EdgeSpecError as error:
        _print(f"edgespec: {error}; you will be asked again")


def _print(text: str) -> None:
    sys.stderr.write(in_flags(text if text.endswith(" ") else text + "\n"))
    sys.stderr.flush()
