"""The commands that make models: export, and pair check. What is heavy is imported where it is used."""

import argparse
import json
import shlex
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cli.arguments import add_count, add_file, add_options, attribute_name, model_home, print_result
from edgespec.cli.parser import CommandParser
from edgespec.errors import DeviceUnavailable, EdgeSpecError, UsageError
from edgespec.system.console import info, warn

if TYPE_CHECKING:
    from edgespec.export.convert import MeasureRanges, OpenDecoder
    from edgespec.export.drafting import Drafting
    from edgespec.models.pair import PairCheck

_PRECISIONS = ("auto", "source", "fp32", "fp16", "int8", "int4", "w8a16")
# Options that only the native exporter of a single model takes.
_DRAFTING = ("keep-layers", "skip-layers", "vocab-subset", "vocab-corpus", "hidden-states")
_NATIVE = ("block-size", "form", "calibration", *_DRAFTING)


def add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a .gguf file, a folder with safetensors, or an id on the Hugging Face hub: org/name, "
        "org/name:Q4_K_M, org/name:FILE.gguf",
    )
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="the model folder to create")
    parser.add_argument(
        "--precision", default="source", choices=_PRECISIONS, help="of the weights (default: that of SOURCE)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what the export would take, and exit")
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        help="compare the result with its source (default: if ONNX Runtime is installed)",
    )
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of SOURCE (default: main)")
    add_options(parser)
    pair = parser.add_argument_group("pair", "Export a target and its drafter into one folder.")
    pair.add_argument("--drafter", metavar="SOURCE", help="export this model too, as the drafter of SOURCE")
    pair.add_argument(
        "--drafter-precision",
        choices=_PRECISIONS,
        metavar="PRECISION",
        help="as for --precision (default: source)",
    )
    own = parser.add_argument_group("drafter from the model's own layers")
    layers = own.add_mutually_exclusive_group()
    _add_layers(layers, "--keep-layers", "write a drafter of these layers too, such as 0-5,9")
    _add_layers(layers, "--skip-layers", "write a drafter without these layers too")
    add_count(own, "--vocab-subset", "trim the drafter's head to the N most frequent tokens")
    add_file(own, "--vocab-corpus", "the text in which tokens are counted")
    _add_layers(own, "--hidden-states", "let the model output the hidden states of these layers")
    advanced = parser.add_argument_group("advanced")
    choices: dict[str, tuple[list[Any], str]] = {
        "form": (["cpu", "gpu", "npu"], "gpu: fp16 activations and cache; npu: fixed shapes and basic operators"),
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


def add_pair(parser: CommandParser) -> None:
    check = parser.add_command(
        "check", "compare their tokens, and measure how much faster the drafter makes the target"
    )
    check.add_argument("target", metavar="TARGET", help="a model, as for chat")
    check.add_argument("drafter", metavar="DRAFTER", help="a smaller model, which guesses tokens for the target")
    add_options(check)
    check.set_defaults(run=_pair_check)


def _export(options: argparse.Namespace) -> int:
    from edgespec.export.output import require_absent

    _require_compatible(options)
    require_absent(options.output)  # before anything is downloaded
    if options.dry_run:
        return _plan(options)
    (_export_model if options.drafter is None else _export_pair)(options)
    return 0


def _require_compatible(options: argparse.Namespace) -> None:
    is_pair = options.drafter is not None
    for name in ("source", "drafter"):
        if getattr(options, name) == "":
            raise UsageError(f"the {name} is empty; give a .gguf file, a folder with safetensors or a hub id")
    _drafting(options).require_valid()  # before anything is downloaded
    native = [f"--{name}" for name in _NATIVE if _is_given(options, name)]
    if is_pair and options.exporter != "native":
        native.append("--exporter")
    if is_pair and "w8a16" in (options.precision, options.drafter_precision):
        raise UsageError(
            "w8a16 is a precision of the npu form, which no pair has; export the drafter alone, with --form npu "
            "--precision w8a16, and name its folder: edgespec chat TARGET --drafter DIR"
        )
    if native and (is_pair or options.exporter != "native"):
        other = "--drafter" if is_pair else f"--exporter {options.exporter}"
        raise UsageError(f"{', '.join(native)} cannot be combined with {other}; leave one of them out")
    if not is_pair and options.drafter_precision is not None:
        raise UsageError("--drafter-precision is for a pair; give --drafter too")
    if _is_given(options, "block-size") and (chosen := _choice_without_blocks(options)) is not None:
        raise UsageError(f"--block-size is for --precision int4 and int8, not {chosen}; leave it out")
    if options.calibration is not None and options.precision != "w8a16":
        raise UsageError(f"--calibration is for --precision w8a16, not {options.precision}; leave it out")
    if options.dry_run and options.exporter != "native":
        raise UsageError("--dry-run estimates the native exporter only; leave out --dry-run or --exporter")


def _is_given(options: argparse.Namespace, name: str) -> bool:
    name = attribute_name(name)
    return bool(getattr(options, name) != options.parser.get_default(name))


def _choice_without_blocks(options: argparse.Namespace) -> str | None:
    """The precision or form under which no weights are quantised in blocks; None where some are."""
    if options.precision not in ("auto", "int8", "int4"):
        return str(options.precision)
    return "--form npu" if options.form == "npu" else None


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
    if options.precision != "w8a16":
        return None
    from edgespec.evaluation.prompts import own_prompts, read_prompts
    from edgespec.loading.open_model import measure_ranges, require_runtime

    require_runtime()
    prompts = own_prompts() if options.calibration is None else read_prompts(options.calibration, None)
    return partial(measure_ranges, prompts=[prompt.turns[0] for prompt in prompts])


def _plan(options: argparse.Namespace) -> int:
    from edgespec.evaluation.pairing import require_shared_tokens
    from edgespec.export.convert import plan_source
    from edgespec.export.output import require_writable
    from edgespec.export.plan import estimate

    is_checked = _decoder_for_check(options) is not None
    home = model_home(offline=options.offline)
    plans, loaded = [], []
    wanted = [(options.source, options.precision, options.revision)]
    if options.drafter is not None:
        wanted.append((options.drafter, options.drafter_precision or "source", None))
    own = () if options.drafter else (options.form, _drafting(options), tuple(sorted(options.hidden_states or ())))
    for source, precision, revision in wanted:
        if (sizes := home.sizes(source, revision)) is None:
            read, plan = plan_source(Path(source), precision, *own, is_checked=is_checked)
            loaded.append(read)
        else:
            plan = estimate(
                source,
                precision,
                sizes[0] // 2,  # weights: on the hub, one usually takes two bytes
                sizes[0],
                is_blocks="gguf" in source.lower() or ":" in source,
                fetch_bytes=sizes[1],
                form=options.form,
                is_checked=is_checked,
            )
        plans.append(plan)
    if len(loaded) == 2:
        require_shared_tokens(*loaded)
    code = 0
    try:
        require_writable(options.output, sum(plan.write_bytes for plan in plans))
    except EdgeSpecError as error:
        plans = [replace(plan, problem=str(error)) for plan in plans]
        code = error.exit_code
        warn(f"this export is not possible: {error}")
    lines = [
        f"{plan.source}, {plan.precision}{f' ({plan.reason})' if plan.reason else ''}: download "
        f"{plan.fetch_bytes / 1e6:.0f} MB, write at most {plan.write_bytes / 1e6:.0f} MB, peak memory about "
        f"{plan.peak_bytes / 1e6:.0f} MB, about {plan.seconds:.0f} s without the download"
        f"{', check included' if is_checked else ''}"
        for plan in plans
    ]
    print_result(options, [asdict(plan) for plan in plans], *lines)
    return code


def _export_pair(options: argparse.Namespace) -> None:
    from edgespec.evaluation.pairing import export_pair

    home = model_home(offline=options.offline)
    check = export_pair(
        home.locate(options.source, options.revision),
        home.locate(options.drafter),
        options.output,
        precision=options.precision,
        drafter_precision=options.drafter_precision or "source",
        open_decoder=_decoder_for_check(options),
        report=info,
    )
    print_result(options, asdict(check), _format_pair(check))
    info(f"use it with: edgespec chat {_as_argument(options.output)}")


def _pair_check(options: argparse.Namespace) -> None:
    from edgespec.evaluation.pairing import check_pair

    check = check_pair(options.target, options.drafter, offline=options.offline, report=info)
    print_result(options, asdict(check), _format_pair(check))


def _format_pair(check: "PairCheck") -> str:
    return (
        f"{check.drafter} drafting for {check.target}: {check.verdict}\n"
        f"  why               {check.reason}\n"
        f"  tokens accepted   {check.greedy_acceptance:.0%} greedy, "
        f"{check.sampled_acceptance:.0%} at temperature 1\n"
        f"  expected speed    {check.expected_gain:.2f} × plain decoding, "
        f"with {check.num_draft} tokens per draft\n"
        f"  special tokens    {'identical' if check.same_special_tokens else 'different'}\n"
        f"  chat templates    {'identical' if check.same_chat_template else 'different'}"
    )


def _export_model(options: argparse.Namespace) -> None:
    from edgespec.export.card import quality
    from edgespec.export.convert import export_model

    source = model_home(offline=options.offline).locate(options.source, options.revision)
    settings: dict[str, Any] = {
        "precision": options.precision,
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
            form=options.form,
            drafting=_drafting(options),
            hidden_layers=tuple(sorted(options.hidden_states or ())),
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
    info(f"wrote {options.output} ({manifest.weights_bytes / 1e6:.0f} MB)")
    folder = _as_argument(options.output)
    info(f"use it with: edgespec chat {f'TARGET --drafter {folder}' if manifest.vocab_subset else folder}")


def _as_argument(path: Path) -> str:
    """A path quoted for a shell; ./ goes before a dash, which would begin an option."""
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))


def _drafting(options: argparse.Namespace) -> "Drafting":
    from edgespec.export.drafting import Drafting

    return Drafting(
        keep=options.keep_layers,
        skip=options.skip_layers,
        num_tokens=options.vocab_subset,
        corpus=options.vocab_corpus,
    )
