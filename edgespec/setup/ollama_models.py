"""Models that ollama has pulled on this machine: GGUF files, which are used where they lie.

ollama keeps a manifest for each name and tag, which lists the parts of a model by their SHA-256, as OCI images do.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import ModelError
from edgespec.manifest import Origin
from edgespec.setup.snapshot import LocalSource
from edgespec.system.typed_json import read_as, read_json
from edgespec.system.units import format_bytes

PREFIX = "ollama:"
_USUAL = ("registry.ollama.ai", "library", "latest")  # host, owner and tag that a name leaves out
_PLACES = ("~/.ollama/models", "/usr/share/ollama/.ollama/models")  # the second of the service on Linux
_PART = "application/vnd.ollama.image."


@dataclass(frozen=True)
class _Part:
    mediaType: str
    digest: str
    size: int


@dataclass(frozen=True)
class _Manifest:
    layers: list[_Part]


@dataclass(frozen=True)
class PulledModel:
    """A model of ollama. name: As `ollama list` has it, with its tag. path: Its GGUF file."""

    name: str
    path: Path

    @property
    def source(self) -> LocalSource:
        return LocalSource(path=self.path, origin=Origin(name=f"{PREFIX}{self.name}"))

    @property
    def folder_name(self) -> str:
        """The name of its folder in the model home; another one for another file under the same name."""
        plain = self.name.removesuffix(":latest").replace("/", "-").replace(":", "-")
        return f"{plain}-{self.path.name.removeprefix('sha256-')[:8]}"


def pulled_names() -> list[str]:
    """The names of all models of ollama on this machine, as `ollama list` has them, sorted."""
    with suppress(OSError):
        return sorted(_name(path.relative_to(place).parts) for place, path in _manifests())
    return []


def find_pulled(name: str) -> PulledModel:
    """A model of ollama by its name, with or without `ollama:` before it and a tag behind it.

    Raises ModelError: ollama has not pulled it here, or it is no whole model in one GGUF file.
    """
    name = name.removeprefix(PREFIX)
    named = {_name(path.relative_to(place).parts): path for place, path in reversed([*_manifests()])}
    whole = name if name in named else f"{name}:{_USUAL[2]}"
    if (manifest := named.get(whole)) is None:
        here = f"; it has {', '.join(sorted(named))}" if named else ""
        raise ModelError(f"ollama has no model '{name}' on this machine{here}; pull it: ollama pull {name}")
    return PulledModel(whole, _weights(whole, manifest))


def _manifests() -> Iterator[tuple[Path, Path]]:
    own = os.environ.get("OLLAMA_MODELS")
    for place in [own] if own else _PLACES:
        folder = Path(os.path.expanduser(place), "manifests")
        yield from ((folder, path) for path in folder.glob("*/*/*/*") if path.is_file())


def _name(parts: tuple[str, ...]) -> str:
    """The name of a manifest by its place: host, owner, model and tag."""
    host, owner, model, tag = parts
    if host != _USUAL[0]:
        return f"{host}/{owner}/{model}:{tag}"
    return f"{model}:{tag}" if owner == _USUAL[1] else f"{owner}/{model}:{tag}"


def _weights(name: str, manifest: Path) -> Path:
    """The GGUF file of a model. Raises ModelError: It has none, or more than a base model, or it is not whole."""
    again = f"pull it again: ollama pull {name}"
    try:
        parts = read_as(_Manifest, read_json(manifest)).layers
    except (OSError, ValueError) as error:
        raise ModelError(f"ollama's manifest {manifest} cannot be read ({error}); {again}") from None
    if any(part.mediaType == f"{_PART}adapter" for part in parts):
        raise ModelError(
            f"ollama's {name} is an adapter for another model; give the files of both: edgespec export BASE "
            "--adapter ADAPTER"
        )
    weights = [part for part in parts if part.mediaType == f"{_PART}model"]
    if len(weights) != 1:
        raise ModelError(
            f"ollama's {name} has {len(weights) or 'no'} GGUF files, wanted one; give a model that has one, or a "
            "hub id (org/name)"
        )
    path = manifest.parents[4] / "blobs" / weights[0].digest.replace(":", "-")
    found = path.stat().st_size if path.is_file() else 0
    if found != weights[0].size:
        raise ModelError(
            f"ollama's {name} is incomplete: {path} has {format_bytes(found)} of {format_bytes(weights[0].size)}; "
            f"{again}"
        )
    return path
