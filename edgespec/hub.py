"""Models of the Hugging Face hub: from an id to files of one commit on this disk.

The only module that asks the hub what it has. Fetches configuration, tokenizer, safetensors and GGUF, never
code and never a pickle; runs nothing of what it fetches.
"""

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from edgespec.disk import expect_room, writing
from edgespec.download import download
from edgespec.errors import EdgeSpecError, ModelError
from edgespec.lock import locked
from edgespec.repository import INDEX, Commit, HubId, RemoteFile, choose, shards

Report = Callable[[str], None]

_COMMIT = re.compile("[0-9a-f]{40}")
_ANSWER_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What to export: a file or folder here, and where it came from if that is known."""

    path: Path
    repository: str | None = None
    revision: str | None = None
    license: str | None = None


def fetch_snapshot(
    hub_id: HubId, folder: Path, report: Report, *, revision: str = "main", offline: bool = False
) -> Snapshot:
    """The files of a model at the commit that revision is now, below folder; what is there is not fetched again.

    Args:
        hub_id: What to fetch.
        folder: Shared by all repositories.
        report: Takes one line a file.
        revision: A branch, tag or commit.
        offline: Use what revision was when it was last fetched, and connect to nothing. HF_HUB_OFFLINE does
            the same.

    Raises:
        ModelError: The repository, the revision or the file is missing, or access to it; it holds nothing that
            can be exported, or several files to choose from; no network, or offline and not here.
        IntegrityError: Other bytes came than the commit lists.
        DiskFull: No room.
    """
    place = folder / hub_id.repository.replace("/", "--")
    commit = _recorded(hub_id, place, revision) if _is_offline(offline) else _ask(hub_id, revision)
    here = place / commit.sha / hub_id.repository.rpartition("/")[2]
    chosen = choose(commit, hub_id.choice)
    with _own(here, report):
        if not _is_offline(offline):
            _record(commit, place, {revision, commit.sha})
        _complete(commit, revision, chosen, here, report, offline=offline)
        if INDEX in (file.name for file in chosen):
            weights = shards(commit, (here / INDEX).read_text(encoding="utf-8"))
            _complete(commit, revision, weights, here, report, offline=offline)
    first = chosen[0].name
    return Snapshot(
        path=here / first if first.endswith(".gguf") else here,
        repository=commit.repository,
        revision=commit.sha,
        license=commit.license,
    )


def sizes(hub_id: HubId, folder: Path, *, revision: str = "main", offline: bool = False) -> tuple[int, int]:
    """Bytes of the weights of a model, and of those files that are not here; fetches none of them.

    Raises:
        ModelError: As fetch_snapshot.
    """
    place = folder / hub_id.repository.replace("/", "--")
    commit = _recorded(hub_id, place, revision) if _is_offline(offline) else _ask(hub_id, revision)
    here = place / commit.sha / hub_id.repository.rpartition("/")[2]
    chosen = choose(commit, hub_id.choice)
    if INDEX in (file.name for file in chosen):  # which of them it names is known once it is here
        chosen += [file for file in commit.files if file.name.endswith(".safetensors") and "/" not in file.name]
    weights = [file for file in chosen if file.name.endswith((".safetensors", ".gguf"))]
    missing = [file for file in chosen if not _is_here(here / file.name, file)]
    return sum(file.bytes for file in weights), sum(file.bytes for file in missing)


@contextmanager
def _own(folder: Path, report: Report) -> Iterator[None]:
    """One process at a time fetches into folder."""
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = locked(folder.with_name(".lock"), lambda holder: report(f"{holder} is fetching it; waiting"))
            stack.enter_context(lock)
        except OSError as error:
            raise EdgeSpecError(
                f"cannot write to {folder} ({error.strerror}); set EDGESPEC_HOME to a folder"
            ) from None
        yield


def _is_offline(offline: bool) -> bool:
    from huggingface_hub import constants

    return offline or bool(constants.HF_HUB_OFFLINE)


# -- which commit ------------------------------------------------------------------------------------


def _ask(hub_id: HubId, revision: str) -> Commit:
    from huggingface_hub import HfApi

    api = HfApi()
    if not answers(api.endpoint, _ANSWER_S):
        raise ModelError(
            f"{hub_id.repository} is no file or folder here, and the hub ({api.endpoint}) does not answer; "
            "check the network, or use what was fetched before with --offline"
        )
    with _in_words(hub_id.repository, revision):
        try:
            info = api.model_info(hub_id.repository, revision=revision, files_metadata=True, timeout=_ANSWER_S)
            return _commit(hub_id.repository, info)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelError(
                f"{api.endpoint} gives no listing of {hub_id.repository} that can be understood ({error})"
            ) from None


def _commit(repository: str, info: Any) -> Commit:
    """The hub's answer, checked: what it names becomes paths."""
    if not _COMMIT.fullmatch(info.sha):
        raise ValueError(f"commit {info.sha!r}")
    files = []
    for sibling in info.siblings:
        digest = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
        if (
            not isinstance(digest, str)
            or type(sibling.size) is not int
            or sibling.size < 0
            or not _is_inside(sibling.rfilename)
        ):
            continue
        files.append(RemoteFile(name=sibling.rfilename, bytes=sibling.size, digest=digest))
    return Commit(repository=repository, sha=info.sha, license=_license(info.card_data), files=tuple(files))


def _license(card: Any) -> str | None:
    name = card and ((card.get("license_name") if card.get("license") == "other" else None) or card.get("license"))
    return name if isinstance(name, str) else None


def _is_inside(name: str) -> bool:
    return not {"", ".", ".."} & set(name.split("/")) and not re.search(r"[\\:\0]", name)


def answers(url: str, timeout_s: float) -> bool:
    """Whether anything answers in time; a name look-up that hangs is left behind."""
    from huggingface_hub import get_session

    answered = threading.Event()
    done = threading.Event()

    def probe() -> None:
        try:
            get_session().head(url, timeout=timeout_s)
            answered.set()
        except Exception:  # any failure means no answer
            return
        finally:
            done.set()

    threading.Thread(target=probe, daemon=True).start()
    done.wait(timeout_s)
    return answered.is_set()


def _record(commit: Commit, place: Path, revisions: Iterable[str]) -> None:
    """Remember what revisions are now, for later without a network."""
    for revision in revisions:
        path = _record_path(place, revision)
        path.parent.mkdir(exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(commit)), encoding="utf-8")
        new.replace(path)


def _recorded(hub_id: HubId, place: Path, revision: str) -> Commit:
    try:
        stated = json.loads(_record_path(place, revision).read_text(encoding="utf-8"))
        return Commit(**{**stated, "files": tuple(RemoteFile(**file) for file in stated["files"])})
    except (OSError, ValueError, TypeError, KeyError):
        raise ModelError(
            f"{hub_id.repository} at '{revision}' is not here and --offline (or HF_HUB_OFFLINE) forbids fetching "
            "it; run once without it"
        ) from None


def _record_path(place: Path, revision: str) -> Path:
    return place / "revisions" / f"{quote(revision, safe='')}.json"


# -- fetching ----------------------------------------------------------------------------------------


def _complete(
    commit: Commit, revision: str, files: list[RemoteFile], here: Path, report: Report, *, offline: bool
) -> None:
    """Fetch those of files that are not here; one that is here was checked when it came."""
    missing = [file for file in files if not _is_here(here / file.name, file)]
    if missing and _is_offline(offline):
        raise ModelError(
            f"{missing[0].name} of {commit.repository} is not here and --offline (or HF_HUB_OFFLINE) forbids "
            "fetching it; run once without it"
        )
    needed = sum(file.bytes for file in missing)
    expect_room(here, needed)
    for file in missing:
        report(f"fetching {file.name} ({file.bytes / 1e6:.1f} MB) of {commit.repository} at {commit.sha[:12]}")
        with writing(here, needed), _in_words(commit.repository, revision):
            download(_url(commit, file), file, here / file.name, report)


def _is_here(path: Path, file: RemoteFile) -> bool:
    return path.is_file() and path.stat().st_size == file.bytes


def _url(commit: Commit, file: RemoteFile) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{commit.repository}/resolve/{commit.sha}/{quote(file.name)}"


@contextmanager
def _in_words(repository: str, revision: str) -> Iterator[None]:
    """The hub's refusals as errors that say what to do."""
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
        raise ModelError(
            f"{repository} has no revision '{revision}'; give one of its branches, tags or commits"
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"{repository} is no file or folder here and no repository of the hub; check the spelling, or if it "
            "is private, log in with: hf auth login"
        ) from None
    except HfHubHTTPError as error:
        said = str(error).partition("\n")[0]
        raise ModelError(f"the hub refuses {repository} ({said}); try again later") from None
    except (EdgeSpecError, OSError):
        raise
    except Exception as error:  # of the HTTP library, which is httpx or httpx2
        if isinstance(error, (AttributeError, KeyError, TypeError, ValueError)):
            raise
        raise ModelError(
            f"the hub breaks off while it answers about {repository} ({type(error).__name__}); check the network"
        ) from None
