"""The folder of a model as it is written: whole or not at all, with its hashes, its card and its manifest.

One process at a time writes it. Knows nothing of graphs and weights.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib import resources
from pathlib import Path
from time import monotonic

from edgespec.errors import UsageError
from edgespec.export.vocabulary import Vocabulary
from edgespec.manifest import Check, Manifest, write_manifest
from edgespec.system.console import show_progress
from edgespec.system.context_managers import contextmanager
from edgespec.system.disk import (
    explain_full_disk,
    explain_write_errors,
    hold_lock,
    install_folder,
    require_disk_space,
)
from edgespec.system.file_hashes import file_record
from edgespec.system.progress import LoadProgress, ReportProgress
from edgespec.system.signals import clean_up_on_signals, defer_signals
from edgespec.text.tokenizer import remember_harmless
from edgespec.types import Report

RESERVE_BYTES = 64 << 20
_EVERY_S = 3.0  # between two lines of progress
_CARD = "README.md"
# Agreement with the source: below the first value texts differ, below the second they suffer.
_OTHER, _WORSE = 0.9, 0.75


def require_absent(output: Path) -> None:
    """Raises UsageError: Output exists already."""
    if os.path.lexists(output):
        raise UsageError(f"{output} already exists; remove it or choose another --output")


def require_writable(output: Path, needed_bytes: int) -> None:
    """Check, without writing, that needed_bytes can be written to output.

    Raises:
        UsageError: Its parent is not a folder, or may not be written.
        DiskFull: There is no room.
    """
    folder = next(parent for parent in output.absolute().parents if os.path.lexists(parent))
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        what = "it may not be written" if folder.is_dir() else "it is not a folder"
        raise UsageError(f"cannot write to {folder}: {what}; choose another --output")
    require_disk_space(folder, needed_bytes, RESERVE_BYTES)


@contextmanager
def atomic_folder(output: Path, needed_bytes: int = 0, report: Report = lambda line: None) -> Iterator[Path]:
    """A temporary sibling of output that takes its place on success and vanishes on failure.

    Raises:
        UsageError: Output exists already, or cannot be written.
        DiskFull: There is no room for needed_bytes.
    """
    with partial_folder(output, needed_bytes, report) as folder:
        yield folder
        try:
            install_folder(folder, output)
        except OSError:
            require_absent(output)  # made by hand: every export holds the lock
            raise


@contextmanager
def partial_folder(output: Path, needed_bytes: int, report: Report) -> Iterator[Path]:
    """A temporary sibling of output that vanishes at the end of the block; raises as atomic_folder does."""
    with clean_up_on_signals(), _lock_output(output, needed_bytes, report):
        require_absent(output)
        folder = output.with_name(f".{output.name}.partial")
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise UsageError(f"{folder} is in the way and not a folder; remove it or choose another --output")
        shutil.rmtree(folder, ignore_errors=True)  # left by an export that was killed: the lock excludes others
        try:
            with explain_write_errors(output.parent, needed_bytes):
                folder.mkdir()
                require_disk_space(folder, needed_bytes, RESERVE_BYTES)
                yield folder
        finally:
            with defer_signals():  # else a second Ctrl-C, or one that is passed on, leaves a part of the folder
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _lock_output(output: Path, needed_bytes: int, report: Report) -> Iterator[None]:
    """Hold the lock of output; empty folders above it go in the end that did not exist before."""
    missing = [parent for parent in output.parents if not os.path.lexists(parent)]
    try:
        with ExitStack() as stack:
            try:
                with explain_full_disk(output.parent, needed_bytes):
                    output.parent.mkdir(parents=True, exist_ok=True)
                    lock = hold_lock(
                        output.with_name(f".{output.name}.lock"),
                        lambda holder: report(f"{holder} is exporting to {output}; waiting for it"),
                    )
                    stack.enter_context(lock)
            except OSError as error:
                raise UsageError(
                    f"cannot write to {output.parent}: {error.strerror}; choose another --output"
                ) from None
            yield
    finally:
        with defer_signals(), suppress(OSError):  # output is there, or another process has begun to use them
            for parent in missing:
                parent.rmdir()


class ExportProgress:
    """Called with the bytes done so far, reports a line every three seconds."""

    def __init__(
        self, expected_bytes: int, report: Report, name: str = "", on_step: ReportProgress = lambda progress: None
    ) -> None:
        """on_step takes each step of the export of name, in numbers."""
        self._expected_bytes, self._report = expected_bytes, report
        self._name, self._on_step = name, on_step
        self._started = self._reported = monotonic()

    def __call__(self, done_bytes: int) -> None:
        done = min(done_bytes, self._expected_bytes)
        show_progress("converting", done / max(1, self._expected_bytes))
        self._on_step(LoadProgress("export", self._name, done, self._expected_bytes))
        now = monotonic()
        if now - self._reported < _EVERY_S:
            return
        self._reported = now
        rate = done_bytes / (now - self._started)
        self._report(
            f"{done_bytes / 1e6:.0f} MB of at most {self._expected_bytes / 1e6:.0f} MB, {rate / 1e6:.0f} MB/s"
        )


def write_text(folder: Path, vocabulary: Vocabulary, manifest: Manifest) -> None:
    """Write tokenizer and chat template, by the names in the manifest."""
    tokenizer = vocabulary.tokenizer_json.encode()
    (folder / manifest.tokenizer).write_bytes(tokenizer)  # as text Windows would give it other line ends
    remember_harmless(tokenizer)
    if manifest.chat_template:
        (folder / manifest.chat_template).write_bytes((vocabulary.chat_template or "").encode())


def hash_files(folder: Path, manifest: Manifest, report: Report) -> Manifest:
    """The manifest with the hashes of all files that are in the folder."""
    report("hashing")
    show_progress("computing the hashes of its files")
    return replace(manifest, files={path.name: file_record(path) for path in sorted(folder.iterdir())})


def finish(folder: Path, manifest: Manifest) -> Manifest:
    """Write the card, and the manifest with all hashes."""
    card = folder / _CARD
    card.write_bytes(model_card(manifest).encode())
    manifest = replace(manifest, files={**manifest.files, _CARD: file_record(card)})
    write_manifest(folder, manifest)
    return manifest


def quality(check: Check, form: str) -> str | None:
    """The effect of a low agreement with the source on texts; None where the agreement is high."""
    if check.agreement >= _OTHER:
        return None
    more = "fp16" if form == "npu" else "int8 or source"
    lost = f"At {1 - check.agreement:.0%} of positions it would choose another token than its source"
    is_usable = check.agreement >= _WORSE
    result = "its texts differ, and are somewhat worse" if is_usable else "expect clearly worse texts"
    return f"{lost}: {result}. More bits (--precision {more}) keep more."


def model_card(manifest: Manifest) -> str:
    """The card in Markdown, made from the manifest alone. Its text is in model_card.md."""
    from jinja2 import Environment

    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    text = resources.files("edgespec.export").joinpath("model_card.md").read_text(encoding="utf-8")
    check = manifest.check
    return environment.from_string(text).render(
        manifest=manifest,
        source=manifest.source,
        check=check,
        quality=quality(check, manifest.form) if check else None,
    )
