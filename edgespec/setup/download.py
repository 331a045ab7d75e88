"""One file of the hub to this disk: resumed where it was cut, and checked against the listing of its commit.

Not by hf_hub_download: that of huggingface_hub 2.4 deletes what it has when a download fails (of 25.6 MB cut at
24 MB, the next run fetched all 25.6), gives up after one answer of 503, and keeps a file of the right length with
wrong bytes.
"""

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from edgespec.errors import IntegrityError, ModelError
from edgespec.setup.repository import RemoteFile
from edgespec.system.disk import sync
from edgespec.system.file_hashes import file_record
from edgespec.system.progress import LoadProgress, ReportProgress
from edgespec.types import Report

_STALL_S = 20.0
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
    part = path.with_name(f"{path.name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    part.touch()
    if part.stat().st_size > file.bytes:
        os.truncate(part, 0)
    failures = 0
    while (num_held := part.stat().st_size) < file.bytes:
        try:
            _append(url, file, part, num_held, progress)
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
    if (found := _digest(part, file)) != file.digest:
        part.unlink()
        raise IntegrityError(
            f"the bytes of {url} have the hash {found[:12]}…, its commit lists {file.digest[:12]}…; "
            "the file was deleted, try again"
        )
    sync(part)
    part.replace(path)


def _append(url: str, file: RemoteFile, part: Path, num_held: int, progress: ReportProgress) -> None:
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    with (
        part.open("r+b") as out,
        tqdm(total=file.bytes, initial=num_held, desc=file.name, unit="B", unit_scale=True, disable=None) as bar,  # type: ignore[no-untyped-call]
    ):
        end = num_held
        for position, chunk in _read_body(url, num_held):
            if position + len(chunk) > file.bytes:
                out.truncate(0)
                raise IntegrityError(
                    f"{url} sends more than the {file.bytes} bytes that its commit lists; try again"
                )
            out.seek(position)
            out.truncate()
            out.write(chunk)
            end = position + len(chunk)
            bar.update(len(chunk))
            progress(LoadProgress("download", file.name, end, file.bytes))
    if end < file.bytes:
        raise _Interrupted(f"the hub ended the transfer after {end} of {file.bytes} bytes")


def _read_body(url: str, num_held: int) -> Iterator[tuple[int, bytes]]:
    """Positions and bytes after those held already, or of the whole file where the server knows no ranges."""
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if num_held:
        headers["Range"] = f"bytes={num_held}-"
    try:
        with get_session().stream("GET", url, headers=headers, timeout=_STALL_S) as response:
            if response.is_error:
                response.read()
            hf_raise_for_status(response)
            is_rest = response.headers.get("Content-Range", "").startswith(f"bytes {num_held}-")
            position = num_held if is_rest else 0
            for chunk in response.iter_bytes():  # chunks of a fixed size would lose the bytes before a cut
                yield position, chunk
                position += len(chunk)
    except HfHubHTTPError as error:
        if error.response.status_code not in _TEMPORARY:
            raise
        if error.response.status_code == _NOT_SATISFIABLE:
            yield 0, b""  # the bytes held do not belong to this file: start over
        raise _Interrupted(f"the hub answers with {error.response.status_code}") from None
    except Exception as error:  # from the HTTP library, which is httpx or httpx2
        raise _Interrupted(f"{type(error).__name__} {error}".strip()) from None


def _digest(path: Path, file: RemoteFile) -> str:
    if len(file.digest) == 64:
        return file_record(path).sha256
    digest = hashlib.sha1(b"blob %d\0" % file.bytes, usedforsecurity=False)
    with path.open("rb") as content:
        return hashlib.file_digest(content, lambda: digest).hexdigest()
