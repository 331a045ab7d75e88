"""Files of models that other programs have fetched: where huggingface_hub and LM Studio have them on this disk."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import quote

from edgespec.setup.hub import digest_of
from edgespec.setup.repository import Commit, RemoteFile

_LM_STUDIO = (".lmstudio/models", ".cache/lm-studio/models")  # in the home; the second until 2024


def shared_folders(repository: str, sha: str) -> Iterator[Path]:
    """Folders that may hold the files of a repository at a commit."""
    yield _cache_of(repository) / "snapshots" / sha
    for place in _LM_STUDIO:
        yield Path.home() / place / repository


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
    return Commit(repository=repository, sha=sha, license=None, files=files) if files else None


def _cache_of(repository: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
