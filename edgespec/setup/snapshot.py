"""A model of the hub at one commit, as files on this disk. Its headers are read before its weights are fetched.

Files that huggingface_hub and LM Studio have fetched are used where these have them.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

from edgespec.errors import EdgeSpecError, ModelError
from edgespec.manifest import Origin
from edgespec.setup.hub import (
    MAX_JSON_BYTES,
    ask,
    digest_of,
    download,
    explain_errors,
    extend,
    file_url,
    is_offline,
    missing_bytes,
)
from edgespec.setup.repository import INDEX, NOTHING_FETCHED, Commit, HubId, RemoteFile, choose_files, shard_files
from edgespec.system.context_managers import contextmanager
from edgespec.system.disk import explain_write_errors, hold_lock, replace_file, require_disk_space
from edgespec.system.progress import ReportProgress
from edgespec.system.text_files import read_plain
from edgespec.system.units import format_bytes
from edgespec.types import Report

_HEAD_BYTES = 1 << 20  # fetched first of a file of weights
_GROWTH = 4  # by how much more, until its header is here
WEIGHTS = (".safetensors", ".gguf")
NOT_FETCHED = f"is not on this machine, and {NOTHING_FETCHED}"


@dataclass(frozen=True, kw_only=True)
class LocalSource:
    """A file or folder on this machine to export, and where it came from if that is known.

    fetched: Its files of weights that were downloaded, and that no export has ended with since.
    """

    path: Path
    origin: Origin = Origin()  # noqa: RUF009  frozen
    fetched: tuple[Path, ...] = field(default=(), compare=False)

    @property
    def words(self) -> list[str | Path]:
        """The words of a command after `edgespec export`."""
        repository, revision = self.origin.repository, self.origin.revision
        if repository is None:
            return [self.origin.name or self.path]
        file = f":{self.path.name}" if self.path.suffix == ".gguf" else ""
        return [repository + file, *(["--revision", revision] if revision else [])]


@dataclass(frozen=True, kw_only=True)
class Preview:
    """A source whose files of weights are here as far as their headers go.

    sizes: Of these files. fetch_bytes: What is still to fetch.
    name: The name of the source where its file's name says nothing.
    """

    path: Path
    sizes: Mapping[Path, int]
    fetch_bytes: int
    name: str | None = None


Judge = Callable[[Preview], None]
"""Raises what speaks against fetching the weights of a model."""


@dataclass(frozen=True, kw_only=True)
class _Snapshot:
    """The files that a model needs, of a commit that a revision names; here: the folder for them on this disk."""

    hub: "HubFolder"
    commit: Commit
    revision: str
    here: Path

    def missing(self, files: Iterable[RemoteFile]) -> list[RemoteFile]:
        return [file for file in files if not self.has(file)]

    def has(self, file: RemoteFile) -> bool:
        path = self.here / file.name
        return path.is_file() and path.stat().st_size == file.bytes

    def fetch_bytes(self, missing: Iterable[RemoteFile]) -> int:
        return sum(missing_bytes(file, self.here / file.name) for file in missing)

    def url(self, file: RemoteFile) -> str:
        return file_url(self.commit.repository, self.commit.sha, file.name)

    def complete(self, files: Iterable[RemoteFile]) -> None:
        """Fetch the files that are missing; the others were checked when they were fetched."""
        missing = self.missing(files)
        self.require_fetching(missing)
        needed = self.fetch_bytes(missing)
        require_disk_space(self.here, needed)
        for file in missing:
            repository, sha, path = self.commit.repository, self.commit.sha, self.here / file.name
            self.hub.report(f"fetching {file.name} ({format_bytes(file.bytes)}) of {repository} at {sha[:12]}")
            with explain_write_errors(self.here, needed), explain_errors(repository, self.revision):
                download(self.url(file), file, path, self.hub.report, self.hub.progress)
                if path.suffix in WEIGHTS:  # each at once, since the next ones may take another run
                    mark_new([path])

    def require_fetching(self, missing: list[RemoteFile]) -> None:
        if missing and self.hub.is_offline:
            raise ModelError(f"{missing[0].name} of {self.commit.repository} {NOT_FETCHED}")

    @contextmanager
    def preview(self, texts: list[RemoteFile], weights: list[RemoteFile]) -> Iterator[Preview]:
        """A folder with copies of the texts, which are here, and of the headers of the weights."""
        missing = self.missing(weights)
        self.require_fetching(missing)
        with TemporaryDirectory(prefix="edgespec-headers-") as temporary:
            folder = Path(temporary) / self.here.name
            for file in (*texts, *weights):
                (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
            for file in texts:
                shutil.copyfile(self.here / file.name, folder / file.name)
            for file in weights:
                self._copy_header(file, folder / file.name)
            try:
                yield Preview(
                    path=_source_path(folder, weights),
                    sizes={folder / file.name: file.bytes for file in weights},
                    fetch_bytes=self.fetch_bytes(missing),
                )
            except EdgeSpecError as error:  # which names the copies
                error.args = (str(error).replace(str(folder), self.commit.repository), *error.args[1:])
                raise

    def _copy_header(self, file: RemoteFile, copy: Path) -> None:
        """Copy the start of a file of weights, as far as its header goes, and fetch it as far where need be."""
        from edgespec.export import gguf, safetensors  # 15 ms, and only a first use needs it

        kind = gguf if file.name.endswith(".gguf") else safetensors
        count, path = _HEAD_BYTES, self.here / file.name
        while True:
            count = min(count, file.bytes)
            if not self.has(file):
                with explain_write_errors(self.here, count), explain_errors(self.commit.repository, self.revision):
                    path = extend(self.url(file), file, self.here / file.name, self.hub.report, count)
            with path.open("rb") as start:
                copy.write_bytes(start.read(count))
            if count == file.bytes or kind.has_whole_header(copy, file.bytes):
                return
            count *= _GROWTH


@dataclass(frozen=True)
class HubFolder:
    """Models of the hub below one folder, which all repositories share.

    offline: Take the commit of the last fetch, and connect to nothing, as with HF_HUB_OFFLINE.
    hold: Keeps other processes from deleting the folder of a commit.
    """

    path: Path
    report: Report
    offline: bool = False
    progress: ReportProgress = lambda progress: None
    hold: Callable[[Path], None] = lambda folder: None

    @property
    def is_offline(self) -> bool:
        return self.offline or is_offline()

    def fetch(self, hub_id: HubId, revision: str = "main", judge: Judge | None = None) -> LocalSource:
        """Fetch the files of a model at the commit that revision names now, unless they are here already.

        Args:
            revision: A branch, tag or commit.
            judge: Called before weights are fetched, once all else and their headers are here.

        Raises:
            ModelError: The repository, the revision or the file is missing, or access to it; it holds nothing that
                can be exported, or several files to choose from; no network, or offline and never fetched.
            IntegrityError: Fetched bytes differ from those that the commit lists.
            DiskFull: There is no room.
        """
        with self._open(hub_id, revision) as (snapshot, texts, weights):
            if missing := snapshot.missing(weights):
                snapshot.require_fetching(missing)
                require_disk_space(snapshot.here, snapshot.fetch_bytes(missing))
                if judge is not None:
                    with snapshot.preview(texts, weights) as preview:
                        judge(preview)
                snapshot.complete(weights)
            if snapshot.here.is_relative_to(self.path):
                self.hold(snapshot.here.parent)
        commit = snapshot.commit
        return LocalSource(
            path=_source_path(snapshot.here, weights),
            origin=Origin(repository=commit.repository, revision=commit.sha, license=commit.license),
            fetched=tuple(path for file in weights if is_new(path := snapshot.here / file.name)),
        )

    def choose(self, hub_id: HubId, revision: str = "main") -> tuple[Commit, list[RemoteFile]]:
        """A commit, and the files of it that a model needs; raises as fetch does if there is nothing to fetch."""
        place = self._place(hub_id)
        commit = _read_record(hub_id, place, revision) if self.is_offline else ask(hub_id, revision)
        return commit, choose_files(commit, hub_id.choice)

    @contextmanager
    def preview(self, hub_id: HubId, revision: str = "main") -> Iterator[Preview]:
        """A model without its weights; arguments and errors are those of fetch."""
        with ExitStack() as stack:
            with replace(self, progress=lambda at: None)._open(hub_id, revision) as (snapshot, texts, weights):
                preview = stack.enter_context(snapshot.preview(texts, weights))
            yield preview

    @contextmanager
    def _open(
        self, hub_id: HubId, revision: str
    ) -> Iterator[tuple[_Snapshot, list[RemoteFile], list[RemoteFile]]]:
        """A snapshot with all its files but the weights, and the lists of both; one process at a time has it."""
        commit, chosen = self.choose(hub_id, revision)
        place = self._place(hub_id)
        here = place / commit.sha / hub_id.repository.rpartition("/")[2]
        snapshot = _Snapshot(hub=self, commit=commit, revision=revision, here=here)
        texts = [file for file in chosen if not file.name.endswith(WEIGHTS)]
        for other in shared_folders(hub_id.repository, commit.sha):
            if is_whole(other, chosen) and is_whole(other, weights := _weights(commit, chosen, other)):
                self.report(f"the files of {commit.repository} are in {other}, and are used there")
                yield replace(snapshot, here=other), texts, weights
                return
        with hold_fetch(here, here.with_name(".lock"), self.report):
            if not self.is_offline:
                _record(commit, place, {revision, commit.sha})
            snapshot.complete(texts)
            yield snapshot, texts, _weights(commit, chosen, here)

    def _place(self, hub_id: HubId) -> Path:
        return self.path / hub_id.repository.replace("/", "--")


def _weights(commit: Commit, chosen: list[RemoteFile], folder: Path) -> list[RemoteFile]:
    """The files of weights among those that a model needs, with those of an index in a folder."""
    if INDEX in (file.name for file in chosen):
        return shard_files(commit, read_plain(folder / INDEX, MAX_JSON_BYTES))
    return [file for file in chosen if file.name.endswith(WEIGHTS)]


def _source_path(folder: Path, weights: list[RemoteFile]) -> Path:
    """The file or folder that an export takes."""
    return folder / weights[0].name if weights[0].name.endswith(".gguf") else folder


@contextmanager
def hold_fetch(folder: Path, lock: Path, report: Report) -> Iterator[None]:
    """Make a folder, and hold the lock of what is fetched into it, since only one process at a time may do so."""
    with ExitStack() as stack:
        with explain_folder_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(hold_lock(lock, lambda who: report(f"{who} is downloading this model; waiting")))
        yield


NEW = ".new"
"""Ends the name of an empty file beside downloaded weights that no export has ended with."""


def mark_new(files: Iterable[Path]) -> None:
    """Remember that weights are there for an export alone, also if this process ends before it."""
    for file in files:
        file.with_name(file.name + NEW).touch()


def is_new(file: Path) -> bool:
    """True for downloaded weights that no export has ended with."""
    return file.with_name(file.name + NEW).exists()


def mark_old(files: Iterable[Path]) -> None:
    """Have later exports keep weights, or forget those that are deleted."""
    for file in files:
        file.with_name(file.name + NEW).unlink(missing_ok=True)


@contextmanager
def explain_folder_errors(folder: Path) -> Iterator[None]:
    """Turn errors of writing to a folder, within the block, into messages that say what to do."""
    try:
        yield
    except OSError as error:
        why = error.strerror
        raise EdgeSpecError(
            f"cannot write to {folder} ({why}); set EDGESPEC_HOME to a folder that can be written, or in Python "
            "the argument home"
        ) from None


def _record(commit: Commit, place: Path, revisions: Iterable[str]) -> None:
    """Store the commit that revisions name now, for use without a network."""
    for revision in revisions:
        path = _record_path(place, revision)
        path.parent.mkdir(exist_ok=True)
        replace_file(path, json.dumps(asdict(commit)).encode(), 0o666)


def _read_record(hub_id: HubId, place: Path, revision: str) -> Commit:
    try:
        stated = json.loads(read_plain(_record_path(place, revision), MAX_JSON_BYTES))
        return Commit(**{**stated, "files": tuple(RemoteFile(**file) for file in stated["files"])})
    except (OSError, ValueError, TypeError, KeyError):
        if (commit := cached_commit(hub_id.repository, revision)) is not None:
            return commit
        raise ModelError(f"{hub_id.repository} at '{revision}' {NOT_FETCHED}") from None


def _record_path(place: Path, revision: str) -> Path:
    return place / "revisions" / f"{quote(revision, safe='')}.json"


_LM_STUDIO = (".lmstudio/models", ".cache/lm-studio/models")  # in the home; the second until 2024


def shared_folders(repository: str, sha: str) -> Iterator[Path]:
    """Folders that may hold the files of a repository at a commit."""
    yield _cache_of(repository) / "snapshots" / sha
    for place in _LM_STUDIO:
        yield Path(os.path.expanduser("~"), place, repository)


def is_whole(folder: Path, files: Iterable[RemoteFile]) -> bool:
    """True if a folder has some files with the bytes that their commit lists."""
    return all(_has(folder / file.name, file) for file in files)


def _has(path: Path, file: RemoteFile) -> bool:
    if not path.is_file() or path.stat().st_size != file.bytes:
        return False
    # The cache of huggingface_hub names files by their digest, and links to them.
    return path.resolve().name == file.digest or digest_of(path, file) == file.digest


def cached_commit(repository: str, revision: str) -> Commit | None:
    """A commit as huggingface_hub has it, without a network; None where it has none of that name."""
    place = _cache_of(repository)
    named = place / "refs" / revision
    sha = named.read_text(encoding="utf-8").strip() if named.is_file() else revision
    folder = place / "snapshots" / quote(sha, safe="")
    paths = [path for path in folder.rglob("*") if path.is_file()]
    files = tuple(
        RemoteFile(name=path.relative_to(folder).as_posix(), bytes=path.stat().st_size, digest=path.resolve().name)
        for path in paths
    )
    return Commit(repository=repository, sha=sha, license=None, files=files, is_part=True) if files else None


def _cache_of(repository: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
