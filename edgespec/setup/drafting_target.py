"""A target for which drafters are looked for: its source, its costs, the memory, and what a drafter gains there.

What a drafter is expected to gain follows from the chance of its tokens and those costs. Drafts are made between
passes (Leviathan et al., 2023, section 3.3), and all tokens of a draft have one chance to be accepted: published
figures are means over whole drafts and say no more. What is known of a gain comes from use, from the check of a
pair, or from such figures.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from math import ceil
from pathlib import Path
from typing import NamedTuple

from edgespec.draft.acceptance_rates import AcceptanceRates, Key
from edgespec.draft.limits import MAX_PLANNED_TOKENS, MIN_GAIN_OF_PAIR
from edgespec.draft.option import best_length, expected_tokens
from edgespec.draft.overlap import Ratio
from edgespec.manifest import Manifest
from edgespec.memory.estimate import FORESEEN_TOKENS, WeightsSize, bytes_by_place, estimate_memory, sum_bytes
from edgespec.memory.free_memory import ReadFreeMemory
from edgespec.runtimes.devices import device_key
from edgespec.setup import genai
from edgespec.setup.catalog import (
    CATALOG,
    CatalogEntry,
    CatalogFile,
    HubRepository,
    HubSource,
    Reported,
    plain_name,
)
from edgespec.setup.device_choice import Placement
from edgespec.setup.drafter_ranking import Basis
from edgespec.setup.foresee import ModelSize, foresee_model
from edgespec.setup.home import ModelHome
from edgespec.setup.measured_placements import known_layout, without_trees
from edgespec.setup.memory_fit import MemoryReading, read_memory
from edgespec.setup.open_model import ModelFolder, known_stats, weights_bytes
from edgespec.setup.pair import Pair
from edgespec.setup.planner import plan_on, shortage
from edgespec.setup.profile import Profile

_HALVINGS = 40
_HIGHEST_RATE = 0.999  # a rate of 1 would promise tokens without end


@dataclass(frozen=True, kw_only=True)
class DraftingCosts:
    """Times in steps of the target.

    ratio: Of a pass of the target over so many drafted tokens.
    draft: Of a pass of the drafter, which drafts tokens_at_once tokens.
    longest: The most tokens that a draft can have.
    """

    ratio: Ratio
    draft: float
    tokens_at_once: int = 1
    longest: int = MAX_PLANNED_TOKENS

    def cost(self, num_draft: int) -> float:
        """Time of drafting and verifying that many tokens."""
        return self.ratio(num_draft) + ceil(num_draft / self.tokens_at_once) * self.draft


def expected_gain(rate: float, costs: DraftingCosts) -> tuple[float, int]:
    """Speed over plain decoding at the best draft length, and that length; 1 and 0 where no draft pays.

    rate: The chance that a token is accepted if all before it were.
    """
    return best_length(expected_tokens(repeat(rate, costs.longest)), costs.cost)


def rate_of(tokens_per_pass: float, num_draft: int) -> float:
    """The acceptance rate with which passes over num_draft drafted tokens yield tokens_per_pass.

    Example: of 4 drafted tokens, 2.17 a pass are a rate of 0.57.
    """
    found = _least(lambda rate: expected_tokens(repeat(rate, num_draft))[-1] >= tokens_per_pass)
    return _HIGHEST_RATE if found is None else found


def break_even_rate(costs: DraftingCosts) -> float | None:
    """The least acceptance rate with which a drafter pays; None where it never does."""
    return _least(lambda rate: expected_gain(rate, costs)[0] >= MIN_GAIN_OF_PAIR)


def _least(is_enough: Callable[[float], bool]) -> float | None:
    """The least rate that is enough, where each higher one is too; None where none is."""
    low, high = 0.0, _HIGHEST_RATE
    if not is_enough(high):
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


class ExportSource(NamedTuple):
    """A file, a folder or a hub id.

    revision: Of a hub id; None for its main branch. precision: None for the source's own.
    """

    source: str
    revision: str | None = None
    precision: str | None = None

    @property
    def words(self) -> list[str]:
        """The words of a command after `edgespec export`."""
        named = {"--revision": self.revision, "--precision": self.precision}
        return [self.source, *(word for flag, value in named.items() if value for word in (flag, value))]


def find_export_source(home: ModelHome, model: str, manifest: Manifest | None) -> ExportSource | None:
    """The source of a model of any name; None where nothing says what it was made from.

    manifest: Of the model folder, where it is prepared.
    """
    name, asked = home.split_name(model)
    if (folder := home.fixed_folder(model)) is None:
        if name in CATALOG:
            return _of_entry(home, CATALOG[name], asked)
        return ExportSource(name, None, asked if asked != "source" else None)
    if manifest is None or manifest.source.format == genai.FORMAT or manifest.source.is_merged:
        return None
    source = manifest.source
    precision = manifest.precision if manifest.precision != "source" else None
    if source.hub_id is None:
        return ExportSource(home.advice.noted_source(folder) or source.name, None, precision)
    return ExportSource(source.hub_id, source.revision, precision)


def _of_entry(home: ModelHome, entry: CatalogEntry, asked: str | None) -> ExportSource | None:
    source, wanted = entry.source, asked or entry.precision
    precision = None if wanted == "source" else wanted
    if isinstance(source, HubRepository):
        return ExportSource(source.repository, source.revision, precision)
    if (fetched := home.path / "downloads" / source.file).is_file():
        return ExportSource(str(fetched), None, precision)
    hub = next((place for place in source.sources if isinstance(place, HubSource)), None)
    return ExportSource(f"{hub.repository}:{hub.file}", hub.revision, precision) if hub else None


@dataclass(frozen=True, kw_only=True)
class DraftingTarget:
    """A target on its device, which is described without a download.

    model: As commands name it.
    folder: Where it is prepared; None where it is not.
    free: Reads the free memory of the host.
    devices: Options of commands that name the devices.
    """

    home: ModelHome
    model: str
    folder: ModelFolder | None
    placement: Placement
    free: ReadFreeMemory
    devices: Mapping[str, str]

    @cached_property
    def names(self) -> frozenset[str]:
        """Plain names of the model that it is."""
        if self.folder is None:
            name, _ = self.home.split_name(self.model)
            return frozenset({plain_name(published_name(CATALOG[name]) if name in CATALOG else name)})
        source = self.folder.manifest.source
        return frozenset(plain_name(name) for name in (source.name, source.repository) if name)

    @cached_property
    def source(self) -> ExportSource | None:
        """The source that it would be exported from again; None where nothing says that."""
        return find_export_source(self.home, self.model, self.folder.manifest if self.folder else None)

    @cached_property
    def size(self) -> ModelSize | None:
        """Its size as prepared or foreseen; None where only a download would tell.

        Raises ModelError: Its source on this machine is damaged or unsupported.
        """
        if self.folder is not None:
            return ModelSize(self.folder.manifest, weights_bytes(self.folder))
        model, (name, asked) = self.model, self.home.split_name(self.model)
        if name not in CATALOG and not Path(name).expanduser().exists():
            return None
        if asked == "source" and name in CATALOG and isinstance(CATALOG[name].source, HubRepository):
            model = f"{name}:fp16"  # the usual precision of repositories
        return foresee_model(self.home, model, self.placement.device.form)

    @cached_property
    def memory(self) -> MemoryReading:
        """The memory that is free where target and drafter have theirs."""
        return read_memory(self.placement, self.free, lambda line: None)

    @property
    def short_name(self) -> str:
        """A name for folders that are made for it."""
        return min(self.names, key=len)

    @cached_property
    def profile(self) -> Profile | None:
        """The costs of passes on its device; None where nothing was measured."""
        return known_stats(self.folder).target_profile(self.placement.machine) if self.folder else None

    def costs_of(
        self, read_bytes: float, tokens_at_once: int = 1, longest: int = MAX_PLANNED_TOKENS
    ) -> DraftingCosts | None:
        """The costs of a drafter that reads so many bytes of weights in a pass, compared with those of the target.

        None where it is not known what passes of the target take.
        """
        if self.size is None:
            return None
        return self.costs_by_share(read_bytes / self.size.file_bytes, tokens_at_once, longest)

    def costs_by_share(self, share: float, tokens_at_once: int, longest: int) -> DraftingCosts | None:
        """The costs of a drafter whose pass takes a share of a step of the target; None as for costs_of."""
        if self.profile is None:
            return None
        costs = self.profile.costs()
        return DraftingCosts(
            ratio=lambda num_draft: costs.ratio(num_draft + 1),
            draft=share,
            tokens_at_once=tokens_at_once,
            longest=longest,
        )

    def memory_of(self, drafter: Manifest, size: WeightsSize | int) -> tuple[int, str]:
        """Bytes that a drafter takes, and which memory is too small for it beside the target; empty if it fits."""
        needed = bytes_by_place(estimate_memory(drafter, size), self.memory.drafter_place, self.memory.free)
        return sum(needed.values()), self.find_shortage(needed)

    def find_shortage(self, needed: Mapping[str, int]) -> str:
        """Which memory is too small for so many bytes beside the target; empty if all fits."""
        if self.size is None:
            return ""
        own = bytes_by_place(estimate_memory(*self.size), self.memory.target_place, self.memory.free)
        rooms = self.memory.rooms(lambda reserve: reserve.opening_bytes)
        num_tokens = min(FORESEEN_TOKENS, self.size.manifest.context_length)
        return shortage(sum_bytes([own, needed]), rooms, num_tokens)


def published_name(entry: CatalogEntry) -> str:
    """The file or the repository of a model of the catalogue, which may have a shorter name there."""
    return entry.source.file if isinstance(entry.source, CatalogFile) else entry.source.repository


# With fewer drafted tokens that were judged, an acceptance rate is an estimate.
_ENOUGH_JUDGED = 50


class Evidence(NamedTuple):
    """Fields of a PossibleDrafter that say what it gains."""

    basis: Basis
    gain: float | None
    num_draft: int | None
    evidence: str


def evidence_of_use(target: ModelFolder, drafter: ModelFolder, placement: Placement) -> Evidence | None:
    """By what its drafts cost here and how many were accepted in answers; None where one of them is not known."""
    known = known_stats(target)
    layout = known_layout(drafter.manifest, placement, known)
    accepted = _count(known.chances, drafter.manifest.name)
    if layout is None or accepted is None:
        return None
    runnable = without_trees(drafter.manifest, placement.drafter_device)
    plan = plan_on([layout], target.manifest, runnable, known.chances)
    drafting = (option for option in plan.options if option.drafter and option.can_be_chosen)
    best = max(drafting, key=lambda option: option.tokens_per_second)
    return Evidence(
        "measured" if accepted.num_judged >= _ENOUGH_JUDGED else "estimated",
        best.tokens_per_second / plan.plain_tokens_per_second,
        best.draft_length,
        f"by its costs and its drafts in answers here: {accepted}",
    )


def evidence_of_check(pair: Pair, parts: tuple[ModelFolder, ModelFolder], placement: Placement) -> Evidence | None:
    """By the check of a pair of target and drafter on the devices; None where there is none of these models."""
    devices = device_key(placement.device), device_key(placement.drafter_device)
    check = pair.check_on(devices, (parts[0].folder, parts[1].folder))
    if check is None:
        return None
    why = f"by the check of the pair here: {check.reason}"
    return Evidence("measured", check.expected_gain, check.num_draft, why)


def evidence_of_report(reported: Reported | None, costs: DraftingCosts | None) -> Evidence | None:
    """By acceptance as it was reported, and costs here; None where one of them is not known."""
    if costs is None or reported is None or reported.tokens_per_pass is None or reported.num_draft is None:
        return None
    rate = rate_of(reported.tokens_per_pass, reported.num_draft)
    gain, num_draft = expected_gain(rate, costs)
    why = f"if {rate:.0%} of its tokens are accepted, which follows from the report, at what passes take here"
    return Evidence("estimated", gain, num_draft, why)


def no_evidence(target: DraftingTarget, costs: DraftingCosts | None) -> Evidence:
    """Nothing but the acceptance rate from which on a drafter pays, where costs are known."""
    return Evidence("unknown", None, None, "; ".join(["it was not measured here", *_break_even(target, costs)]))


def evidence_of_text(target: DraftingTarget, drafter: str) -> str:
    """The share of its tokens that was accepted here; how often a text gives a draft is not recorded."""
    accepted = _count(known_stats(target.folder).chances, drafter) if target.folder else None
    seen = [f"here {accepted}"] if accepted else []
    least = _break_even(target, target.costs_of(0))
    return "; ".join(["it depends on how much of an answer repeats earlier text", *seen, *least])


def _break_even(target: DraftingTarget, costs: DraftingCosts | None) -> list[str]:
    """From which acceptance on a drafter pays; nothing where it is not known what passes of the target take."""
    if target.profile is None:
        return []
    if costs is None:
        return ["what a pass of it takes is known once it is here"]
    if (rate := break_even_rate(costs)) is None:
        return [f"a pass of it takes {costs.draft:.0%} of a step of the target, at which no acceptance pays"]
    return [f"it pays here if more than {rate:.0%} of its tokens are accepted"]


class _Accepted(NamedTuple):
    share: float
    num_judged: float

    def __str__(self) -> str:
        return f"{self.share:.0%} of the last {self.num_judged:.0f} drafted tokens accepted"


def _count(past: Mapping[Key, tuple[float, float]], drafter: str) -> _Accepted | None:
    accepted, judged = AcceptanceRates(dict(past)).counts(drafter)
    return _Accepted(accepted / judged, judged) if judged else None
