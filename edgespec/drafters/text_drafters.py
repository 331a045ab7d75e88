"""Drafters that draft from the text of an answer, by the names that users give them."""

from collections.abc import Collection

from edgespec.drafters.lookahead import SMALLEST, Lookahead, Window, best_window
from edgespec.drafters.ngram import NgramDrafter
from edgespec.drafters.suffix import SuffixDrafter
from edgespec.loading.open_model import ModelFolder
from edgespec.loading.placement import Placement
from edgespec.policy.costs import PassCosts
from edgespec.profiling.learned_stats import read_learned_stats
from edgespec.runtimes.tree import can_run_trees, tree_manifest
from edgespec.types import Drafter


def make_text_drafters(names: Collection[str], window: Window | None) -> list[Drafter]:
    """New drafters for one answer, whose text they hold."""
    drafters: list[Drafter] = []
    if "ngram" in names:
        drafters.append(NgramDrafter())
    if not {"auto", "suffix"}.isdisjoint(names):
        drafters.append(SuffixDrafter())
    if window is not None:
        drafters.append(Lookahead(window))
    return drafters


def lookahead_window(
    names: Collection[str], length: int | None, target: ModelFolder, placement: Placement
) -> Window | None:
    """The window of lookahead decoding, if a user asks for it or it pays by the passes measured on this machine.

    It never pays where passes run no trees: in deterministic mode each branch has a pass of its own.

    Args:
        length: Tokens of a draft, if fixed.

    Raises ManifestError: A user asks for it and the target cannot run trees.
    """
    folder, manifest = target
    if "lookahead" in names:
        tree_manifest(manifest, placement.device)
    elif (
        "auto" not in names
        or length is not None
        or not can_run_trees(manifest, placement.device)
        or placement.deterministic
        or placement.exact
    ):
        return None
    learned = read_learned_stats(folder)
    ratios = learned.ratios.get(placement.machine)
    window = best_window(PassCosts(dict(ratios)), learned.chances) if ratios else None
    if "lookahead" not in names:
        return window
    window = window or SMALLEST
    return window.with_guesses_of(length) if length else window
