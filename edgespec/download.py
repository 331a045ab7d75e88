"""One file of the hub to this disk: resumed where it was cut, and checked against the listing of its commit.

The hub's own client starts a file anew after every failure that it does not get over itself.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from edgespec.disk import sync
from edgespec.errors import IntegrityError, ModelError
from edgespec.manifest import file_record
from edgespec.repository import RemoteFile

_STALL_S = 20.0
_PAUSE_S = 1.0
_TRIES = 4  # in a row without a byte
_CHUNK_BYTES = 1 << 20
_NOT_SATISFIABLE = 416
_PASSING = (408, _NOT_SATISFIABLE, 429, 500, 502, 503, 504)


class _Cut(Exception):
    """The body ended early, for a reason that may pass."""


def download(url: str, file: RemoteFile, path: Path, report: Callable[[str], None]) -> None:
    """Fetch file to path, which is there whole and right afterwards, or not at all.

    What has come stays in a .part file beside it and is not fetched again.

    Raises:
        HfHubHTTPError: The hub says no.
        ModelError: The transfer broke off again and again.
        IntegrityError: Other bytes came than the commit lists.
    """
    part = path.with_name(f"{path.name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    part.touch()
    if part.stat().st_size > file.bytes:
        os.truncate(part, 0)
    failures = 0
    while (held := part.stat().st_size) < file.bytes:
        try:
            _append(url, file, part, held)
        except _Cut as cut:
            has_come = part.stat().st_size
            failures = 0 if has_come > held else failures + 1
            if failures == _TRIES:
                raise ModelError(
                    f"{file.name} stopped at {has_come} of {file.bytes} bytes ({cut}); what has come is kept, "
                    "run the same command again to go on"
                ) from None
            report(f"{file.name}: {cut}; going on at byte {has_come}")
            time.sleep(_PAUSE_S)
    if (found := _digest(part, file)) != file.digest:
        part.unlink()
        raise IntegrityError(
            f"{url} gave other bytes than its commit lists ({found[:12]}…, wanted {file.digest[:12]}…); "
            "they were not kept, try again"
        )
    sync(part)
    part.replace(path)


def _append(url: str, file: RemoteFile, part: Path, held: int) -> None:
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    with (
        part.open("r+b") as out,
        tqdm(total=file.bytes, initial=held, desc=file.name, unit="B", unit_scale=True, disable=None) as bar,  # type: ignore[no-untyped-call]
    ):
        end = held
        for position, chunk in _body(url, held):
            if position + len(chunk) > file.bytes:
                out.truncate(0)
                raise IntegrityError(
                    f"{url} gave more than the {file.bytes} bytes that its commit lists; try again"
                )
            out.seek(position)
            out.truncate()
            out.write(chunk)
            end = position + len(chunk)
            bar.update(len(chunk))
    if end < file.bytes:
        raise _Cut(f"the hub ended it after {end} of {file.bytes} bytes")


def _body(url: str, held: int) -> Iterator[tuple[int, bytes]]:
    """What follows the bytes held, or all where the server knows no ranges, as positions and bytes."""
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if held:
        headers["Range"] = f"bytes={held}-"
    try:
        with get_session().stream("GET", url, headers=headers, timeout=_STALL_S) as response:
            if response.is_error:
                response.read()
            hf_raise_for_status(response)
            position = held if response.headers.get("Content-Range", "").startswith(f"bytes {held}-") else 0
            for chunk in response.iter_bytes():  # in chunks of a size, what came before a cut would be lost
                yield position, chunk
                position += len(chunk)
    except HfHubHTTPError as error:
        if error.response.status_code not in _PASSING:
            raise
        if error.response.status_code == _NOT_SATISFIABLE:
            yield 0, b""  # what is held is no beginning of this file: start anew
        raise _Cut(f"the hub answers with {error.response.status_code}") from None
    except Exception as error:  # of the HTTP library, which is httpx or httpx2
        raise _Cut(f"{type(error).__name__} {error}".strip()) from None


def _digest(path: Path, file: RemoteFile) -> str:
    if len(file.digest) == 64:
        return file_record(path).sha256
    digest = hashlib.sha1(b"blob %d\0" % file.bytes, usedforsecurity=False)
    with path.open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
