"""Drafters that draft from the text of an answer, by the names that users give them."""

from collections.abc import Collection
from importlib import import_module

from edgespec.config.drafter_names import TEXT
from edgespec.drafters.lookahead import Lookahead, Window
from edgespec.types import Drafter


def make_text_drafters(names: Collection[str], window: Window | None) -> list[Drafter]:
    """New drafters for one answer, whose text they hold."""
    wanted = {*names, "suffix"} if "auto" in names else names
    drafters = [_make(made_by) for name, made_by in TEXT.items() if name in wanted]
    return drafters if window is None else [*drafters, Lookahead(window)]


def _make(made_by: str) -> Drafter:
    module, _, name = made_by.partition(":")
    drafter: Drafter = getattr(import_module(module), name)()
    return drafter
