"""Ranks what could draft for a model that a user names, by what is known. Measures, fetches, exports nothing."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from edgespec.engine.request import require_writer
from edgespec.memory.free_memory import free_memory
from edgespec.setup.device_choice import Placement
from edgespec.setup.drafter_ranking import Ranking
from edgespec.setup.drafter_search import rank_drafters
from edgespec.setup.drafting_target import find_target
from edgespec.setup.head_target import require_whole_model
from edgespec.setup.home import ModelHome
from edgespec.setup.open_model import ModelFolder, read_any_manifest
from edgespec.setup.pair import FILE_NAME
from edgespec.setup.resolve import find_known_devices
from edgespec.setup.row_proof import settle_placement


def rank_for_model(home: ModelHome, model: str, *, device: str, drafter_device: str) -> Ranking:
    """Rank drafters for a model, which need not be prepared.

    Raises:
        DeviceUnavailable: A device cannot be used.
        ModelError: There is no such model, or it is no target, or it writes no text.
    """
    choice, placement = find_known_devices(home, model, device, drafter_device)
    path = home.find(model, placement.device.form)
    folder = None if path is None else ModelFolder(path, read_any_manifest(path, home.report))
    if folder is not None:
        require_whole_model(folder.manifest, model)
        require_writer(folder.manifest)
        placement = choice.resolve_auto(placement, folder.manifest, [])
        placement = settle_placement(folder, placement)
    return rank_for_placement(
        home, model, folder, placement, devices={"device": device, "drafter-device": drafter_device}
    )


def rank_for_placement(
    home: ModelHome,
    model: str,
    folder: ModelFolder | None,
    placement: Placement,
    *,
    devices: Mapping[str, str],
    named: Mapping[str, ModelFolder] | None = None,
    memory_limit: int | None = None,
) -> Ranking:
    """Rank drafters for a target in a placement.

    Args:
        folder: Where the target is prepared, if it is.
        devices: Options of commands that name the devices; auto stands for any.
        named: Drafter models that the user has named, by their words of --drafter.
    """
    flags = {option: name for option, name in devices.items() if name.lower() != "auto"}
    target = find_target(home, model, folder, placement, partial(free_memory, memory_limit), flags)
    return rank_drafters(target, home, _find_pairs(home, model), named or {})


def _find_pairs(home: ModelHome, model: str) -> Iterator[Path]:
    """Pair folders: the one that is named, those of the home, and those in the current folder."""
    named = home.fixed_folder(model)
    seen = set()
    for folder in (*([named] if named else []), *_pairs_in(home.models), *_pairs_in(Path())):
        if (place := folder.resolve()) not in seen:
            seen.add(place)
            yield folder


def _pairs_in(folder: Path) -> list[Path]:
    return sorted(file.parent for file in folder.glob(f"[!.]*/{FILE_NAME}"))
