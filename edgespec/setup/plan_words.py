"""A plan as one JSON document, and that as a table for a person. Pure.

docs/planning.md says what the document's keys mean, and scripts rely on them.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from edgespec.setup.drafter_ranking import PossibleDrafter, drafter_document, short_rows
from edgespec.setup.measured_placements import Measurements
from edgespec.setup.planner import Layout, Plan, PlannedOption, draft_rates, is_counted
from edgespec.setup.profile import Place, drafter_key
from edgespec.system.printable import printable
from edgespec.system.units import format_bytes, format_count, format_speed

Document = Mapping[str, Any]

_MODEL_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|\S)+""")  # a word of a command, quoted as any shell wants it
_FORESEEN = "foreseen"  # the document's word for what was estimated
_SHOWN_CHANCES = 4
_SHOWN_WIDTHS = (1, 2, 4, 8, 16, 32)
_WIDTH = 79  # of a terminal of 80 columns, some of which break a line in the last
_ESTIMATED = "(~ is estimated from the model's size and a short probe of the device; it was not measured)"
_HOW_TO_MEASURE = "  to have it measured, prepare the model first and plan again:"
_RANKED = "  (~ is estimated, ? unknown) what each needs, and the commands for it:"
_TO_RUN = "to run it"
_NOT_COUNTED = " (drafts from the text come on top, where they save time)"


def plan_in_words(document: Document) -> str:
    """The document of a plan as lines for a person."""
    measured = document["measured"]
    lines = [*_wrap(_what(document), "", "  "), *_labelled(_summary(document))]
    if document["refused"]:
        lines += ["", "refused, and why", *_listing(_refused(document["refused"]))]
        lines += _estimates(document)
    if document["ranked_drafters"]:
        lines += ["", "what could draft for it, with the expected gain"]
        lines += [*_listing(short_rows(document["ranked_drafters"])), _RANKED]
        lines.append(f"  edgespec pair check {_model_word(document)}")
    lines += ["", "measured here", *_table(_passes(measured))]
    readings = (
        f"reading a prompt on {place}: {format_speed(1 / layout['prefill_s'], 0)} tokens/s"
        for place, layout in _by_place(measured).items()
    )
    for line in (*readings, *_drafts(measured), *_kept(document["chances"])):
        lines += _wrap(line, "  ", "    ")
    return "\n".join(map(printable, lines))  # names come from files of others


def _what(document: Document) -> str:
    model, schedule, drafter = document["model"], document["schedule"], document["drafter"]
    if drafter is None:
        return f"{model}: plain decoding" + (" and what the text drafts" if document["drafters"] else "")
    length, wait = (format_count(document[name], "token") for name in ("draft_length", "wait"))
    waits = f", after a miss {wait} waited for" if schedule != "serial" else ""
    return f"{model}: {schedule} with {drafter}, up to {length} a draft{waits}"


def _summary(document: Document) -> Iterator[tuple[str, str]]:
    needed = format_bytes(document["memory_bytes"], decimals=2)
    from_text = [name for name in document["drafters"] if name != document["drafter"]]
    yield "where", _where(document)
    yield "expected", f"{format_speed(document['tokens_per_second'])} tokens/s: {document['reason']}"
    yield "drafters", ", ".join(document["drafters"]) + _NOT_COUNTED * bool(from_text) or "none"
    yield "context", f"{document['context_length']} tokens, for which {needed} are needed"
    for line in document["downgrades"]:
        yield "for lack of memory", line
    yield _TO_RUN, document["command"]


def _refused(options: Sequence[Document]) -> Iterator[tuple[str, ...]]:
    yield "tokens/s", "schedule", "where", "drafter", ""
    for option in sorted(options, key=lambda option: not option["context_length"]):
        about = "~" if option["basis"] == _FORESEEN else ""
        rate = f"{about}{format_speed(option['tokens_per_second'])}" if option["context_length"] else "-"
        yield f"{rate:>8}", option["schedule"], _where(option), option["drafter"] or "", option["reason"]


def _estimates(document: Document) -> Iterator[str]:
    """Explain the marks of the table, and how to have options measured that could run."""
    estimated = [option for option in document["refused"] if option["basis"] == _FORESEEN]
    if estimated:
        yield from _wrap(_ESTIMATED, "  ", "  ")
    able = [option for option in estimated if option["context_length"]]
    for device in dict.fromkeys(option["target_device"] for option in able):
        yield _HOW_TO_MEASURE
        yield f"  edgespec models pull {_model_word(document)} --device {device}"


def _model_word(document: Document) -> str:
    """The model as the command names it."""
    word: str = _MODEL_WORD.findall(document["command"])[2]
    return word


def _passes(layouts: Sequence[Document]) -> Iterator[tuple[str, ...]]:
    yield ("ms a pass over so many tokens", *(f"{width:>6}" for width in _SHOWN_WIDTHS))
    for place, layout in _by_place(layouts).items():
        for held, taken_s in layout["passes_s"].items():
            cells = (f"{1e3 * taken_s[width]:6.1f}" if width in taken_s else "" for width in _SHOWN_WIDTHS)
            yield (f"{place}, after {held}", *cells)


def _drafts(layouts: Sequence[Document]) -> Iterator[str]:
    for layout in layouts:
        for name, drafter in layout["drafters"].items():
            verify, draft = drafter["slowed"]
            place = _place(layout, "target")
            yield (
                f"{name}: {1e3 * drafter['step_s']:.1f} ms a token; while the target runs too ({place}), "
                f"{draft:.2f} times that, and passes {verify:.2f} times"
            )


def _kept(chances: Mapping[str, Document]) -> Iterator[str]:
    for name, known in chances.items():
        shares = ", ".join(f"{chance:.0%}" for chance in known["kept_by_position"][:_SHOWN_CHANCES])
        rests = "counted here" if known["is_counted"] else "assumed: it has drafted nothing here yet"
        yield f"{name}: its 1st, 2nd, … token is accepted, if those before it were, in {shares}, … ({rests})"


def _by_place(layouts: Sequence[Document]) -> dict[str, Document]:
    found: dict[str, Document] = {}
    for each in layouts:
        found.setdefault(_place(each, "target"), each)  # threads are no matter of a device other than the CPU
    return found


def _where(option: Document) -> str:
    target = _place(option, "target")
    if option["drafter"] is None:
        return target
    drafter = _place(option, "drafter")
    if drafter != target:
        return f"{target}; drafter {drafter}"
    return f"{target} each" if _is_processor(option["target_device"]) else f"{target} for both"


def _table(rows: Iterator[tuple[str, ...]]) -> list[str]:
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("".join(f"  {cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells)
    return [line.rstrip() for line in lines]


def _listing(rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    """A table with a sentence about each row below it, which is the row's last cell."""
    cells = list(rows)
    indent = " " * (max(len(row[0]) for row in cells) + 4)  # below the second column
    for row, line in zip(cells, _table(row[:-1] for row in cells), strict=True):
        yield line
        yield from _wrap(row[-1], indent, indent)


def _labelled(rows: Iterator[tuple[str, str]]) -> Iterator[str]:
    """A table of two columns, the second of words; a command is left whole, to be copied."""
    cells = list(rows)
    width = max(len(label) for label, _ in cells)
    for label, text in cells:
        begin = f"  {label:{width}}  "
        yield from [begin + text] if label == _TO_RUN else _wrap(text, begin, " " * len(begin))


def _wrap(text: str, first: str, other: str) -> list[str]:
    """Lines that fit a terminal, the first and each other one with its beginning."""
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=other, break_long_words=False, break_on_hyphens=False
    )


def _place(document: Document, model: str) -> str:
    """A device, and the threads of a processor; a GPU has none that a user could set."""
    device: str = document[f"{model}_device"]
    return f"{device}, {format_count(document[f'{model}_threads'], 'thread')}" if _is_processor(device) else device


def _is_processor(device: str) -> bool:
    return device.rpartition(":")[2] == "cpu"


def document_of(
    plan: Plan,
    measured: Measurements,
    *,
    model: str,
    drafters: Sequence[str],
    command: str,
    ranked_drafters: Sequence[PossibleDrafter] = (),
) -> dict[str, Any]:
    """The chosen option, the refused ones with the reasons, and the measurements.

    drafters: Names of the models that were weighed. ranked_drafters: All that could draft for the target.
    """
    return {
        "model": model,
        **_option(plan.chosen),
        "drafters": list(plan.drafters),
        "downgrades": list(plan.downgrades),
        "command": command,
        "plain_tokens_per_second": plan.plain_tokens_per_second,
        "options": [_option(option) for option in plan.options],
        "refused": [_option(option) for option in plan.refused],
        "chances": {
            name: {
                "kept_by_position": draft_rates(measured.past, name).accepted,
                "is_counted": is_counted(measured.past, name),
            }
            for name in drafters
        },
        "measured": [_layout(layout) for layout in measured.layouts],
        "took": measured.took._asdict(),
        "ranked_drafters": [drafter_document(each) for each in ranked_drafters],
    }


def _option(option: PlannedOption) -> dict[str, Any]:
    return {
        "schedule": option.schedule,
        **_place_fields("target", option.target),
        "drafter": option.drafter,
        **_place_fields("drafter", option.drafter_place),
        "draft_length": option.draft_length,
        "wait": option.wait,
        "context_length": option.context_length,
        "memory_bytes": option.memory_bytes,
        "tokens_per_second": option.tokens_per_second,
        "reason": option.reason,
        "basis": "measured" if option.is_measured else "foreseen",
    }


def _layout(layout: Layout) -> dict[str, Any]:
    stated, shown = asdict(layout.profile), []
    if layout.drafter is not None and layout.drafter_place is not None:
        shown = [drafter_key(layout.drafter, layout.drafter_place)]
    return {
        **_place_fields("target", layout.target),
        **stated,
        "drafters": {name: stated["drafters"][name] for name in shown},
    }


def _place_fields(model: str, place: Place | None) -> dict[str, Any]:
    return {f"{model}_device": place and place.device, f"{model}_threads": place and place.num_threads}
