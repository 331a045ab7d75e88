"""The Hugging Face hub: what a repository holds at a commit, and the download of a file.

A file is resumed where it was cut, and checked against the listing of its commit. Not by hf_hub_download: that of
huggingface_hub 2.4 deletes what it has when a download fails (of 25.6 MB cut at 24 MB, the next run fetched all
25.6), gives up after one answer of 503, and keeps a file of the right length with wrong bytes.
"""

import hashlib
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from edgespec.errors import EdgeSpecError, IntegrityError, ModelError, NotOnHub
from edgespec.setup.catalog import HubRepository
from edgespec.setup.repository import Commit, HubId, RemoteFile
from edgespec.system.console import shows_progress
from edgespec.system.context_managers import contextmanager
from edgespec.system.disk import sync, take_place
from edgespec.system.file_hashes import file_record
from edgespec.system.progress import LoadProgress, ReportProgress
from edgespec.types import Report

MAX_JSON_BYTES = 64 << 20
_COMMIT = re.compile("[0-9a-f]{40}")
_ANSWER_S = 10.0


def is_offline() -> bool:
    """True if the environment forbids to ask the hub."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def ask(hub_id: HubId, revision: str) -> Commit:
    """The commit that a revision names now. Raises ModelError: There is none, no access to it, or no network."""
    from huggingface_hub import HfApi

    api = HfApi()
    if not is_reachable(api.endpoint, _ANSWER_S):
        raise ModelError(
            f"{hub_id.repository} is not a file or folder on this machine, and the hub ({api.endpoint}) does not "
            "answer; check the network, or use an earlier download with --offline"
        )
    with explain_errors(hub_id.repository, revision):
        try:
            info = api.model_info(hub_id.repository, revision=revision, files_metadata=True, timeout=_ANSWER_S)
            return _commit(hub_id.repository, info)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelError(
                f"the answer of {api.endpoint} about {hub_id.repository} is not valid ({error}); try again later"
            ) from None


def _commit(repository: str, info: Any) -> Commit:
    """Check the hub's answer, whose names become paths."""
    if not _COMMIT.fullmatch(info.sha):
        raise ValueError(f"commit {info.sha!r}")
    listed = [(each.rfilename, each.size, each.lfs.sha256 if each.lfs else each.blob_id) for each in info.siblings]
    files = tuple(
        RemoteFile(name=name, bytes=size, digest=digest)
        for name, size, digest in listed
        if isinstance(digest, str) and type(size) is int and size >= 0 and _is_inside(name)
    )
    card = info.card_data
    name = card and ((card.get("license_name") if card.get("license") == "other" else None) or card.get("license"))
    license = name if isinstance(name, str) else None
    return Commit(repository=repository, sha=info.sha, license=license, files=files)


def _is_inside(name: str) -> bool:
    return not {"", ".", ".."} & set(name.split("/")) and not re.search(r"[\\:\0]", name)


def can_fetch(source: HubRepository, timeout_s: float) -> bool:
    """True if the hub may be used, and answers in time with a repository."""
    return not is_offline() and is_reachable(
        file_url(source.repository, source.revision, "config.json"), timeout_s
    )


def is_reachable(url: str, timeout_s: float) -> bool:
    """True if anything answers in time; a name look-up that hangs is abandoned."""
    from huggingface_hub import get_session

    answered = threading.Event()

    def probe() -> None:
        with suppress(Exception):  # any failure means no answer
            get_session().head(url, timeout=timeout_s)
            answered.set()

    prober = threading.Thread(target=probe, daemon=True)
    prober.start()
    prober.join(timeout_s)
    return answered.is_set()


def file_url(repository: str, revision: str, name: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repository}/resolve/{revision}/{quote(name)}"


@contextmanager
def explain_errors(repository: str, revision: str) -> Iterator[None]:
    """Turn errors of the hub, within the block, into messages that say what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError:
        raise ModelError(
            f"{repository} is gated: accept its terms at {constants.ENDPOINT}/{repository}, then log in with: "
            "hf auth login"
        ) from None
    except RevisionNotFoundError:
        raise NotOnHub(
            f"{repository} has no revision '{revision}'; give one of its branches, tags or commits"
        ) from None
    except RepositoryNotFoundError:
        raise NotOnHub(
            f"{repository} is not a file or folder on this machine and not a repository of the hub; check the "
            "spelling, or if it is private, log in with: hf auth login"
        ) from None
    except HfHubHTTPError as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(f"the hub refuses {repository} ({reason}); try again later") from None
    except (EdgeSpecError, OSError, AttributeError, KeyError, TypeError, ValueError):
        raise
    except Exception as error:  # from the HTTP library: requests, httpx or httpx2
        raise ModelError(
            f"the connection to the hub broke on {repository} ({type(error).__name__}); check the network"
        ) from None


def missing_bytes(file: RemoteFile, path: Path) -> int:
    """The bytes of a file that are still to fetch to a path, where an earlier try may have left others."""
    part = _part_of(path)
    held = part.stat().st_size if part.is_file() else 0
    return file.bytes - (held if held <= file.bytes else 0)


def _part_of(path: Path) -> Path:
    return path.with_name(path.name + PART)


PART = ".part"
"""Ends the name of what is here of a file that is not fetched whole."""
_STALL_S = 20.0
_CHUNK_BYTES = 1 << 16
_PAUSE_S = 1.0
_TRIES = 4  # in a row that bring no byte
_NOT_SATISFIABLE = 416
_TEMPORARY = (408, _NOT_SATISFIABLE, 429, 500, 502, 503, 504)


class _Interrupted(Exception):
    """The body ended early, for a reason that may be temporary."""


def download(
    url: str, file: RemoteFile, path: Path, report: Report, progress: ReportProgress = lambda progress: None
) -> None:
    """Fetch file to path, which is then complete and checked, or absent.

    Received bytes stay in a .part file beside it and are not fetched again.

    Raises:
        HfHubHTTPError: The hub refuses the file.
        ModelError: The transfer kept failing.
        IntegrityError: The bytes differ from those that the commit lists.
    """
    part = extend(url, file, path, report, file.bytes, progress)
    if (found := digest_of(part, file)) != file.digest:
        part.unlink()
        raise IntegrityError(
            f"the bytes of {url} have the hash {found[:12]}…, its commit lists {file.digest[:12]}…; "
            "the file was deleted, try again"
        )
    sync(part)
    take_place(part, path)


def extend(
    url: str,
    file: RemoteFile,
    path: Path,
    report: Report,
    stop: int,
    progress: ReportProgress = lambda progress: None,
) -> Path:
    """Fetch a file up to a byte; returns the .part file beside its path. Raises as download does."""
    part = _part_of(path)
    part.parent.mkdir(parents=True, exist_ok=True)
    part.touch()
    if part.stat().st_size > file.bytes:
        os.truncate(part, 0)
    failures = 0
    while (num_held := part.stat().st_size) < stop:
        try:
            _append(url, file, part, num_held, stop, progress)
        except _Interrupted as reason:
            num_received = part.stat().st_size
            failures = 0 if num_received > num_held else failures + 1
            if failures == _TRIES:
                raise ModelError(
                    f"the download of {file.name} stopped at {num_received} of {file.bytes} bytes ({reason}); "
                    "run the command again to continue from there"
                ) from None
            report(f"{file.name}: {reason}; continuing at byte {num_received}")
            time.sleep(_PAUSE_S)
    return part


def _append(url: str, file: RemoteFile, part: Path, num_held: int, stop: int, progress: ReportProgress) -> None:
    from huggingface_hub.utils import tqdm

    is_start = stop < file.bytes  # too little for a bar
    settings = {"desc": file.name, "unit": "B", "unit_scale": True, "disable": is_start or not shows_progress()}
    with part.open("r+b") as out, tqdm(total=file.bytes, initial=num_held, **settings) as bar:
        end = num_held
        for position, chunk in _read_body(url, num_held, stop if is_start else None):
            if position + len(chunk) > file.bytes:
                out.truncate(0)
                raise IntegrityError(
                    f"{url} has more than the {file.bytes} bytes that its commit lists; try again"
                )
            out.seek(position)
            out.truncate()
            out.write(chunk)
            end = position + len(chunk)
            bar.update(len(chunk))
            progress(LoadProgress("download", file.name, end, file.bytes))
            if is_start and end >= stop:  # of a server without ranges
                return
    if end < stop:
        raise _Interrupted(f"the hub ended the transfer after {end} of {file.bytes} bytes")


def _read_body(url: str, num_held: int, stop: int | None) -> Iterator[tuple[int, bytes]]:
    """Positions and bytes after those held already, up to stop if that is given.

    Those of the whole file where the server knows no ranges.
    """
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if num_held or stop is not None:
        headers["Range"] = f"bytes={num_held}-{'' if stop is None else stop - 1}"
    session: Any = get_session()  # of requests, before huggingface_hub 1.0
    stream = getattr(session, "stream", None) or partial(session.request, stream=True)
    try:
        with stream("GET", url, headers=headers, timeout=_STALL_S) as response:
            if response.status_code >= 400 and hasattr(response, "read"):
                response.read()
            hf_raise_for_status(response)
            is_rest = response.headers.get("Content-Range", "").startswith(f"bytes {num_held}-")
            position = num_held if is_rest else 0
            # Chunks of a fixed size lose the bytes before a cut; requests has no others.
            chunks = (
                response.iter_bytes() if hasattr(response, "iter_bytes") else response.iter_content(_CHUNK_BYTES)
            )
            for chunk in chunks:
                yield position, chunk
                position += len(chunk)
    except HfHubHTTPError as error:
        if error.response.status_code not in _TEMPORARY:
            raise
        if error.response.status_code == _NOT_SATISFIABLE:
            yield 0, b""  # the bytes held do not belong to this file: start over
        raise _Interrupted(f"the hub answers with {error.response.status_code}") from None
    except Exception as error:  # from the HTTP library: requests, httpx or httpx2
        raise _Interrupted(f"{type(error).__name__} {error}".strip()) from None


def digest_of(path: Path, file: RemoteFile) -> str:
    """The digest of a file of this disk, of the kind that a commit lists for it."""
    if len(file.digest) == 64:
        return file_record(path).sha256
    digest = hashlib.sha1(b"blob %d\0" % file.bytes, usedforsecurity=False)
    with path.open("rb") as content:
        return hashlib.file_digest(content, lambda: digest).hexdigest()
