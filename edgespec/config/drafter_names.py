"""The value of --drafter, parsed.

auto                 whatever saves time
suffix+MODEL         both draft, and each pass checks the better draft
MEDIUM,TINY,suffix   a cascade: each drafts for the one before it
"""

import os
from typing import NamedTuple

from edgespec.errors import UsageError

# Drafters that repeat earlier text, for any target: their names, and the class that makes one for each answer. A
# line here is all that a new one needs to be known everywhere.
TEXT = {"ngram": "edgespec.draft.ngram:NgramDrafter", "suffix": "edgespec.draft.suffix:SuffixDrafter"}
FRUGAL = frozenset({"ngram"})  # those of TEXT that remember nothing of it
# The most tokens that a measured policy drafts at a time: longer drafts are hardly ever accepted to their end.
MAX_DRAFT_TOKENS = 24
TARGET = ("auto", "lookahead")  # what depends on the target
SELF = "self"  # a drafter model of the target's own layers
WORDS = (*TARGET, *TEXT, SELF, "none")  # all that are no models


class Cascade(NamedTuple):
    """Models that each draft for the one before it, and the text drafter for the last, if any."""

    models: tuple[str, ...]
    text: str | None


class DrafterNames(NamedTuple):
    """Words of TEXT and TARGET, and cascades, most of them a single model. With neither, decoding is plain."""

    simple: frozenset[str]
    cascades: tuple[Cascade, ...]

    @property
    def may_have_model(self) -> bool:
        """Whether a model may draft, whatever the target is; auto may find one beside it."""
        return bool(self.cascades) or "auto" in self.simple


def parse(named: str) -> DrafterNames:
    """Parse a value of --drafter; the path of an existing file or folder is one model, whatever its name.

    Raises UsageError: A part is empty, or is a word where only a model can stand.
    """
    if not named:
        raise UsageError("the drafter is empty; give auto, none, a drafter from the text, or a model")
    if named == "none":
        return DrafterNames(frozenset(), ())
    parts = [named] if os.path.exists(named) else named.split("+")
    simple = frozenset({*TEXT, *TARGET}.intersection(parts))
    return DrafterNames(simple, tuple(_cascade(part, named) for part in parts if part not in simple))


def _cascade(part: str, named: str) -> Cascade:
    models = [part] if os.path.exists(part) else part.split(",")
    text = models.pop() if models[-1] in TEXT else None
    wrong = [name for name in models if name in ("", "none", *TEXT, *TARGET)]
    if wrong or not models:
        raise UsageError(
            f"the drafter '{named}' has '{wrong[0] if wrong else ''}' in place of a model; wanted a model, models "
            f"separated by commas, {', '.join((*TEXT, *TARGET, SELF))}, or none by itself"
        )
    return Cascade(tuple(models), text)
