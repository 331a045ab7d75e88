"""What a user names as drafter, taken apart.

auto                 what pays
suffix+MODEL         both are heard, and each round the better one
MEDIUM,TINY,suffix   each drafts for the one before it
"""

import os
from typing import NamedTuple

from edgespec.errors import UsageError

TEXT = ("ngram", "suffix")  # which draft from the text, for anything
TARGET = ("auto", "lookahead")  # which know more of the target
SELF = "self"  # a model, of the target's own layers
WORDS = "ngram, suffix, lookahead, self or a model; a+b hears both, in a,b b drafts for a"


class Cascade(NamedTuple):
    """Models, each of which drafts for the one before it, and what drafts from the text for the last."""

    models: tuple[str, ...]
    text: str | None


class DrafterNames(NamedTuple):
    """Those of TEXT and TARGET, and cascades, often of a single model. Neither is plain decoding."""

    simple: frozenset[str]
    cascades: tuple[Cascade, ...]


def parse(named: str) -> DrafterNames:
    """Take apart what is named; what exists as a file or folder is one model, whatever its name.

    Raises:
        UsageError: A part is empty, or something other than a model stands where a model must.
    """
    if named == "none":
        return DrafterNames(frozenset(), ())
    parts = [named] if os.path.exists(named) else named.split("+")
    simple = frozenset(part for part in parts if part in TEXT + TARGET)
    return DrafterNames(simple, tuple(_cascade(part, named) for part in parts if part not in simple))


def _cascade(part: str, named: str) -> Cascade:
    models = [part] if os.path.exists(part) else part.split(",")
    text = models.pop() if models[-1] in TEXT else None
    wrong = [name for name in models if name in ("", "none", *TEXT, *TARGET)]
    if wrong or not models:
        known = ", ".join((*TEXT, *TARGET, SELF))
        raise UsageError(
            f"'{wrong[0] if wrong else ''}' stands where a model must in the drafter '{named}'; wanted a model, "
            f"models with commas between, {known}, or none alone"
        )
    return Cascade(tuple(models), text)
