"""Options of one command that contradict each other, and pairs of which a line says what they mean.

Looks at options alone and opens no model: what only the model or its device shows is refused where it is loaded.
"""

import argparse
from collections.abc import Iterator, Mapping
from typing import NoReturn

from edgespec import UsageError
from edgespec.cli.arguments import attribute_name, is_given
from edgespec.config.drafter_names import parse

Options = argparse.Namespace
# What a run of bench depends on, which an earlier run has settled. Those that have a default come with it.
_MEASURING = (
    *("resume", "prompts", "per-category", "max-tokens", "rounds"),
    *("temperature", "learned", "both-modes", "compare"),
)


def require_consistent(options: Options, origins: Mapping[str, str]) -> None:
    """Refuse a command line whose options contradict each other.

    origins: Where an option was set that the command line does not have, by its name.

    Raises UsageError: Two options contradict each other.
    """
    value = vars(options).get  # None for an option that another command has
    learns, rejects = value("learn") is not None, value("acceptance") == "rejection"

    def refuse(first: str, second: str, why: str, way: str = "leave out one of them") -> NoReturn:
        names = " and ".join(_shown(options, name, origins) for name in (first, second))
        raise UsageError(f"{names} contradict each other: {why}; {way}")

    def has_no_model() -> bool:
        return value("drafter") is not None and not parse(options.drafter).may_have_model

    if value("exact") and value("deterministic") is False:
        why = "--exact keeps the text of plain decoding, and --no-deterministic lets it change at near-ties"
        refuse("exact", "no-deterministic", why, "leave out --no-deterministic for one text, or --exact for speed")
    if value("exact") and value("temperature"):
        refuse("exact", "temperature", "--exact covers greedy text only")
    if value("deterministic") and rejects and value("draft_length") == "auto":
        why = "with rejection, sampled text depends on the drafts"
        way = "add --draft-length 4: then a seed gives the same text again with the same drafter"
        refuse("deterministic", "acceptance", why, f"leave out one of them, or {way}")
    if learns and rejects:
        why = "learning changes what a head drafts, and with rejection sampled text depends on drafts"
        refuse("learn", "acceptance", why)
    if learns and value("no_history"):
        refuse("learn", "no-history", "--no-history saves nothing, and learning saves something")
    if value("keep_prefix") and value("no_history") and is_given(options, "keep-prefix"):
        why = "--no-history saves nothing, and --keep-prefix saves the KV cache"
        refuse("keep-prefix", "no-history", why)
    if learns and has_no_model():
        refuse("learn", "drafter", "only a drafting head learns, and this drafter is not one")
    if value("both_modes") and value("deterministic") is False:
        refuse("both-modes", "no-deterministic", "--both-modes measures deterministic mode too")
    if value("schedule") not in (None, "auto") and is_given(options, "schedule") and has_no_model():
        why = "a schedule is for a drafter model, and this drafter is not one"
        refuse("schedule", "drafter", why, "name a model with --drafter, or leave out --schedule")
    has_length = value("draft_length") not in (None, "auto", "0", 0) and is_given(options, "draft-length")
    if has_length and value("drafter") == "none":
        refuse("draft-length", "drafter", "without a drafter nothing is drafted")
    for name in _MEASURING if value("report") is not None else ():
        if is_given(options, name):
            why = "--report measures nothing and shows an earlier run"
            refuse("report", name, why, f"leave out --{name}, or --report to measure")


def remarks(options: Options) -> Iterator[str]:
    """Lines on pairs of options of which one means less than it does alone."""
    if getattr(options, "deterministic", None) and options.acceptance == "rejection":
        yield (
            "with --acceptance rejection, --deterministic repeats sampled text only for the same seed, drafter "
            "and draft length; for the same text with any drafter leave out --acceptance rejection"
        )


def _attribute(options: Options, name: str) -> str:
    """The attribute of an option; of a switch with two flags that of the one without "no-"."""
    own = attribute_name(name)
    return own if hasattr(options, own) else attribute_name(name.removeprefix("no-"))


def _shown(options: Options, name: str, origins: Mapping[str, str]) -> str:
    """An option as a user types it, with its value, and with its origin where it was configured."""
    value = getattr(options, _attribute(options, name))
    plain = name if name in origins else name.removeprefix("no-")
    flag = f"--{name}" if isinstance(value, bool | list) or name == "report" else f"--{name} {value}"
    if plain in origins and not is_given(options, plain):
        return f"{flag} (set in {origins[plain]})"
    return flag
