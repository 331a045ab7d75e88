"""What an export would take: time, memory, disk and downloads, without writing anything."""

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.cli.arguments import model_home, print_result
from edgespec.cli.export_parts import ExportPart, export_parts, pair_half, trimming
from edgespec.config.byte_size import format_bytes
from edgespec.errors import EdgeSpecError
from edgespec.system.console import warn

if TYPE_CHECKING:
    from edgespec.export.plan import ExportCost


def print_plan(options: argparse.Namespace, *, is_checked: bool) -> int:
    """Print what an export would take; the exit code says whether it is possible."""
    from edgespec.export.output import require_writable

    home = model_home(offline=options.offline)
    parts = export_parts(options)
    sizes = [home.sizes(part.source, part.revision) for part in parts]
    forms = [part.form for part in parts]
    plans = (
        _plan_halves(options, parts, is_checked=is_checked)
        if options.drafter and sizes == [None] * 2
        else [
            _plan_alone(options, part, size, is_checked=is_checked)
            for part, size in zip(parts, sizes, strict=True)
        ]
    )
    code = 0
    try:
        require_writable(options.output or options.add_to / "new", sum(plan.write_bytes for plan in plans))
    except EdgeSpecError as error:
        plans = [replace(plan, problem=str(error)) for plan in plans]
        code = error.exit_code
        warn(f"this export is not possible: {error}")
    lines = [_describe_plan(plan, form, is_checked) for plan, form in zip(plans, forms, strict=True)]
    document = [{**asdict(plan), "form": form} for plan, form in zip(plans, forms, strict=True)]
    print_result(options, document, *(lines or ["nothing to add: the pair has these forms"]))
    return code


def _plan_halves(options: argparse.Namespace, parts: list[ExportPart], *, is_checked: bool) -> list["ExportCost"]:
    """The plans of both halves of a pair, whose sources are on this machine."""
    from edgespec.engine.pair_export import plan_pair

    home = model_home(offline=options.offline)
    target, drafter = (pair_half(options, part, home) for part in parts)
    return [*plan_pair(target, drafter, is_checked=is_checked).plans]


def _plan_alone(
    options: argparse.Namespace, part: ExportPart, sizes: tuple[int, int] | None, *, is_checked: bool
) -> "ExportCost":
    """The plan of a model, or of half of a pair where the other one is not at hand.

    sizes: Bytes of the weights of a source on the hub, and of its files still to fetch.
    """
    from edgespec.export.options import ExportOptions
    from edgespec.export.plan import estimate, plan_model
    from edgespec.export.sources import read_source

    if sizes is not None:
        return estimate(
            part.source,
            part.precision,
            sizes[0] // 2,  # weights: on the hub, one usually takes two bytes
            sizes[0],
            is_blocks="gguf" in part.source.lower() or ":" in part.source,
            fetch_bytes=0 if part.is_mtp else sizes[1],
            form=part.form,
            is_checked=is_checked,
        )
    home = model_home(offline=options.offline)
    if options.drafter:
        half = pair_half(options, part, home)
        if half.is_head and home.sizes(options.source, options.revision) is None:
            return half.plan_head(read_source(Path(options.source))).cost
        if half.is_head:  # whose target is still on the hub
            size = half.read_head().weights_bytes
            return estimate(
                part.source, half.precision or "int8", size // 2, size, is_blocks=False, form=part.form
            )
        return half.plan_model(is_checked=is_checked).cost
    wanted = ExportOptions(
        precision=part.precision,
        form=part.form,
        block_size=options.block_size,
        trimming=trimming(options),
        hidden_layers=tuple(sorted(options.hidden_states or ())),
        context_length=options.context_length,
    )
    return plan_model(Path(part.source), wanted, is_checked=is_checked).cost


def _describe_plan(plan: "ExportCost", form: str, is_checked: bool) -> str:
    reason = f" ({plan.reason})" if plan.reason else ""
    most = "at most " if plan.fetch_bytes else ""  # of a source that is still on the hub
    return (
        f"{plan.source}, {form} form, {plan.precision}{reason}: download {format_bytes(plan.fetch_bytes)}, write "
        f"{most}{format_bytes(plan.write_bytes)}, peak memory about {format_bytes(plan.peak_bytes)}, about "
        f"{plan.seconds:.0f} s without the download{', check included' if is_checked else ''}"
    )
