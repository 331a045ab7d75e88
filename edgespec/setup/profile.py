"""How long passes, reading, draft steps, and both models at once take on this machine, in seconds, as data.

It is stored beside a model with what use has taught since: costs by machine and acceptance, no text.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, ValidationError, convert

from edgespec.draft.acceptance_rates import Key
from edgespec.draft.costs import ContextCosts, PassCosts, pass_costs
from edgespec.draft.draft_model import DraftCosts
from edgespec.draft.pass_estimate import MEASURED
from edgespec.system.disk import replace_file
from edgespec.system.typed_json import OtherVersion, read_versioned
from edgespec.types import Report

# How much longer a pass after a longer text takes is believed where the two texts differ by this many tokens.
LEAST_SPAN = 400

# Bounds of what a file may state that somebody wrote by hand.
_Few = Meta(max_length=64)  # widths, texts and drafters
_Seconds = Annotated[float, Meta(ge=1e-9, le=1e5)]
_MaybeSeconds = Annotated[float, Meta(ge=0.0, le=1e5)]
_Factor = Annotated[float, Meta(ge=1.0, le=1e3)]
_Width = Annotated[int, Meta(ge=1, le=1 << 24)]
_NumHeld = Annotated[int, Meta(ge=0, le=1 << 24)]


class MeasuringTime(NamedTuple):
    """Seconds spent on learning a profile; 0 where it was known."""

    opening_s: float = 0.0
    measuring_s: float = 0.0

    def plus(self, more: "MeasuringTime") -> "MeasuringTime":
        return MeasuringTime(self.opening_s + more.opening_s, self.measuring_s + more.measuring_s)


class Place(NamedTuple):
    """Where a model runs, and with how many threads of the host."""

    device: str
    num_threads: int
    drivers: tuple[str, ...] = ()  # the device's hardware and its drivers

    def __str__(self) -> str:
        return f"{self.device}, {self.num_threads} thread{'s' * (self.num_threads > 1)}"


def drafter_key(drafter: str, place: Place) -> str:
    """The name in a profile of a drafter that runs in a place."""
    return ", ".join([f"{drafter} on {place}", *place.drivers])


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterProfile:
    """How long a drafter takes beside its target.

    step_s: for each token that it drafts, or for the block that it drafts in a pass.
    row_s: for each token of the text that it has not read.
    branches: time of a step of several tokens over a step of one, by their number; 1 has 1.
    slowed: factors on a pass of the target and on a step of the drafter while both run.
    """

    step_s: _Seconds
    row_s: _MaybeSeconds
    branches: Annotated[Mapping[_Width, _Factor], _Few] = field(default_factory=lambda: {1: 1.0})
    slowed: tuple[_Factor, _Factor] = (1.0, 1.0)

    def __post_init__(self) -> None:
        if self.branches.get(1) != 1.0:
            raise ValueError("branches without a step of one token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How long a target takes on one device with one number of threads.

    passes_s: a pass, by the tokens that are held before it and then by its width, 1 among them.
    prefill_s: each token of a prompt.
    spread: how unsure the passes are, as the standard deviation of the log of one over another.
    transfer_s: each further row of logits out of a pass: its product with the head and its way to the host.
    drafters: by drafter_key.
    widths: to which passes are padded, as costs.PassCosts has them.
    """

    passes_s: Annotated[Mapping[_NumHeld, Annotated[Mapping[_Width, _Seconds], _Few]], _Few]
    prefill_s: _Seconds
    transfer_s: _MaybeSeconds = 0.0
    drafters: Annotated[Mapping[str, DrafterProfile], _Few] = field(default_factory=dict)
    spread: Annotated[float, Meta(ge=0.0, le=10.0)] = MEASURED
    widths: tuple[_Width, ...] = ()

    def __post_init__(self) -> None:
        if not self.passes_s or any(1 not in taken_s for taken_s in self.passes_s.values()):
            raise ValueError("passes without one of a single token")

    def pass_s(self, width: int, past: int) -> float:
        """Seconds of a pass of width tokens after past ones, on the line through the texts that were measured."""
        return self.costs().pass_s(width) + self.context_costs().steps(width, past) * self._near_s[1]

    @property
    def _near_s(self) -> Mapping[int, float]:
        """Seconds by width after the shortest text."""
        return self.passes_s[min(self.passes_s)]

    def costs(self) -> PassCosts:
        """Costs of passes after a short text, from which a draft policy starts."""
        return pass_costs(self._near_s, self.widths)

    def spreads(self) -> dict[int, float]:
        """How unsure the ratios are, as costs.PassCosts holds it."""
        return {width: self.spread for width in self._near_s if width > 1}

    def context_costs(self) -> ContextCosts:
        """The costs that a longer text adds to passes."""
        near, far = min(self.passes_s), max(self.passes_s)
        if far - near < LEAST_SPAN:
            return ContextCosts(near)
        costs = ContextCosts.between(near, self.passes_s[near], far, self.passes_s[far])
        return costs.padded(self.widths) if self.widths else costs

    def with_ratios(self, ratios: Mapping[int, float]) -> "Profile":
        """This profile with other ratios of passes by width; what a longer text adds stays as it was."""
        used, near_s, known = PassCosts(dict(ratios), widths=self.widths), self._near_s, self.costs()
        passes_s: dict[int, dict[int, float]] = {}
        for past, taken_s in self.passes_s.items():
            passes_s[past] = {}
            for width, pass_s in taken_s.items():
                more_s = used.ratio(width) * near_s[1] - near_s.get(width, known.pass_s(width))
                passes_s[past][width] = max(pass_s + more_s, 1e-9)
        return replace(self, passes_s=passes_s)

    def draft_costs(self, drafter: str) -> DraftCosts:
        """A drafter's costs in steps of the target, after a short text."""
        known, step_s = self.drafters[drafter], self.pass_s(1, 0)
        return DraftCosts(known.step_s / step_s, known.row_s / step_s)


FILE_NAME = "experience.json"
_VERSION = 1
_LARGEST_BYTES = 1 << 23


_Step = Annotated[float, Meta(ge=1e-6, le=1e3)]
_Spread = Annotated[float, Meta(ge=0.0, le=10.0)]
_Row = Annotated[float, Meta(ge=0.0, le=1e3)]
_Change = Annotated[float, Meta(ge=0.0, le=1e3)]
_Accepted = Annotated[float, Meta(ge=0.0, le=1e6)]
_Tried = Annotated[float, Meta(ge=1e-9, le=1e6)]


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

    ratios: Mapping[str, Mapping[_Width, _Factor]] = field(default_factory=dict)
    drafts: Mapping[str, Mapping[str, tuple[_Step, _Row]]] = field(default_factory=dict)
    chances: Mapping[Key, tuple[float, float]] = field(default_factory=dict)
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    contention: Mapping[str, Mapping[str, tuple[_Factor, _Factor]]] = field(default_factory=dict)
    width_changes: Mapping[str, _Change] = field(default_factory=dict)
    spreads: Mapping[str, Mapping[_Width, _Spread]] = field(default_factory=dict)

    def target_profile(self, machine: str) -> Profile | None:
        """The target's costs on a machine, as measured and refined by use; None where nothing was measured."""
        found = self.profiles.get(machine)
        return found and self.refine(found, machine, None)

    def refine(self, profile: Profile, machine: str, lane: str | None) -> Profile:
        """Apply to a machine's profile what use has shown since of the target and of one drafter.

        Only ratios are stored, for the machine's speed changes.
        """
        ratios, drafts = self.ratios.get(machine), self.drafts.get(machine, {}).get(lane or "")
        refined = profile.with_ratios(ratios) if ratios else profile
        if lane is None or drafts is None or lane not in profile.drafters:
            return refined
        step_s, known = profile.pass_s(1, 0), profile.drafters[lane]
        slowed = self.contention.get(machine, {}).get(lane, known.slowed)
        now = replace(known, step_s=drafts[0] * step_s, row_s=drafts[1] * step_s, slowed=slowed)
        return replace(refined, drafters={**profile.drafters, lane: now})

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

        So do the drafters of the profile that is known: another session may have measured them.

        spreads: Those of the ratios; none for ratios that were measured just once.
        """
        if machine in self.profiles:
            profile = replace(profile, drafters={**self.profiles[machine].drafters, **profile.drafters})
        return replace(
            self,
            ratios={**self.ratios, **({machine: ratios} if ratios else {})},
            drafts={**self.drafts, machine: {**self.drafts.get(machine, {}), **drafts}},
            contention={**self.contention, machine: {**self.contention.get(machine, {}), **(contention or {})}},
            profiles={**self.profiles, machine: profile},
            spreads={**self.spreads, **({machine: spreads or {}} if ratios else {})},
        )


def read_learned_stats(folder: Path, report: Report = lambda line: None) -> LearnedStats:
    """Read what a folder holds; empty where there is no file, or one that cannot be used, which is reported."""
    path = folder / FILE_NAME
    try:
        return _parse(read_versioned(path, _VERSION, _LARGEST_BYTES))
    except FileNotFoundError:
        return LearnedStats()
    except (ValidationError, OtherVersion) as error:
        problem = str(error)
    except OSError as error:
        problem = error.strerror or "it cannot be read"
    except ValueError as error:
        problem = f"it is not valid JSON: {error}"
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
            f"{folder} cannot be written ({error.strerror}): measurements of its model on this machine are not "
            "saved for the next time"
        )


def _parse(document: dict[str, Any]) -> LearnedStats:
    try:
        counted = convert(document["chances"], list[tuple[str, int, _Accepted, _Tried]], strict=False)
        chances = {}
        for source, evidence, accepted, tried in counted:
            if accepted > tried:
                raise ValueError("more accepted than tried")
            # Never all: a rate of 1 would promise tokens without end.
            chances[source, evidence] = min(accepted, 0.999 * tried), tried
        stated = convert({**document, "chances": chances}, LearnedStats, strict=False)
        if any(ratios.get(1) != 1.0 for ratios in stated.ratios.values()) or "ratios" not in document:
            raise ValueError("ratios without a step")
    except (KeyError, TypeError, ValueError):
        raise ValidationError("it does not state what edgespec writes there") from None
    return stated
