"""The command that makes models: export. What is heavy is imported where it is used."""

import argparse
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import edgespec
from edgespec import DeviceUnavailable, UsageError
from edgespec.cli.arguments import add_flags, add_options, model_home, print_result
from edgespec.cli.export_parts import (
    DRAFTER,
    TARGET,
    export_options,
    export_parts,
    named_devices,
    pair_half,
    print_plan,
    require_compatible,
)
from edgespec.cli.parser import CommandParser
from edgespec.system.command_line import quote
from edgespec.system.console import info, warn
from edgespec.system.tables import read_table
from edgespec.system.units import format_bytes

if TYPE_CHECKING:
    from edgespec.export.convert import MeasureRanges, OpenDecoder

_UNKNOWN = "the pair is exported; measure it on its devices to see whether its drafter saves time"


def add_export(parser: CommandParser) -> None:
    table = read_table(__file__, "export.toml")
    add_flags(parser, table["source"])
    add_flags(parser.add_mutually_exclusive_group(), table["place"])
    add_flags(parser, table["model"])
    add_options(parser)
    pair = parser.add_argument_group("pair", "Export a target and its drafter into one folder.")
    add_flags(pair, table["pair"])
    own = parser.add_argument_group("drafter from the model's own layers")
    layers = own.add_mutually_exclusive_group()
    _add_layers(layers, "--keep-layers", "write a drafter of these layers too, such as 0-5,9")
    _add_layers(layers, "--skip-layers", "write a drafter without these layers too")
    add_flags(own, table["own"])
    _add_layers(own, "--hidden-states", "let the model output the hidden states of these layers")
    add_flags(parser.add_argument_group("advanced"), table["advanced"])
    parser.show_first(*table["first"])
    parser.set_defaults(run=_export)


def _add_layers(parser: argparse._ActionsContainer, flag: str, help: str) -> None:
    def parse(text: str) -> frozenset[int]:
        from edgespec.export.options import parse_layers

        return parse_layers(text, flag)

    parser.add_argument(flag, metavar="L", type=parse, help=help)


def _export(options: argparse.Namespace) -> int:
    from edgespec.export.output import require_absent

    require_compatible(options)
    if options.name is not None:
        inventory = edgespec.Inventory(model_home())
        inventory.require_free(options.name)
        options.output = inventory.home.models / options.name
    if options.output is not None:
        require_absent(options.output)  # before anything is downloaded
    elif options.add_to is None and not options.dry_run:
        raise UsageError("no place to write the model is given; give --name NAME or --output DIR")
    if options.dry_run:
        return print_plan(options, is_checked=_decoder_for_check(options) is not None)
    if options.add_to is not None:
        _add_forms(options)
    else:
        (_export_model if options.drafter is None else _export_pair)(options)
    return 0


def _decoder_for_check(options: argparse.Namespace) -> "OpenDecoder | None":
    """The function that loads an export to check it; None where no check is wanted, or none is possible."""
    is_trimmed = options.vocab_subset and not (options.keep_layers or options.skip_layers)
    if options.check is False or (options.check is None and is_trimmed):
        return None
    try:
        edgespec.require_runtime()
    except DeviceUnavailable as error:
        if options.check:
            raise
        warn(f"the export will not be checked: {error}")
        return None
    return edgespec.open_decoder


def _range_measurement(options: argparse.Namespace) -> "MeasureRanges | None":
    """The function that runs a graph over prompts, from a file or our own, which only w8a16 needs.

    Raises:
        DeviceUnavailable: ONNX Runtime is missing or does not load.
        UsageError: The file cannot be read.
    """
    if "w8a16" not in (options.precision, options.drafter_precision):
        return None
    from edgespec.evaluation.prompts import own_prompts, read_prompts

    edgespec.require_runtime()
    prompts = read_prompts(options.calibration, None) if options.calibration else own_prompts()
    return partial(edgespec.measure_ranges, prompts=[prompt.turns[0] for prompt in prompts])


def _export_pair(options: argparse.Namespace) -> None:
    home = model_home(offline=options.offline)
    target, drafter = (pair_half(options, part, home) for part in export_parts(options))
    check = edgespec.export_pair(
        target,
        drafter,
        options.output,
        open_decoder=(decoder := _decoder_for_check(options)),
        measure_ranges=_range_measurement(options),
        report=info,
    )
    for half in (target, drafter):
        home.note_export(half.source, is_checked=decoder is not None)
    home.settle_downloads(keep=options.keep_download)
    print_result(options, check and asdict(check), *([check.in_words()] if check else [_UNKNOWN]))
    rest = "" if check is None or check.pays else ", which uses the drafter only where that saves time"
    info(f"use it with: edgespec chat {quote(options.name or options.output)}{named_devices(options)}{rest}")


def _add_forms(options: argparse.Namespace) -> None:
    home = model_home(offline=options.offline)
    parts = export_parts(options)
    halves = [pair_half(options, part, home) for part in parts]
    target = None
    if any(half.is_head for half in halves):
        source = home.locate(options.source, options.revision)
        target = edgespec.PairHalf(part=TARGET, source=source, adapter=options.adapter)
    added = edgespec.add_forms(
        options.add_to,
        target,
        halves,
        open_decoder=(decoder := _decoder_for_check(options)),
        measure_ranges=_range_measurement(options),
        report=info,
    )
    for half in (*halves, *([target] if target else [])):
        home.note_export(half.source, is_checked=decoder is not None)
    home.settle_downloads(keep=options.keep_download)
    lines = [f"wrote {folder}" for folder in added] or [f"{options.add_to} has these forms already"]
    print_result(options, {"added": [str(folder) for folder in added]}, *lines)
    devices = " ".join(
        f"--{'drafter-' if part.name == DRAFTER else ''}device {part.device}" for part in parts if added
    )
    if devices:
        info(f"measure its speed there with: edgespec pair check {quote(options.add_to)} {devices}")


def _export_model(options: argparse.Namespace) -> None:
    from edgespec.export.output import quality

    (part,) = export_parts(options)
    decoder = _decoder_for_check(options)
    home = model_home(offline=options.offline, open_decoder=decoder, measure_ranges=_range_measurement(options))
    if options.exporter != "native":
        from edgespec.export.traced import import_model

        source = home.locate(options.source, options.revision)
        settings: dict[str, Any] = {"precision": part.precision, "origin": source.origin, "report": info}
        manifest = import_model(source.path, options.output, options.exporter, open_decoder=decoder, **settings)
        home.note_export(source, is_checked=manifest.check is not None)
    else:
        wanted = vars(export_options(options, part))
        manifest = edgespec.Inventory(home).export(options.source, options.output, options.revision, **wanted)
    home.settle_downloads(keep=options.keep_download)
    if options.json:
        print_result(options, asdict(manifest))
        return
    if (check := manifest.check) is not None:
        info(
            f"checked: the likeliest next token is that of the source at {check.agreement:.0%} of "
            f"{check.num_tokens} places ({check.nll:.4f} nats a token, the source has {check.reference_nll:.4f}; "
            f"divergence {check.divergence:.4f})"
        )
        if (warning := quality(check, manifest.form)) is not None:
            info(warning)
    info(f"wrote {options.output} ({format_bytes(edgespec.Inventory(home).describe(str(options.output)).bytes)})")
    folder = quote(options.name or options.output)
    use = f"TARGET --drafter {folder}" if manifest.vocab_subset else folder + named_devices(options)
    if manifest.pooling:
        info(f"use it with: edgespec serve {use}, at POST /v1/embeddings; or with Engine.embed")
    else:
        info(f"use it with: edgespec chat {use}")
