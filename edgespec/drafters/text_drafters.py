"""Drafters that draft from the text of an answer, by the names that users give them."""

from collections.abc import Collection

from edgespec.drafters.lookahead import Lookahead, Window
from edgespec.drafters.ngram import NgramDrafter
from edgespec.drafters.suffix import SuffixDrafter
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
