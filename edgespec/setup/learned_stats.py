"""What was learned of drafting for a model, stored beside it: costs by machine and acceptance, no text."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert

from edgespec.draft.acceptance_rates import Key
from edgespec.setup.profile import Profile
from edgespec.system.disk import replace_file
from edgespec.system.typed_json import read_json
from edgespec.types import Report

FILE_NAME = "experience.json"
_VERSION = 1
_LARGEST_BYTES = 1 << 23


@dataclass(frozen=True, slots=True)
class LearnedStats:
    """Costs of passes and drafts on each machine, and accepted and tried tokens by source and evidence.

    ratios: time of a pass over one of a single token, by width.
    drafts: steps for each token drafted and for each read, by drafter_key.
    spreads: how unsure those are, as standard deviations of their logs.
    contention: how much longer a pass and a draft step take while both run, by drafter_key.
    profiles: what was measured when a plan was made, in seconds; use keeps the others up to date.
    width_changes: the most by which the cut of a text into passes changes the lead of a token.
    """

    ratios: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    drafts: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    chances: Mapping[Key, tuple[float, float]] = field(default_factory=dict)
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    contention: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    width_changes: Mapping[str, float] = field(default_factory=dict)
    spreads: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    def refine(self, profile: Profile, machine: str, lane: str | None) -> Profile:
        """Apply to a machine's profile what use has shown since of the target and of one drafter."""
        drafts = self.drafts.get(machine, {}).get(lane) if lane else None
        contention = self.contention.get(machine, {}).get(lane) if lane else None
        return profile.refine(self.ratios.get(machine), lane, drafts, contention)

    def with_profile(
        self,
        machine: str,
        profile: Profile,
        drafts: Mapping[str, tuple[float, float]],
        ratios: Mapping[int, float] | None,
        contention: Mapping[str, tuple[float, float]] | None = None,
        spreads: Mapping[int, float] | None = None,
    ) -> "LearnedStats":
        """These stats with a machine's profile and its drafts; without ratios or contention those known stay.

        spreads: Those of the ratios; none for ratios that were measured just once.
        """
        return replace(
            self,
            ratios={**self.ratios, **({machine: ratios} if ratios else {})},
            drafts={**self.drafts, machine: {**self.drafts.get(machine, {}), **drafts}},
            contention={**self.contention, machine: {**self.contention.get(machine, {}), **(contention or {})}},
            profiles={**self.profiles, machine: profile},
            spreads={**self.spreads, **({machine: spreads or {}} if ratios else {})},
        )


_Width = Annotated[int, Meta(ge=1)]
_Ratio = Annotated[float, Meta(ge=1.0, le=1e3)]
_Step = Annotated[float, Meta(ge=1e-6, le=1e3)]
_Spread = Annotated[float, Meta(ge=0.0, le=10.0)]
_Row = Annotated[float, Meta(ge=0.0, le=1e3)]
_Contention = Annotated[float, Meta(ge=1.0, le=1e3)]
_Change = Annotated[float, Meta(ge=0.0, le=1e3)]
_Accepted = Annotated[float, Meta(ge=0.0, le=1e6)]
_Tried = Annotated[float, Meta(ge=1e-9, le=1e6)]


class _Document(Struct):
    """The file as it is written, with the bounds of what somebody may have changed in it."""

    ratios: dict[str, dict[_Width, _Ratio]]
    chances: list[tuple[str, int, _Accepted, _Tried]]
    drafts: dict[str, dict[str, tuple[_Step, _Row]]] = {}
    contention: dict[str, dict[str, tuple[_Contention, _Contention]]] = {}
    profiles: dict[str, Profile] = {}
    width_changes: dict[str, _Change] = {}
    spreads: dict[str, dict[_Width, _Spread]] = {}

    def __post_init__(self) -> None:
        if any(ratios.get(1) != 1.0 for ratios in self.ratios.values()):
            raise ValueError("ratios without a step")
        if any(accepted > tried for _, _, accepted, tried in self.chances):
            raise ValueError("more accepted than tried")


def read_learned_stats(folder: Path, report: Report = lambda line: None) -> LearnedStats:
    """Read what a folder holds; empty where there is no file, or one that cannot be used, which is reported."""
    path = folder / FILE_NAME
    try:
        return _parse(read_json(path, _LARGEST_BYTES))
    except FileNotFoundError:
        return LearnedStats()
    except ValidationError as error:
        problem = str(error)
    except OSError as error:
        problem = error.strerror or "it cannot be read"
    except ValueError as error:
        problem = f"it is no sound JSON: {error}"
    report(f"{path} cannot be used ({problem}); measuring again")
    return LearnedStats()


def write_learned_stats(folder: Path, learned_stats: LearnedStats, report: Report = lambda line: None) -> None:
    """Store what was learned; where a folder cannot be written, that is reported, and it is measured each time."""
    document = {"version": _VERSION, **asdict(learned_stats)}
    document["chances"] = [[*key, *counts] for key, counts in learned_stats.chances.items()]
    try:
        replace_file(folder / FILE_NAME, json.dumps(document).encode())
    except OSError as error:
        report(
            f"{folder} cannot be written ({error.strerror}): what was measured and learned of its model on this "
            "machine is not stored for the next time"
        )


def _parse(document: Any) -> LearnedStats:
    version = document.get("version") if isinstance(document, dict) else None
    if version is not None and version != _VERSION:
        raise ValidationError(f"it is of version {str(version)[:20]}, wanted {_VERSION}")
    try:
        stated = convert(document, _Document, strict=False)
    except ValueError:
        raise ValidationError("it does not state what edgespec writes there") from None
    # Never all: a rate of 1 would promise tokens without end.
    chances = {
        (source, evidence): (min(accepted, 0.999 * tried), tried)
        for source, evidence, accepted, tried in stated.chances
    }
    return LearnedStats(
        stated.ratios,
        stated.drafts,
        chances,
        stated.profiles,
        stated.contention,
        stated.width_changes,
        stated.spreads,
    )
