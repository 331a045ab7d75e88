"""A target for which drafters are looked for: its names, its source, its costs, and the memory beside it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from edgespec.loading.open_model import ModelFolder, weights_bytes
from edgespec.loading.placement import Placement
from edgespec.manifest import Manifest
from edgespec.memory.device_memory import Places
from edgespec.memory.estimate import FORESEEN_TOKENS, WeightsSize, bytes_by_place, estimate_memory, sum_bytes
from edgespec.memory.free_memory import FreeByPlace, ReadFreeMemory
from edgespec.models.catalog import CATALOG, CatalogEntry, CatalogFile, HubRepository
from edgespec.models.export_source import ExportSource, find_export_source
from edgespec.models.foreseen import foresee_model
from edgespec.models.home import ModelHome, split_precision
from edgespec.models.model_names import plain_name
from edgespec.planning.case import shortage
from edgespec.planning.drafter_gain import DraftingCosts
from edgespec.planning.foresee import ModelSize
from edgespec.planning.measured_placements import known_stats
from edgespec.policy.limits import MAX_PLANNED_TOKENS
from edgespec.profiling.profile import Profile


@dataclass(frozen=True, kw_only=True)
class DraftingTarget:
    """A target on its device.

    model: As commands name it.
    names: Plain names of the model that it is.
    source: What it would be exported from again; None where nothing says that.
    folder: Where it is prepared; None where it is not.
    size: As prepared or foreseen; None where only a download would tell.
    places: Where target and drafter have their memory; free: What is free there.
    devices: Options of commands that name the devices.
    """

    model: str
    names: frozenset[str]
    source: ExportSource | None
    folder: ModelFolder | None
    size: ModelSize | None
    placement: Placement
    places: tuple[str, str]
    free: FreeByPlace
    devices: Mapping[str, str]

    @property
    def short_name(self) -> str:
        """A name for folders that are made for it."""
        return min(self.names, key=len)

    @cached_property
    def profile(self) -> Profile | None:
        """What passes take on its device, as measured and refined by use; None where nothing was measured."""
        if self.folder is None:
            return None
        known, machine = known_stats(self.folder), self.placement.machine
        found = known.profiles.get(machine)
        return found and known.refine(found, machine, None)

    def costs_of(
        self, read_bytes: float, tokens_at_once: int = 1, longest: int = MAX_PLANNED_TOKENS
    ) -> DraftingCosts | None:
        """What a drafter costs that reads so many bytes of weights in a pass, compared with those of the target.

        None where it is not known what passes of the target take.
        """
        if self.size is None:
            return None
        return self.costs_by_share(read_bytes / self.size.file_bytes, tokens_at_once, longest)

    def costs_by_share(self, share: float, tokens_at_once: int, longest: int) -> DraftingCosts | None:
        """What a drafter costs whose pass takes a share of a step of the target; None as for costs_of."""
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
        needed = bytes_by_place(estimate_memory(drafter, size), self.places[1], self.free)
        return sum(needed.values()), self.find_shortage(needed)

    def find_shortage(self, needed: Mapping[str, int]) -> str:
        """Which memory is too small for so many bytes beside the target; empty if all fits."""
        if self.size is None:
            return ""
        own = bytes_by_place(estimate_memory(self.size.manifest, self.size.file_bytes), self.places[0], self.free)
        rooms = {place: room.free_bytes - room.reserve.opening_bytes for place, room in self.free.items()}
        num_tokens = min(FORESEEN_TOKENS, self.size.manifest.context_length)
        return shortage(sum_bytes([own, needed]), rooms, num_tokens)


def find_target(
    home: ModelHome,
    model: str,
    folder: ModelFolder | None,
    placement: Placement,
    free: ReadFreeMemory,
    devices: Mapping[str, str],
) -> DraftingTarget:
    """What is known of a target without a download; arguments as the fields of DraftingTarget.

    free: Reads the free memory of the host.

    Raises ModelError: Its source on this machine is damaged or unsupported.
    """
    kinds = placement.device.place, placement.drafter_device.place
    places = Places(kinds, free, lambda line: None)
    return DraftingTarget(
        model=model,
        names=frozenset(map(plain_name, _names(model, folder))),
        source=find_export_source(home, model, folder.manifest if folder else None),
        folder=folder,
        size=_size(home, model, folder, placement.device.form),
        placement=placement,
        places=(places.place_of(kinds[0]), places.place_of(kinds[1])),
        free=places(),
        devices=devices,
    )


def _names(model: str, folder: ModelFolder | None) -> list[str]:
    if folder is not None:
        source = folder.manifest.source
        return [source.name, *([source.repository] if source.repository else [])]
    name, _ = split_precision(model)
    return [published_name(CATALOG[name]) if name in CATALOG else name]


def published_name(entry: CatalogEntry) -> str:
    """The file or the repository of a model of the catalogue, which may have a shorter name there."""
    return entry.source.file if isinstance(entry.source, CatalogFile) else entry.source.repository


def _size(home: ModelHome, model: str, folder: ModelFolder | None, form: str) -> ModelSize | None:
    if folder is not None:
        return ModelSize(manifest=folder.manifest, file_bytes=weights_bytes(folder))
    name, asked = split_precision(model)
    if name not in CATALOG and not Path(name).expanduser().exists():
        return None
    if asked == "source" and name in CATALOG and isinstance(CATALOG[name].source, HubRepository):
        model = f"{name}:fp16"  # the usual precision of repositories
    manifest, num_bytes = foresee_model(home, model, form)
    return ModelSize(manifest=manifest, file_bytes=num_bytes)
