"""The commands that make models: export, and pair check.

Everything heavy is imported where it is used, so that the command line starts at once.
"""

import argparse
import json
import shlex
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.arguments import add_option
from edgespec.errors import DeviceUnavailable, EdgeSpecError, UsageError
from edgespec.talk import say_problem, say_stage

if TYPE_CHECKING:
    from edgespec.export.convert import MeasureRanges, OpenDecoder
    from edgespec.export.drafting import Drafting
    from edgespec.pair import PairCheck

_PRECISIONS = ("auto", "source", "fp32", "fp16", "int8", "int4", "w8a16")


def add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a .gguf file, a folder with safetensors, or a hub id: org/name, org/name:Q4_K_M, org/name:FILE.gguf",
    )
    parser.add_argument(
        "--revision", metavar="REV", help="branch, tag or commit of SOURCE on the hub (default: main)"
    )
    add_option(parser, "offline")
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="the model folder to make")
    parser.add_argument("--precision", default="source", choices=_PRECISIONS, help="default: the source's own")
    parser.add_argument(
        "--block-size",
        type=int,
        default=32,
        choices=[32, 64, 128],
        help="weights to a scale in int4 and int8 (default 32)",
    )
    parser.add_argument(
        "--exporter",
        default="native",
        choices=["native", "optimum"],
        help="native, or optimum for other architectures: through PyTorch, in fp32",
    )
    parser.add_argument(
        "--form",
        default="cpu",
        choices=["cpu", "gpu", "npu"],
        help="gpu: fp16 activations and cache; npu: fixed shapes and primitive operators (default cpu)",
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        type=Path,
        help="with w8a16: prompts (JSON Lines) that show which values activations take; default: our own",
    )
    drafting = parser.add_argument_group("drafters out of the model")
    layers = drafting.add_mutually_exclusive_group()
    layers.add_argument("--keep-layers", metavar="L", help="also write a drafter of these layers, as in 0-5,9")
    layers.add_argument("--skip-layers", metavar="L", help="also write a drafter without these layers")
    drafting.add_argument(
        "--vocab-subset", type=int, metavar="N", help="trim the drafter's head to the N most frequent tokens"
    )
    drafting.add_argument("--vocab-corpus", type=Path, metavar="FILE", help="a text that shows which are frequent")
    drafting.add_argument("--hidden-states", metavar="L", help="give the hidden states of these layers too")
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        help="compare the result with its source (default where ONNX Runtime is installed)",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what it would take, and leave")
    parser.add_argument(
        "--drafter", metavar="SOURCE", help="export this too and write a folder that loads as a pair"
    )
    parser.add_argument(
        "--drafter-precision",
        choices=_PRECISIONS,
        metavar="PRECISION",
        help="as --precision has them; default: the source's own",
    )
    parser.add_argument("--json", action="store_true", help="print the manifest, or the check of a pair")
    parser.set_defaults(run=_export)


def add_pair(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    check = actions.add_parser("check", help="compare their tokens and measure what drafting gains")
    check.add_argument("target", metavar="TARGET", help="a model, as for chat")
    check.add_argument("drafter", metavar="DRAFTER", help="a model, as for chat")
    add_option(check, "offline")
    check.add_argument("--json", action="store_true", help="print one document")
    check.set_defaults(run=_pair_check)


# What only the native exporter of one model can do: option → its default.
_NATIVE = {
    "block_size": 32,
    "form": "cpu",
    "calibration": None,
    "keep_layers": None,
    "skip_layers": None,
    "vocab_subset": None,
    "vocab_corpus": None,
    "hidden_states": None,
}


def _export(options: argparse.Namespace) -> int:
    _expect_together(options)
    if options.dry_run:
        return _plan(options)
    return _export_model(options) if options.drafter is None else _export_pair(options)


def _expect_together(options: argparse.Namespace) -> None:
    """Raises UsageError: options that cannot be meant, or that one of the others leaves without effect."""
    for name in ("source", "drafter"):
        if getattr(options, name) == "":
            raise UsageError(f"the {name} is empty; give a .gguf file, a folder with safetensors or a hub id")
    _hidden_layers(options)
    _drafting(options).expect_sound()  # before anything is fetched
    native = [f"--{name.replace('_', '-')}" for name, usual in _NATIVE.items() if getattr(options, name) != usual]
    if options.drafter is not None and options.exporter != "native":
        native.append("--exporter")
    if options.drafter is not None and "w8a16" in (options.precision, options.drafter_precision):
        raise UsageError(
            "w8a16 is a precision of the npu form, which no pair has; export the drafter alone, with --form npu "
            "--precision w8a16, and name its folder: edgespec chat TARGET --drafter DIR"
        )
    if native and (options.drafter is not None or options.exporter != "native"):
        other = "--drafter" if options.drafter is not None else f"--exporter {options.exporter}"
        raise UsageError(f"{', '.join(native)} cannot go with {other}; leave one of them out")
    if options.drafter is None and options.drafter_precision is not None:
        raise UsageError("--drafter-precision is for a pair; give --drafter too")
    if options.block_size != _NATIVE["block_size"] and (held := _held_without_blocks(options)) is not None:
        raise UsageError(f"--block-size is for --precision int4 and int8, not {held}; leave it out")
    if options.calibration is not None and options.precision != "w8a16":
        raise UsageError(f"--calibration is for --precision w8a16, not {options.precision}; leave it out")
    if options.dry_run and options.exporter != "native":
        raise UsageError("--dry-run knows the native exporter alone; leave one of the two out")


def _held_without_blocks(options: argparse.Namespace) -> str | None:
    """What is asked for, where no weights are rounded anew in blocks that share a scale."""
    if options.precision not in ("auto", "int8", "int4"):
        return str(options.precision)
    return "--form npu" if options.form == "npu" else None


def _check_with(options: argparse.Namespace) -> "OpenDecoder | None":
    """What loads the export for its check; without ONNX Runtime, and not asked for, there is none."""
    from edgespec.opening import expect_runtime, open_decoder

    is_trimmed = options.vocab_subset and not (options.keep_layers or options.skip_layers)
    if options.check is False or (options.check is None and is_trimmed):
        return None
    try:
        expect_runtime()
    except DeviceUnavailable as error:
        if options.check:
            raise
        say_problem(f"the export will not be checked: {error}")
        return None
    return open_decoder


def _measure_with(options: argparse.Namespace) -> "MeasureRanges | None":
    """What runs a graph over a text, which w8a16 cannot do without."""
    if options.precision != "w8a16":
        return None
    from edgespec.opening import expect_runtime, measure_ranges
    from edgespec.prompts import own_prompts, read_prompts

    expect_runtime()
    prompts = own_prompts() if options.calibration is None else read_prompts(options.calibration, None)
    return partial(measure_ranges, prompts=[prompt.turns[0] for prompt in prompts])


def _plan(options: argparse.Namespace) -> int:
    from edgespec.export.convert import plan_source
    from edgespec.export.output import expect_nothing, expect_possible
    from edgespec.export.plan import estimate
    from edgespec.home import ModelHome, default_home
    from edgespec.pairing import expect_pair

    expect_nothing(options.output)
    is_checked = _check_with(options) is not None
    home = ModelHome(default_home(), options.offline, say_stage)
    plans, loaded = [], []
    wanted = [(options.source, options.precision, options.revision)]
    if options.drafter is not None:
        wanted.append((options.drafter, options.drafter_precision or "source", None))
    for source, precision, revision in wanted:
        if (sizes := home.sizes(source, revision)) is None:
            asked = (options.form, _drafting(options), _hidden_layers(options)) if options.drafter is None else ()
            read, plan = plan_source(Path(source), precision, *asked, is_checked=is_checked)
            plans.append(plan)
            loaded.append(read)
        else:  # on the hub floats have two bytes as a rule
            is_blocks = "gguf" in source.lower() or ":" in source
            plans.append(
                estimate(
                    source,
                    precision,
                    sizes[0] // 2,
                    sizes[0],
                    is_blocks=is_blocks,
                    fetch_bytes=sizes[1],
                    form=options.form,
                    is_checked=is_checked,
                )
            )
    if len(loaded) == 2:
        expect_pair(*loaded)
    code = 0
    try:
        expect_possible(options.output, sum(plan.write_bytes for plan in plans))
    except EdgeSpecError as error:
        plans = [replace(plan, problem=str(error)) for plan in plans]
        code = error.exit_code
        say_problem(f"this cannot be carried out: {error}")
    if options.json:
        print(json.dumps([asdict(plan) for plan in plans]))
        return code
    for plan in plans:
        print(
            f"{plan.source}, {plan.precision}{f' ({plan.reason})' if plan.reason else ''}: fetch "
            f"{plan.fetch_bytes / 1e6:.0f} MB, write at most {plan.write_bytes / 1e6:.0f} MB, peak memory about "
            f"{plan.peak_bytes / 1e6:.0f} MB, about {plan.seconds:.0f} s beside fetching"
            f"{', check included' if is_checked else ''}"
        )
    return code


def _export_pair(options: argparse.Namespace) -> int:
    from edgespec.export.output import expect_nothing
    from edgespec.home import ModelHome, default_home
    from edgespec.pairing import export_pair

    expect_nothing(options.output)  # before anything is fetched
    home = ModelHome(default_home(), options.offline, say_stage)
    snapshots = home.locate(options.source, options.revision), home.locate(options.drafter)
    check = export_pair(
        *snapshots,
        options.output,
        precision=options.precision,
        drafter_precision=options.drafter_precision or "source",
        open_decoder=_check_with(options),
        report=say_stage,
    )
    _print_pair(check, options.json)
    say_stage(f"use it with: edgespec chat {_as_argument(options.output)}")
    return 0


def _pair_check(options: argparse.Namespace) -> int:
    from edgespec.pairing import judge_pair

    check = judge_pair(options.target, options.drafter, offline=options.offline, report=say_stage)
    _print_pair(check, options.json)
    return 0


def _print_pair(check: "PairCheck", as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(check)))
        return
    print(f"{check.drafter} drafting for {check.target}: {check.verdict}")
    print(f"  why           {check.reason}")
    print(f"  kept          {check.greedy_acceptance:.0%} greedy, {check.sampled_acceptance:.0%} at temperature 1")
    print(f"  expected gain {check.expected_gain:.2f} over plain decoding, {check.num_draft} tokens a draft")
    print(f"  special tokens are {'the same' if check.same_special_tokens else 'different'}")
    print(f"  chat templates are {'the same' if check.same_chat_template else 'different'}")


def _export_model(options: argparse.Namespace) -> int:
    from edgespec.export.card import quality
    from edgespec.export.convert import export_model
    from edgespec.export.output import expect_nothing
    from edgespec.home import ModelHome, default_home

    expect_nothing(options.output)  # before anything is fetched
    source = ModelHome(default_home(), options.offline, say_stage).locate(options.source, options.revision)
    settings: dict[str, Any] = {
        "precision": options.precision,
        "repository": source.repository,
        "revision": source.revision,
        "license": source.license,
        "open_decoder": _check_with(options),
        "report": say_stage,
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
            hidden_layers=_hidden_layers(options),
            measure_ranges=_measure_with(options),
            **settings,
        )
    if options.json:
        print(json.dumps(asdict(manifest)))
    else:
        if (check := manifest.check) is not None:
            say_stage(
                f"checked on {check.num_tokens} tokens: {check.nll:.4f} nats/token, the source has "
                f"{check.reference_nll:.4f}; divergence {check.divergence:.4f}, the same likeliest token at "
                f"{check.agreement:.0%}"
            )
            if (words := quality(check, manifest.form)) is not None:
                say_stage(words)
        say_stage(f"wrote {options.output} ({manifest.weights_bytes / 1e6:.0f} MB)")
        place = _as_argument(options.output)
        usage = f"TARGET --drafter {place}" if manifest.vocab_subset else place
        say_stage(f"use it with: edgespec chat {usage}")
    return 0


def _as_argument(path: Path) -> str:
    """A path for a shell's command line, where one that begins with a dash would be an option."""
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))


def _layers(text: str | None, what: str) -> frozenset[int] | None:
    from edgespec.export.drafting import parse_layers

    return None if text is None else parse_layers(text, what)


def _hidden_layers(options: argparse.Namespace) -> tuple[int, ...]:
    return tuple(sorted(_layers(options.hidden_states, "--hidden-states") or ()))


def _drafting(options: argparse.Namespace) -> "Drafting":
    from edgespec.export.drafting import Drafting

    return Drafting(
        keep=_layers(options.keep_layers, "--keep-layers"),
        skip=_layers(options.skip_layers, "--skip-layers"),
        num_tokens=options.vocab_subset,
        corpus=options.vocab_corpus,
    )
