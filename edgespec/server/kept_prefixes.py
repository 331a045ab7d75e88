"""Texts that models have read, kept on the disk when they are closed, so that they need not read them again later.

A file for each text, as Engine.save_prefix writes it, in a folder for each key: that of a model, and of the
device, the processor and the ONNX Runtime that its keys and values depend on. Names are hashes of what files
hold, and a file is not changed once it is there, so that several servers may use one folder.
"""

import hashlib
import logging
import re
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import utime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgespec import EdgeSpecError, Engine, TokenIds, UsageError
from edgespec.system.printable import one_line
from edgespec.system.units import format_bytes

_LOG = logging.getLogger("edgespec.server")
_SUFFIX = ".prefix"
_OWN_FOLDER = re.compile("[0-9a-f]{32}")
_OWN_FILE = re.compile(r"[^.]+\.prefix|\.[^.]+\.prefix\.[0-9a-f]+")
_FEWEST_KEPT = 32  # tokens; fewer are read again in a pass or two
_MOST_BYTES = 4 << 30
_OTHER_BYTES = 4096  # of a file, beside its values and tokens


class _File(NamedTuple):
    """A file in the folder; used_ns is when it was written, or when a model held its text last."""

    path: Path
    num_bytes: int
    used_ns: int


@dataclass(frozen=True, slots=True)
class KeptPrefixes:
    """A folder of texts that models have read. What goes wrong is logged, and costs no more than time.

    max_bytes: Of all files; those that were used longest ago are deleted for new ones.
    """

    folder: Path
    max_bytes: int = _MOST_BYTES

    def take(self, name: str, engine: Engine) -> None:
        """Let a model that was just loaded hold the texts that were used last, as many as it has caches."""
        if engine.manifest.pooling:  # each text is read once
            return
        name, key = one_line(name), engine.prefix_key
        if key is None:
            _LOG.warning(
                "%s: its KV cache cannot be saved: that takes a model without recurrent layers that edgespec "
                "exported, on the CPU, without drafting heads or trees of drafts",
                name,
            )
            return
        found = _texts_in(self._folder_of(key))[: engine.max_parallel]
        # The newest text comes last, into the first cache: it is overwritten last.
        counts = [_load(name, engine, file.path, cache) for cache, file in reversed([*enumerate(found)])]
        if sum(counts):
            _LOG.info("%s: loaded the KV cache: %d tokens need not be read again", name, sum(counts))

    def keep(self, name: str, engine: Engine) -> None:
        """Write the texts that a model holds; those that are there already count as used again."""
        name, key = one_line(name), engine.prefix_key
        if key is None:
            return
        folder, texts = self._folder_of(key), _worth_keeping(engine.held_texts())
        for cache, tokens in texts.items():
            self._keep_text(name, engine, cache, tokens, folder)
        for file in _texts_in(folder)[engine.max_parallel :]:  # no cache is left for them
            with suppress(OSError):
                file.path.unlink()
        kept = {file.path: file.num_bytes for file in _texts_in(folder)}
        found = {path: len(tokens) for tokens in texts.values() if (path := _path_of(tokens, folder)) in kept}
        if found:
            _LOG.info(
                "%s: saved the KV cache of %d tokens (%s) at %s",
                name,
                sum(found.values()),
                format_bytes(sum(kept[path] for path in found)),
                one_line(str(folder), 200),
            )

    def _keep_text(self, name: str, engine: Engine, cache: int, tokens: TokenIds, folder: Path) -> None:
        """Write the text of a cache, if it is not there."""
        path = _path_of(tokens, folder)
        needed = len(tokens) * (engine.manifest.kv_cache.bytes_per_token + tokens.itemsize) + _OTHER_BYTES
        try:
            if not path.is_file():
                self._make_room(needed)
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                engine.save_prefix(path, cache)
            now = time.time_ns()  # as the clock of some file systems is too coarse to order files by
            utime(path, ns=(now, now))
        except (EdgeSpecError, OSError, MemoryError) as error:
            _LOG.warning("%s: its KV cache was not saved: %s", name, one_line(str(error), 400))

    def _make_room(self, needed_bytes: int) -> None:
        """Delete what was used longest ago, and no files of others.

        Raises UsageError: So much is never kept.
        """
        if needed_bytes > self.max_bytes:
            raise UsageError(
                f"it takes {format_bytes(needed_bytes)}, and the limit is {format_bytes(self.max_bytes)}"
            )
        found = [
            file
            for folder in self.folder.glob("*")
            if _OWN_FOLDER.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink()
            for file in _files(folder)
        ]
        total = sum(file.num_bytes for file in found)
        for file in sorted(found, key=lambda file: file.used_ns):
            if total + needed_bytes <= self.max_bytes:
                return
            file.path.unlink(missing_ok=True)
            total -= file.num_bytes
            with suppress(OSError):  # others are in it
                file.path.parent.rmdir()

    def _folder_of(self, key: str) -> Path:
        return self.folder / hashlib.sha256(key.encode()).hexdigest()[:32]


def _path_of(tokens: TokenIds, folder: Path) -> Path:
    return folder / (hashlib.sha256(tokens.tobytes()).hexdigest()[:32] + _SUFFIX)


def _load(name: str, engine: Engine, path: Path, cache: int) -> int:
    """Let a cache hold a kept text; how many tokens that are. A file that cannot be used is deleted."""
    try:
        return engine.load_prefix(path, cache)
    except UsageError as error:
        _LOG.warning("%s: deleted a saved KV cache, whose text is read again: %s", name, one_line(str(error), 400))
        with suppress(OSError):
            path.unlink()
    except (EdgeSpecError, MemoryError) as error:
        _LOG.warning("%s: cannot use a saved KV cache: %s", name, one_line(str(error), 400))
    return 0


def _worth_keeping(texts: Mapping[int, TokenIds]) -> dict[int, TokenIds]:
    """Texts that are not short, and with which no longer one begins."""
    return {
        cache: tokens
        for cache, tokens in texts.items()
        if len(tokens) >= _FEWEST_KEPT
        and not any(
            len(other) > len(tokens) and np.array_equal(other[: len(tokens)], tokens) for other in texts.values()
        )
    }


def _texts_in(folder: Path) -> Sequence[_File]:
    """The kept texts in a folder, those used last first; without files that are being written."""
    whole = [file for file in _files(folder) if file.path.suffix == _SUFFIX and file.path.name[0] != "."]
    return sorted(whole, key=lambda file: file.used_ns, reverse=True)


def _files(folder: Path) -> list[_File]:
    """The kept texts in a folder, with those that are being written."""
    found = []
    for path in folder.glob("*"):
        if not _OWN_FILE.fullmatch(path.name):
            continue
        with suppress(OSError):  # another server has just deleted it
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                found.append(_File(path, status.st_size, status.st_mtime_ns))
    return found
