"""The command that says who is to run where, in which schedule, how fast that will be, and what was refused."""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgespec.arguments import add_option
from edgespec.errors import UsageError
from edgespec.talk import say_stage

if TYPE_CHECKING:
    from edgespec.drafter_names import DrafterNames
    from edgespec.planner import Layout, Option
    from edgespec.planning import Planned

_SHOWN_CHANCES = 4
_SHOWN_WIDTHS = (1, 2, 4, 8, 16, 32)


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model, as for chat")
    parser.add_argument(
        "--drafter", default="auto", metavar="D", help="auto, none, self or a model; a+b weighs both"
    )
    add_option(parser, "device")
    add_option(parser, "drafter-device")
    add_option(parser, "threads", "threads for both (default: all cores)")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure all of it anew, and target and drafter on cores of their own",
    )
    add_option(parser, "memory", "plan for no more than this in all, such as 2G or 512M")
    add_option(parser, "offline")
    parser.add_argument("--json", action="store_true", help="print one document")
    parser.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    from edgespec.drafter_names import parse
    from edgespec.headroom import parse_bytes
    from edgespec.home import ModelHome, default_home
    from edgespec.loading import expect_distinct, expect_threads, find_models, model_drafting
    from edgespec.planning import plan_for
    from edgespec.setting import Setting

    expect_threads(options.threads)
    limit = None if options.memory is None else parse_bytes(options.memory)
    setting = Setting.named(options.device, options.drafter_device, options.threads)
    models = ModelHome(default_home(), options.offline, say_stage)
    target, names = find_models(models, options.model, parse(options.drafter))
    _expect_no_cascade(names)
    drafters = [model_drafting(models, target, each.models[0]) for each in names.cascades]
    expect_distinct([drafter.manifest.name for drafter in drafters])
    planned = plan_for(
        target,
        drafters,
        names.simple,
        setting,
        measures_anew=options.measure,
        memory_limit=limit,
        report=say_stage,
    )
    document = document_of(planned, target.manifest.name, [drafter.manifest.name for drafter in drafters])
    print(json.dumps(document) if options.json else in_words(document))
    return 0


def _expect_no_cascade(names: "DrafterNames") -> None:
    """What its drafts take hangs on how many of its inner ones are kept, which nothing measured here foretells."""
    for models, text in names.cascades:
        if len(models) > 1 or text is not None:
            parts = (*models, *([text] if text else []))
            raise UsageError(
                f"'{','.join(parts)}' is a cascade, and a plan weighs what drafts for the target itself; plan "
                f"'{'+'.join(parts)}', or run the cascade on your prompts with edgespec bench"
            )


def document_of(planned: "Planned", model: str, drafters: Sequence[str]) -> dict[str, Any]:
    """The plan as one JSON document: what is to be done, what was refused and why, and what it rests on."""
    from edgespec.planner import chances_of, is_counted

    plan, past = planned.plan, planned.experience.chances
    return {
        "model": model,
        **_described(plan.chosen),
        "drafters": list(plan.drafters),
        "plain_tokens_per_second": plan.plain_tokens_per_second,
        "refused": [_described(option) for option in plan.refused],
        "chances": {
            name: {"kept_by_position": chances_of(past, name).kept, "is_counted": is_counted(past, name)}
            for name in drafters
        },
        "measured": [_measured(layout) for layout in planned.layouts],
    }


def _described(option: "Option") -> dict[str, Any]:
    place = option.drafter_place
    return {
        "schedule": option.schedule,
        "target_device": option.target.device,
        "target_threads": option.target.num_threads,
        "drafter": option.drafter,
        "drafter_device": place.device if place else None,
        "drafter_threads": place.num_threads if place else None,
        "draft_length": option.draft_length,
        "wait": option.wait,
        "context_length": option.context_length,
        "tokens_per_second": option.tokens_per_second,
        "reason": option.reason,
    }


def _measured(layout: "Layout") -> dict[str, Any]:
    """What the placement was judged by, in seconds."""
    from edgespec.profile import beside
    from edgespec.profile import document_of as profile_document

    stated, shown = profile_document(layout.profile), []
    if layout.drafter is not None and layout.drafter_place is not None:
        shown = [beside(layout.drafter, layout.drafter_place)]
    stated["drafters"] = {name: stated["drafters"][name] for name in shown}
    return {
        "target_device": layout.target.device,
        "target_threads": layout.target.num_threads,
        **stated,
    }


def in_words(document: Mapping[str, Any]) -> str:
    lines = [
        f"{document['model']}: {_done(document)}",
        f"expected: {document['tokens_per_second']:.1f} tokens/s, {document['reason']}",
        f"drafters in order: {', '.join(document['drafters']) or 'none'}; a context of up to "
        f"{document['context_length']} tokens fits",
    ]
    for name, chances in document["chances"].items():
        shares = ", ".join(f"{chance:.0%}" for chance in chances["kept_by_position"][:_SHOWN_CHANCES])
        rests = "counted" if chances["is_counted"] else "assumed: it has drafted nothing here yet"
        lines.append(f"{name}: {shares}, … of its tokens are kept where those before them were ({rests})")
    lines.append("measured:")
    lines += [f"  {line}" for layout in document["measured"] for line in _figures(layout)]
    if document["refused"]:
        lines.append("refused:")
        lines += _table([_row(option) for option in document["refused"]])
    return "\n".join(lines)


def _done(option: Mapping[str, Any]) -> str:
    """What is done, in a line."""
    target = _place(option["target_device"], option["target_threads"])
    if option["drafter"] is None:
        return f"plain decoding on {target}"
    drafter = _place(option["drafter_device"], option["drafter_threads"])
    waits = f", {option['wait']} waited for" if option["schedule"] == "pipelined" else ""
    return (
        f"{option['schedule']} on {target} with {option['drafter']} on {drafter}, up to {option['draft_length']} "
        f"token{'s' * (option['draft_length'] != 1)} a draft{waits}"
    )


def _row(option: Mapping[str, Any]) -> list[str]:
    drafts = option["drafter"] is not None
    return [
        f"{option['tokens_per_second']:.1f} tokens/s",
        option["schedule"],
        _place(option["target_device"], option["target_threads"]),
        f"+ {option['drafter']} on {_place(option['drafter_device'], option['drafter_threads'])}"
        if drafts
        else "",
        option["reason"],
    ]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _place(device: str, num_threads: int) -> str:
    return f"{device} ({num_threads} thread{'s' * (num_threads != 1)})"


def _figures(layout: Mapping[str, Any]) -> list[str]:
    place = _place(layout["target_device"], layout["target_threads"])
    lines = []
    for past, taken in layout["passes_s"].items():
        shown = ", ".join(f"{width}: {1e3 * taken[width]:.1f}" for width in _SHOWN_WIDTHS if width in taken)
        lines.append(f"target on {place}, ms a pass by its tokens, {past} before: {shown}")
    lines.append(f"target on {place}, reading a prompt: {1 / layout['prefill_s']:.0f} tokens/s")
    for name, drafter in layout["drafters"].items():
        verify, draft = drafter["slowed"]
        lines.append(
            f"{name}: {1e3 * drafter['step_s']:.1f} ms a drafted token; beside each other passes take "
            f"{verify:.2f} and drafts {draft:.2f} times as long"
        )
    return lines
