"""The command that makes models: export. What is heavy is imported where it is used."""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cli.arguments import (
    Switch,
    add_count,
    add_file,
    add_options,
    model_home,
    print_result,
    range_measurement,
)
from edgespec.cli.export_parts import (
    DRAFTER,
    ExportPart,
    drafting_options,
    export_parts,
    named_devices,
    require_compatible,
)
from edgespec.cli.pair import format_pair
from edgespec.config.byte_size import format_bytes
from edgespec.errors import DeviceUnavailable, EdgeSpecError
from edgespec.system.command_line import quote
from edgespec.system.console import info, warn

if TYPE_CHECKING:
    from edgespec.evaluation.pair_export import PairHalf
    from edgespec.export.convert import MeasureRanges, OpenDecoder
    from edgespec.export.plan import Plan
    from edgespec.models.home import ModelHome

_UNKNOWN = "the pair is exported; whether its drafter pays is unknown until it is measured on its devices"
_PRECISIONS = ("auto", "source", "fp32", "fp16", "int8", "int4", "w8a16")
_FORMS = ("cpu", "gpu", "npu")


def add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a .gguf file, a folder with safetensors, or an id on the Hugging Face hub: org/name, "
        "org/name:Q4_K_M, org/name:FILE.gguf",
    )
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--output", metavar="DIR", type=Path, help="the model folder to create")
    place.add_argument(
        "--add-to",
        metavar="PAIR",
        type=Path,
        help="a pair folder, to which to add the forms for the named devices",
    )
    parser.add_argument(
        "--precision",
        choices=_PRECISIONS,
        help="of the weights (default: source, that of SOURCE; fp16 for an NPU; fp32 for a GPU here without fp16)",
    )
    add_count(
        parser,
        "--context-length",
        "the longest text in tokens (default: the model's own; with longrope that of its first training)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what the export would take, and exit")
    parser.add_argument(
        "--check",
        action=Switch,
        help="compare the result with its source (default: if ONNX Runtime is installed)",
    )
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of SOURCE (default: main)")
    add_options(parser)
    pair = parser.add_argument_group("pair", "Export a target and its drafter into one folder.")
    pair.add_argument(
        "--drafter",
        metavar="SOURCE",
        help="export this smaller model or drafting head too, as the drafter of SOURCE; mtp: the layers for "
        "multi-token prediction that SOURCE itself has",
    )
    pair.add_argument(
        "--drafter-precision",
        choices=_PRECISIONS,
        metavar="PRECISION",
        help="as for --precision (default: source; of a drafting head int8, where its file has floats)",
    )
    pair.add_argument(
        "--drafter-form", choices=_FORMS, help="as for --form (default: what --drafter-device needs)"
    )
    own = parser.add_argument_group("drafter from the model's own layers")
    layers = own.add_mutually_exclusive_group()
    _add_layers(layers, "--keep-layers", "write a drafter of these layers too, such as 0-5,9")
    _add_layers(layers, "--skip-layers", "write a drafter without these layers too")
    add_count(own, "--vocab-subset", "trim the drafter's head to the N most frequent tokens")
    add_file(own, "--vocab-corpus", "the text in which tokens are counted")
    _add_layers(own, "--hidden-states", "let the model output the hidden states of these layers")
    advanced = parser.add_argument_group("advanced")
    advanced.add_argument(
        "--form",
        choices=_FORMS,
        help="gpu: fp16 activations and cache; npu: fixed shapes and basic operators (default: what --device "
        "needs)",
    )
    choices: dict[str, tuple[list[Any], str]] = {
        "block-size": ([32, 64, 128], "weights that share a scale, in int4 and int8"),
        "exporter": (["native", "optimum"], "optimum: export other architectures through PyTorch, in fp32"),
    }
    for name, (known, what) in choices.items():
        note = f"{what} (default: {known[0]})"
        advanced.add_argument(f"--{name}", type=type(known[0]), default=known[0], choices=known, help=note)
    add_file(advanced, "--calibration", "for w8a16: prompts (JSON Lines) that show the range of activations")
    parser.set_defaults(run=_export)


def _add_layers(parser: argparse._ActionsContainer, flag: str, help: str) -> None:
    def parse(text: str) -> frozenset[int]:
        from edgespec.export.drafting import parse_layers

        return parse_layers(text, flag)

    parser.add_argument(flag, metavar="L", type=parse, help=help)


def _export(options: argparse.Namespace) -> int:
    from edgespec.export.output import require_absent

    require_compatible(options)
    if options.output is not None:
        require_absent(options.output)  # before anything is downloaded
    if options.dry_run:
        return _plan(options)
    if options.add_to is not None:
        _add_forms(options)
    else:
        (_export_model if options.drafter is None else _export_pair)(options)
    return 0


def _decoder_for_check(options: argparse.Namespace) -> "OpenDecoder | None":
    """The function that loads an export to check it; None where no check is wanted, or none is possible."""
    from edgespec.loading.open_model import open_decoder, require_runtime

    is_trimmed = options.vocab_subset and not (options.keep_layers or options.skip_layers)
    if options.check is False or (options.check is None and is_trimmed):
        return None
    try:
        require_runtime()
    except DeviceUnavailable as error:
        if options.check:
            raise
        warn(f"the export will not be checked: {error}")
        return None
    return open_decoder


def _range_measurement(options: argparse.Namespace) -> "MeasureRanges | None":
    """The function that runs a graph over prompts, which only w8a16 needs."""
    if "w8a16" not in (options.precision, options.drafter_precision):
        return None
    return range_measurement(options.calibration)


def _plan(options: argparse.Namespace) -> int:
    from edgespec.export.output import require_writable

    is_checked = _decoder_for_check(options) is not None
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


def _plan_halves(options: argparse.Namespace, parts: list[ExportPart], *, is_checked: bool) -> list["Plan"]:
    """The plans of both halves of a pair, whose sources are on this machine."""
    from edgespec.evaluation.pair_export import plan_pair

    home = model_home(offline=options.offline)
    target, drafter = (_half(options, part, home) for part in parts)
    return [*plan_pair(target, drafter, is_checked=is_checked).plans]


def _plan_alone(
    options: argparse.Namespace, part: ExportPart, sizes: tuple[int, int] | None, *, is_checked: bool
) -> "Plan":
    """The plan of a model, or of half of a pair where the other one is not at hand.

    sizes: Bytes of the weights of a source on the hub, and of its files still to fetch.
    """
    from edgespec.export.convert import plan_source
    from edgespec.export.plan import estimate
    from edgespec.export.sources import read_source

    if sizes is not None:
        return estimate(
            part.source,
            part.precision,
            sizes[0] // 2,  # weights: on the hub, one usually takes two bytes
            sizes[0],
            is_blocks="gguf" in part.source.lower() or ":" in part.source,
            fetch_bytes=sizes[1],
            form=part.form,
            is_checked=is_checked,
        )
    home = model_home(offline=options.offline)
    if options.drafter:
        half = _half(options, part, home)
        if half.is_head:
            return half.plan_head(read_source(home.locate(options.source, options.revision).path)).cost
        return half.plan_model(is_checked=is_checked)[1]
    return plan_source(
        Path(part.source),
        part.precision,
        part.form,
        drafting_options(options),
        tuple(sorted(options.hidden_states or ())),
        block_size=options.block_size,
        context_length=options.context_length,
        is_checked=is_checked,
    )[1]


def _describe_plan(plan: "Plan", form: str, is_checked: bool) -> str:
    reason = f" ({plan.reason})" if plan.reason else ""
    most = "at most " if plan.fetch_bytes else ""  # of a source that is still on the hub
    return (
        f"{plan.source}, {form} form, {plan.precision}{reason}: download {format_bytes(plan.fetch_bytes)}, write "
        f"{most}{format_bytes(plan.write_bytes)}, peak memory about {format_bytes(plan.peak_bytes)}, about "
        f"{plan.seconds:.0f} s without the download{', check included' if is_checked else ''}"
    )


def _half(options: argparse.Namespace, part: ExportPart, home: "ModelHome") -> "PairHalf":
    from edgespec.evaluation.pair_export import PairHalf
    from edgespec.export.drafting import Drafting

    return PairHalf(
        part=part.name,
        source=home.locate(part.source, part.revision),
        form=part.form,
        device=part.device,
        precision=part.precision if part.is_named else None,
        is_mtp=part.is_mtp,
        trimming=drafting_options(options) if part.name == DRAFTER else Drafting(),
    )


def _export_pair(options: argparse.Namespace) -> None:
    from edgespec.evaluation.pair_export import export_pair

    home = model_home(offline=options.offline)
    target, drafter = (_half(options, part, home) for part in export_parts(options))
    check = export_pair(
        target,
        drafter,
        options.output,
        open_decoder=_decoder_for_check(options),
        measure_ranges=_range_measurement(options),
        report=info,
    )
    print_result(options, check and asdict(check), *([format_pair(check)] if check else [_UNKNOWN]))
    info(f"use it with: edgespec chat {quote(options.output)}{named_devices(options)}")


def _add_forms(options: argparse.Namespace) -> None:
    from edgespec.evaluation.pair_export import add_forms

    home = model_home(offline=options.offline)
    parts = export_parts(options)
    added = add_forms(
        options.add_to,
        home.locate(options.source, options.revision),
        [_half(options, part, home) for part in parts],
        open_decoder=_decoder_for_check(options),
        measure_ranges=_range_measurement(options),
        report=info,
    )
    lines = [f"wrote {folder}" for folder in added] or [f"{options.add_to} has these forms already"]
    print_result(options, {"added": [str(folder) for folder in added]}, *lines)
    devices = " ".join(
        f"--{'drafter-' if part.name == DRAFTER else ''}device {part.device}" for part in parts if added
    )
    if devices:
        info(f"measure its speed there with: edgespec pair check {quote(options.add_to)} {devices}")


def _export_model(options: argparse.Namespace) -> None:
    from edgespec.export.card import quality
    from edgespec.export.convert import export_model

    source = model_home(offline=options.offline).locate(options.source, options.revision)
    (part,) = export_parts(options)
    settings: dict[str, Any] = {
        "precision": part.precision,
        "repository": source.repository,
        "revision": source.revision,
        "license": source.license,
        "open_decoder": _decoder_for_check(options),
        "report": info,
    }
    if options.exporter == "optimum":
        from edgespec.export.optimum import import_model

        manifest = import_model(source.path, options.output, **settings)
    else:
        manifest = export_model(
            source.path,
            options.output,
            block_size=options.block_size,
            form=part.form,
            drafting=drafting_options(options),
            hidden_layers=tuple(sorted(options.hidden_states or ())),
            context_length=options.context_length,
            measure_ranges=_range_measurement(options),
            **settings,
        )
    if options.json:
        print(json.dumps(asdict(manifest)))
        return
    if (check := manifest.check) is not None:
        info(
            f"checked on {check.num_tokens} tokens: {check.nll:.4f} nats/token, the source has "
            f"{check.reference_nll:.4f}; divergence {check.divergence:.4f}; the most likely token is that of the "
            f"source at {check.agreement:.0%} of positions"
        )
        if (warning := quality(check, manifest.form)) is not None:
            info(warning)
    info(f"wrote {options.output} ({format_bytes(manifest.weights_bytes)})")
    folder = quote(options.output)
    use = f"TARGET --drafter {folder}" if manifest.vocab_subset else folder + named_devices(options)
    info(f"use it with: edgespec chat {use}")
