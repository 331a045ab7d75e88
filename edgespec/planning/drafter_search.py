"""Looks for everything that could draft for a target, and ranks it. Opens no model and fetches nothing."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from edgespec.loading.open_model import ModelFolder
from edgespec.models.home import ModelHome
from edgespec.models.known_drafters import KNOWN_DRAFTERS
from edgespec.planning.drafter_ranking import PossibleDrafter, Ranking, rank
from edgespec.planning.drafting_target import DraftingTarget
from edgespec.planning.listed_drafters import describe_known, describe_listed, smaller_of_family
from edgespec.planning.prepared_drafters import (
    OwnPair,
    describe_model,
    describe_pair,
    find_models,
    read_model,
    read_own_pair,
)


def rank_drafters(
    target: DraftingTarget, home: ModelHome, pairs: Iterable[Path], named: Mapping[str, ModelFolder]
) -> Ranking:
    """Rank what drafts from the text, models, heads and the target's own layers.

    Args:
        pairs: Folders that may be pairs of the target.
        named: Drafter models that the user has named, by their words of --drafter.
    """
    placement = target.placement
    own = [pair for folder in pairs if (pair := read_own_pair(folder, target)) is not None]
    found = [*map(describe_pair, own), *_find_models(target, home, own, named), *_find_known(target, own)]
    return Ranking(
        model=target.model,
        target=target.folder.manifest.name if target.folder else target.model,
        device=placement.device.name,
        drafter_device=placement.drafter_device.name,
        has_costs=target.profile is not None,
        drafters=rank(found),
    )


def _find_models(
    target: DraftingTarget, home: ModelHome, pairs: Iterable[OwnPair], named: Mapping[str, ModelFolder]
) -> Iterator[PossibleDrafter]:
    """Models of this machine, and smaller ones of the catalogue."""
    form, family = target.placement.drafter_device.form, smaller_of_family(target.names)
    prepared = {name: path for name in sorted(family) if (path := home.find(name, form)) is not None}
    chosen = {name: model for name, path in prepared.items() if (model := read_model(path)) is not None}
    folders = {path: path.name for path in sorted(home.models.glob("[!.]*"))}
    in_pairs = {pair.drafter.folder for pair in pairs}
    for path, (word, drafter) in find_models(target, folders, {**chosen, **named}).items():
        if path not in in_pairs:
            yield describe_model(target, drafter, word)
    for name in sorted(family - chosen.keys()):
        yield describe_listed(target, home, name)


def _find_known(target: DraftingTarget, pairs: Iterable[OwnPair]) -> Iterator[PossibleDrafter]:
    """What the table of known drafters has for a target, but for what is in a pair already."""
    imported = {pair.drafter.manifest.source.repository for pair in pairs}
    for known in KNOWN_DRAFTERS:
        if known.name in imported or not known.drafts_for(target.names):
            continue
        if (found := describe_known(target, known)) is not None:
            yield found
