"""What can draft for a target and is no model of the catalogue, as known_drafters.toml lists it."""

import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from edgespec.system.split_files import whole_name

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
    family: The family of these targets, as export names it; empty for any.
    format: As export names it; empty where nothing is imported.
    num_weights: To download and to keep. None where that is not known.
    num_read: Weights that are read in a pass of the drafter, with those that it takes from its target.
    tokens_at_once: How many tokens it drafts in a pass.
    was_run: With which targets edgespec has run it; empty where it is only listed.
    """

    name: str
    kind: Kind
    way: Way
    targets: tuple[str, ...]
    family: str = ""
    format: str = ""
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
    stated["targets"] = tuple(stated["targets"])
    return KnownDrafter(name=name, reported=tuple(Reported(**each) for each in reported), **stated)


_LISTED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
KNOWN_DRAFTERS = tuple(_known(name, **stated) for name, stated in _LISTED.items())
