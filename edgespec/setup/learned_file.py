"""The files in which a drafting head keeps what it has learned, beside the head, one for each domain.

A file that is missing, damaged or of another head counts as empty; no answer fails because of it.
"""

import io
import json
import re
import stat
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from tokenize import TokenError
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct, ValidationError, convert

from edgespec.decoding.head_rows import Correction
from edgespec.draft.learned_head import MOST_ROWS, Count, LearnedHead, ShadowCount, ShadowTrial
from edgespec.draft.verified_rows import VerifiedRows, no_rows
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.manifest import FILE_NAME
from edgespec.system.disk import explain_change, hold_lock, replace_file
from edgespec.system.file_hashes import file_record
from edgespec.types import Report

FOLDER, _SUFFIX = "learned", ".npz"
_LARGEST_BYTES = 1 << 28
_VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_CORRECTIONS = ("active", "previous", "candidate")
_COPIED = ("trial", "back", "plain", "tally", "num_new", "num_swaps", "changed")  # as they are, into the document
# What numpy and zipfile raise for files that are no such archives.
_WRONG_BYTES = (ValueError, KeyError, AttributeError, TypeError, SyntaxError, TokenError, EOFError, RuntimeError)
_DAMAGE = (*_WRONG_BYTES, MemoryError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True, slots=True)
class LearnedFile:
    """The file of what the head in a folder has learned in a domain."""

    head: Path
    domain: str

    @property
    def path(self) -> Path:
        return self.head / FOLDER / f"{self.domain}{_SUFFIX}"

    def lock(self) -> ExitStack:
        """Keep other sessions from learning in this domain until the stack is closed.

        Raises:
            OSError: No lock can be made beside the head.
            TimeoutError: Another session learns; the message says which process.
        """
        with ExitStack() as held:
            held.enter_context(hold_lock(self.head / f"{FOLDER}-{self.domain}.lock", timeout_s=0.0))
            return held.pop_all()

    def forget(self) -> None:
        """Delete what was learned. Raises EdgeSpecError: a session learns here, or it is not allowed."""
        with explain_change(f"remove {self.path}"):
            try:
                with self.lock():
                    self.path.unlink()
                    if not any(self.path.parent.iterdir()):
                        self.path.parent.rmdir()
            except TimeoutError as error:
                raise EdgeSpecError(
                    f"{self.path} is {error}, which learns and would write it again; end that session first"
                ) from None

    def read(self, report: Report = lambda line: None) -> LearnedHead | None:
        """Read the file; None where there is none, or one that cannot be used, which is reported."""
        try:
            return self._read()
        except FileNotFoundError:
            return None
        except ValidationError as error:
            problem = str(error)
        except OSError as error:
            problem = error.strerror or "it cannot be read"
        except _DAMAGE:
            problem = "it is damaged"
        report(f"{self.path} cannot be used ({problem}); learning starts again from nothing")
        return None

    def write(self, learned: LearnedHead) -> None:
        """Store what was learned; raises OSError."""
        corrections = {name: found for name in _CORRECTIONS if (found := getattr(learned, name)) is not None}
        document = {
            "version": _VERSION,
            "head": self._identity(),
            "num_columns": {name: each.num_columns for name, each in corrections.items()},
            **{name: getattr(learned, name) for name in _COPIED},
        }
        arrays: dict[str, npt.NDArray[Any]] = {
            "document": np.frombuffer(json.dumps(document).encode(), np.uint8),
            **_arrays_of("rows", learned.rows),
        }
        for name, each in corrections.items():
            arrays |= _arrays_of(name, each)
        written = io.BytesIO()
        np.savez(written, allow_pickle=False, **arrays)
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        replace_file(self.path, written.getvalue())

    def _identity(self) -> str:
        return file_record(self.head / FILE_NAME).sha256

    def _read(self) -> LearnedHead:
        found = self.path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST_BYTES:
            raise ValidationError("it does not have the size of such a file")
        with zipfile.ZipFile(self.path) as archive:
            if sum(each.file_size for each in archive.infolist()) > _LARGEST_BYTES:
                raise ValidationError("it does not have the size of such a file")
        with np.load(self.path, allow_pickle=False) as loaded:
            arrays = {name: loaded[name] for name in loaded.files}
        document = json.loads(arrays["document"].tobytes())
        if not isinstance(document, dict) or document.get("version") != _VERSION:
            raise ValidationError("it is of another version of edgespec")
        stated = convert(document, _LearnedDocument)
        if stated.head != self._identity():
            raise ValidationError("it is of another head, or of this one before it was exported again")
        rows = VerifiedRows(**_fields_of("rows", VerifiedRows, arrays))
        _require_rows(rows)
        corrections: dict[str, Any] = {
            name: Correction(**_fields_of(name, Correction, arrays), num_columns=size)
            for name, size in stated.num_columns.items()
        }
        for each in corrections.values():
            _require_correction(each)
        return LearnedHead(rows=rows, **corrections, **{name: getattr(stated, name) for name in _COPIED})


def files_beside(head: Path) -> Iterator[LearnedFile]:
    """The files of all domains in which the head of a model folder has learned, by name."""
    for path in sorted((head / FOLDER).glob(f"*{_SUFFIX}")):
        if _NAME.fullmatch(path.stem):
            yield LearnedFile(head, path.stem)


def require_domain(domain: str) -> None:
    """Raises UsageError: A domain cannot have this name."""
    if not isinstance(domain, str) or not _NAME.fullmatch(domain):
        raise UsageError(
            f"{str(domain)[:40]!r} cannot be a name to learn under; wanted up to 64 letters, digits, dots, "
            "hyphens and underscores, a letter or digit first"
        )


class _LearnedDocument(Struct):
    """The file without its arrays; num_columns by the name of each correction."""

    version: int
    head: str
    num_columns: dict[str, Annotated[int, Meta(ge=1, le=1 << 30)]]
    trial: ShadowTrial
    back: ShadowTrial
    plain: ShadowTrial
    tally: ShadowCount
    num_new: Count
    num_swaps: Count
    changed: Annotated[str, Meta(max_length=40)] | None

    def __post_init__(self) -> None:
        if not self.num_columns.keys() <= set(_CORRECTIONS):
            raise ValueError("an unknown correction")


def _arrays_of(prefix: str, holder: Any) -> dict[str, npt.NDArray[Any]]:
    arrays = {each.name: getattr(holder, each.name) for each in fields(holder)}
    return {f"{prefix}.{name}": value for name, value in arrays.items() if isinstance(value, np.ndarray)}


def _fields_of(prefix: str, kind: type, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    names = [each.name for each in fields(kind) if each.name != "num_columns"]
    return {name: arrays[f"{prefix}.{name}"] for name in names}


def _require_rows(rows: VerifiedRows) -> None:
    """Raises ValueError: They are no rows that verify_rows makes."""
    like = no_rows()
    for each in fields(rows):
        found, wanted = getattr(rows, each.name), getattr(like, each.name)
        if found.dtype != wanted.dtype or found.shape != (len(rows), *wanted.shape[1:]):
            raise ValueError(f"{each.name} has another form")
    if np.isnan(rows.logits).any() or not np.isfinite(rows.rest).all() or not np.isfinite(rows.chances).all():
        raise ValueError("a number is not finite")
    if len(rows) > MOST_ROWS or (len(rows) and (rows.contexts.min() < 0 or rows.columns.min() < -1)):
        raise ValueError("a number is out of its range")


def _require_correction(correction: Correction) -> None:
    """Raises ValueError: It is no correction that train_correction makes."""
    places, biases = correction.places, correction.biases
    if (
        (places.dtype.name, biases.dtype.name) != ("int64", "float32")
        or places.ndim != 1
        or biases.shape != places.shape
    ):
        raise ValueError("a correction has another form")
    if not np.isfinite(biases).all() or (len(places) and places[0] < 0) or (np.diff(places) <= 0).any():
        raise ValueError("a number is out of its range")
