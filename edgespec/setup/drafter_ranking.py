"""Drafters that a target could have, in the order in which to consider them; as JSON and as text. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from edgespec.draft.limits import MIN_GAIN_OF_PAIR
from edgespec.setup.catalog import Kind
from edgespec.system.command_line import quote
from edgespec.system.printable import printable
from edgespec.system.units import format_bytes

Basis = Literal["measured", "estimated", "unknown"]
_BASES: tuple[Basis, ...] = ("measured", "estimated", "unknown")
_KINDS: tuple[Kind, ...] = ("text", "model", "head", "self")


@dataclass(frozen=True, kw_only=True)
class PossibleDrafter:
    """A drafter, what it is expected to give here, and what it needs.

    basis: measured, on this machine with these models; estimated, from acceptance that was seen elsewhere or too
        seldom here, and costs that were measured here; or unknown.
    gain: Speed over plain decoding, 1 where no draft is expected to pay; None where it is unknown.
    num_draft: Tokens of a draft that has this gain.
    evidence: What the gain rests on, or why there is none.
    reported: What was measured with it elsewhere.
    was_run: Where edgespec has run it, as in "with SmolLM2-135M"; empty where it has not.
    download_bytes, disk_bytes, memory_bytes: What it takes beside what is here already; None where unknown.
    note: What is to be known before getting it.
    get, use: Commands, a line each; get is empty where nothing is missing.
    obstacle: Why it cannot draft here; empty where it can.
    """

    kind: Kind
    name: str
    basis: Basis = "unknown"
    gain: float | None = None
    num_draft: int | None = None
    evidence: str = ""
    reported: str = ""
    was_run: str = ""
    download_bytes: int | None = 0
    disk_bytes: int | None = 0
    memory_bytes: int | None = None
    note: str = ""
    get: str = ""
    use: str = ""
    obstacle: str = ""

    def __post_init__(self) -> None:
        assert (self.gain is None) == (self.basis == "unknown"), f"{self.name}: a gain has a basis"

    @property
    def pays(self) -> bool | None:
        """True if the gain is more than the noise of a run; None where it is unknown."""
        return None if self.gain is None else self.gain >= MIN_GAIN_OF_PAIR


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Drafters of a target on two devices, ranked.

    model: The target as commands name it. target: Its own name, where it is prepared.
    has_costs: Whether it is known what passes of the target take there.
    """

    model: str
    target: str
    device: str
    drafter_device: str
    has_costs: bool
    drafters: tuple[PossibleDrafter, ...]


def rank(drafters: Iterable[PossibleDrafter]) -> tuple[PossibleDrafter, ...]:
    """Sort drafters: measured gains, then estimated ones, each from the highest, then those of unknown gain.

    Of unknown gain, what needs the smallest download comes first; of these text, models, heads, and the target's
    own layers. What cannot draft here comes last.
    """
    return tuple(sorted(drafters, key=_sort_key))


def _sort_key(drafter: PossibleDrafter) -> tuple[bool, int, float, float, int, str]:
    download_bytes = float("inf") if drafter.download_bytes is None else drafter.download_bytes
    return (
        bool(drafter.obstacle),
        _BASES.index(drafter.basis),
        -(drafter.gain or 0.0),
        download_bytes,
        _KINDS.index(drafter.kind),
        drafter.name,
    )


Document = Mapping[str, Any]

_MARKS = (
    "Gain is the speed relative to plain decoding. ~: estimated from acceptance rates of others, or from few "
    "tokens",
    "here; ?: unknown. With --drafter auto, drafts from the text come on top of every other drafter.",
)
_NO_COSTS = (
    "How long passes of {0} take here is not known, so no gain is estimated: edgespec plan {0} measures it."
)
_VERDICTS = {True: "it pays", False: "it does not save time", None: ""}


def ranking_document(ranking: Ranking) -> dict[str, Any]:
    """A ranking as JSON values."""
    return {**asdict(ranking), "drafters": [drafter_document(each) for each in ranking.drafters]}


def drafter_document(drafter: PossibleDrafter) -> dict[str, Any]:
    """A drafter as JSON values."""
    return {**asdict(drafter), "pays": drafter.pays}


def ranking_in_words(document: Document) -> str:
    """The document of a ranking as lines for a person."""
    lines = [
        *_advice(document["drafters"]),
        "",
        f"what could draft for {document['target']}, on {document['device']}, with a drafter on "
        f"{document['drafter_device']}",
    ]
    for each in document["drafters"]:
        length = f"draft length {each['num_draft']}" if each["num_draft"] else ""
        said = [f"{each['name']} ({each['kind']})", each["basis"], length, _VERDICTS[each["pays"]]]
        lines += ["", f"{format_gain(each):>6}  {', '.join(filter(None, said))}"]
        lines += [f"        {line}" for line in _details(each)]
    lines += ["", *_MARKS, *([] if document["has_costs"] else [_NO_COSTS.format(quote(document["model"]))])]
    return "\n".join(map(printable, lines))  # names come from files of others


def _advice(drafters: Sequence[Document]) -> Iterator[str]:
    """Advice on what to do, by what is known of them."""
    best = next((each for each in drafters if each["pays"] and not each["obstacle"]), None)
    if best is None:
        yield "keep drafting from the text, as --drafter auto does: no model is known to make it faster here"
    elif best["kind"] == "text":
        yield f"keep drafting from the text, as --drafter auto does: {best['name']} is the fastest known here"
    else:
        yield f"use {best['name']}: {format_gain(best)} times the speed of plain decoding here, {best['basis']}"
        yield f"  {best['use'] or best['get']}"


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
        for number, command in enumerate(drafter[what].splitlines()):
            yield f"{'' if number else f'{what}:':<7}{command}"


def _needs(drafter: Document) -> Iterator[str]:
    unknown = []
    for what, needed in (("download", "a download of"), ("disk", "on disk"), ("memory", "of memory")):
        num_bytes = drafter[f"{what}_bytes"]
        if num_bytes is None:
            unknown.append(what)
        elif num_bytes:
            size = f"about {format_bytes(num_bytes)}"
            yield f"{needed} {size}" if what == "download" else f"{size} {needed}"
    if unknown:
        yield f"{' and '.join(unknown)} of unknown size"
