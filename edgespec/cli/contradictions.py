"""Options of one command that contradict each other, in one table, and pairs of which a line says what they mean.

Looks at options alone and opens no model: what only the model or its device shows is refused where it is loaded.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from edgespec import UsageError
from edgespec.cli.arguments import attribute_name, is_given
from edgespec.config.drafter_names import parse

Options = argparse.Namespace
Condition = Callable[[Options], bool]
# What a run of bench depends on, which an earlier run has settled. Those that have a default come with it.
_MEASURING = (
    *("resume", "prompts", "per-category", "max-tokens", "rounds"),
    *("temperature", "learned", "both-modes", "compare"),
)


def _reports_and_has(name: str) -> Condition:
    return lambda options: options.report is not None and is_given(options, name)


class _Contradiction(NamedTuple):
    """Two options that cannot go together where a condition holds, why, and what to do."""

    first: str
    second: str
    holds: Condition
    reason: str


_TABLE = (
    _Contradiction(
        "exact",
        "no-deterministic",
        lambda options: options.exact and options.deterministic is False,
        "--exact keeps the text of plain decoding, and --no-deterministic lets it change at near-ties; leave out "
        "--no-deterministic for one text, or --exact for speed",
    ),
    _Contradiction(
        "exact",
        "temperature",
        lambda options: options.exact and options.temperature != 0,
        "--exact covers greedy text only; leave out one of them",
    ),
    _Contradiction(
        "deterministic",
        "acceptance",
        lambda options: (
            options.deterministic is True and options.acceptance == "rejection" and options.draft_length == "auto"
        ),
        "what rejection keeps of sampled text depends on the drafts; leave out one of them, or add --draft-length "
        "4, with which a seed gives the same text again for the same drafter",
    ),
    _Contradiction(
        "learn",
        "acceptance",
        lambda options: options.learn is not None and options.acceptance == "rejection",
        "learning changes what a head drafts, and what rejection keeps of a sample depends on drafts; leave "
        "out one of them",
    ),
    _Contradiction(
        "learn",
        "no-history",
        lambda options: options.learn is not None and options.no_history,
        "--no-history saves nothing of what is said, and learning does; leave out one of them",
    ),
    _Contradiction(
        "keep-prefix",
        "no-history",
        lambda options: options.keep_prefix and options.no_history and is_given(options, "keep-prefix"),
        "--no-history saves nothing, and --keep-prefix keeps what the model has read; leave out one of them",
    ),
    _Contradiction(
        "learn",
        "drafter",
        lambda options: options.learn is not None and _has_no_model(options),
        "a drafting head learns, and this drafter is none; leave out one of them",
    ),
    _Contradiction(
        "both-modes",
        "no-deterministic",
        lambda options: options.both_modes and options.deterministic is False,
        "--both-modes measures deterministic mode too; leave out one of them",
    ),
    _Contradiction(
        "schedule",
        "drafter",
        lambda options: options.schedule != "auto" and is_given(options, "schedule") and _has_no_model(options),
        "a schedule says when a drafter model works, and this drafter is none; name a model with --drafter, or "
        "leave out --schedule",
    ),
    _Contradiction(
        "draft-length",
        "drafter",
        lambda options: (
            options.drafter == "none"
            and options.draft_length not in ("auto", "0", 0)
            and is_given(options, "draft-length")
        ),
        "without a drafter nothing is drafted; leave out one of them",
    ),
    *(
        _Contradiction(
            "report",
            name,
            _reports_and_has(name),
            f"--report measures nothing and shows an earlier run; leave out --{name}, or --report to measure",
        )
        for name in _MEASURING
    ),
)


def require_consistent(options: Options, origins: Mapping[str, str]) -> None:
    """Refuse a command line whose options contradict each other.

    origins: Where an option was set that the command line does not have, by its name.

    Raises UsageError: Two options contradict each other.
    """
    for each in _TABLE:
        if _has(options, each.first) and _has(options, each.second) and each.holds(options):
            first, second = (_shown(options, name, origins) for name in (each.first, each.second))
            raise UsageError(f"{first} and {second} contradict each other: {each.reason}")


def remarks(options: Options) -> Iterator[str]:
    """Lines on pairs of options of which one means less than it does alone."""
    if getattr(options, "deterministic", None) and options.acceptance == "rejection":
        yield (
            "with --acceptance rejection, --deterministic repeats sampled text for the same seed, drafter and "
            "draft length alone; for one text with any drafter leave out --acceptance rejection"
        )


def _has(options: Options, name: str) -> bool:
    return hasattr(options, _attribute(options, name))


def _attribute(options: Options, name: str) -> str:
    """The attribute of an option; of a switch with two flags that of the one without "no-"."""
    own = attribute_name(name)
    return own if hasattr(options, own) else attribute_name(name.removeprefix("no-"))


def _has_no_model(options: Options) -> bool:
    return not parse(options.drafter).may_have_model


def _shown(options: Options, name: str, origins: Mapping[str, str]) -> str:
    """An option as a user types it, with its value, and with its origin where it was configured."""
    value = getattr(options, _attribute(options, name))
    plain = name if name in origins else name.removeprefix("no-")
    flag = f"--{name}" if isinstance(value, bool | list) or name == "report" else f"--{name} {value}"
    if plain in origins and not is_given(options, plain):
        return f"{flag} (set in {origins[plain]})"
    return flag
