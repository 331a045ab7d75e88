"""A ranking of drafters as a JSON document, and as text for a person. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from edgespec.config.byte_size import format_bytes
from edgespec.planning.drafter_ranking import PossibleDrafter, Ranking
from edgespec.system.command_line import quote
from edgespec.system.printable import printable

Document = Mapping[str, Any]

_MARKS = (
    "Gain is the speed over plain decoding. ~ is estimated, from acceptance that was seen elsewhere or seldom",
    "here; ? is unknown. With --drafter auto, what drafts from the text comes on top of every other drafter.",
)
_NO_COSTS = "What passes of {0} take here is not known, so no gain is estimated: edgespec plan {0} measures it."
_VERDICTS = {True: "it pays", False: "it does not pay", None: ""}


def ranking_document(ranking: Ranking) -> dict[str, Any]:
    """A ranking as JSON values."""
    return {**asdict(ranking), "drafters": [drafter_document(each) for each in ranking.drafters]}


def drafter_document(drafter: PossibleDrafter) -> dict[str, Any]:
    """A drafter as JSON values."""
    return {**asdict(drafter), "pays": drafter.pays}


def ranking_in_words(document: Document) -> str:
    """The document of a ranking as lines for a person."""
    lines = [
        f"what could draft for {document['target']}, on {document['device']}, with a drafter on "
        f"{document['drafter_device']}"
    ]
    for each in document["drafters"]:
        lines += ["", f"{format_gain(each):>6}  {_heading(each)}", *(f"        {line}" for line in _details(each))]
    lines += ["", *_MARKS, *([] if document["has_costs"] else [_NO_COSTS.format(quote(document["model"]))])]
    return "\n".join(map(printable, lines))  # names come from files of others


def short_rows(drafters: Sequence[Document]) -> Iterator[tuple[str, ...]]:
    """A table of drafters, the heading first; the last cell says what a gain rests on, or why there is none."""
    yield "gain", "kind", "drafter", "download", ""
    for each in drafters:
        size = "unknown" if each["download_bytes"] is None else format_bytes(each["download_bytes"])
        download = size if each["download_bytes"] != 0 else ""
        yield f"{format_gain(each):>6}", each["kind"], each["name"], download, each["obstacle"] or each["evidence"]


def format_gain(drafter: Document) -> str:
    """Examples: 1.31, ~1.22, ?"""
    if drafter["gain"] is None:
        return "?"
    return f"{'~' if drafter['basis'] == 'estimated' else ''}{drafter['gain']:.2f}"


def _heading(drafter: Document) -> str:
    length = f"{drafter['num_draft']} tokens per draft" if drafter["num_draft"] else ""
    said = [f"{drafter['name']} ({drafter['kind']})", drafter["basis"], length, _VERDICTS[drafter["pays"]]]
    return ", ".join(filter(None, said))


def _details(drafter: Document) -> Iterator[str]:
    if drafter["obstacle"]:
        yield f"it cannot be used: {drafter['obstacle']}"
    yield drafter["evidence"]
    if drafter["reported"]:
        yield f"reported: {drafter['reported']}"
    if drafter["get"]:
        yield f"run by edgespec: {drafter['was_run'] or 'never'}"
    yield f"needs: {', '.join(_needs(drafter)) or 'nothing'}"
    if drafter["note"]:
        yield f"note:  {drafter['note']}"
    for what in ("get", "use"):
        if drafter[what]:
            yield f"{what}:   {drafter[what]}"


def _needs(drafter: Document) -> Iterator[str]:
    for what, needed in (("download", "a download of"), ("disk", "on disk"), ("memory", "of memory")):
        num_bytes = drafter[f"{what}_bytes"]
        if num_bytes is None:
            yield f"{what} of unknown size"
        elif num_bytes:
            size = f"about {format_bytes(num_bytes)}"
            yield f"{needed} {size}" if what == "download" else f"{size} {needed}"
