"""The command line: arguments in, an exit code out. What a command does lives in the modules it calls.

Data goes to stdout, talk to stderr; --json prints one document. Exit codes are those of errors.py, 130
after an interrupt.
"""

import argparse
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from edgespec import __version__
from edgespec.catalog import CATALOG, DEFAULT_MODEL
from edgespec.errors import EdgeSpecError, MemoryExhausted, UsageError
from edgespec.talk import drop, say_stage

if TYPE_CHECKING:
    from edgespec.engine import Engine
    from edgespec.export.drafting import Drafting
    from edgespec.pair import PairCheck

_INTERRUPTED = 130
_PRECISIONS = ("auto", "source", "fp32", "fp16", "int8", "int4")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        _prepare_streams()
        for name in ("SIGTERM", "SIGHUP"):  # the latter where there are terminals to close
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), _terminate)
        options = _parser().parse_args(arguments)
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except EdgeSpecError as error:
        return _failed(str(error), error.exit_code)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # once is enough
        return _failed("interrupted", _INTERRUPTED)
    except BrokenPipeError:
        drop(sys.stdout)  # nobody reads any more
        return 0
    except MemoryError:
        return _failed("out of memory; close other programs or use a smaller model", MemoryExhausted.exit_code)
    except OSError as error:
        drop(sys.stdout)
        return _failed(str(error), EdgeSpecError.exit_code)


def _prepare_streams() -> None:
    """Bytes that are no text are replaced, and a stream that was closed by the caller is the null device."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _terminate(number: int, frame: object) -> NoReturn:
    """Unwinds like an error, so that nothing half written stays."""
    sys.exit(128 + number)


def _failed(message: str, code: int) -> int:
    say_stage(message)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="edgespec", description="Run language models on this machine, speculatively and exactly."
    )
    parser.add_argument("--version", action="version", version=f"edgespec {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_chat(commands.add_parser("chat", help="talk to a model, or answer one prompt"))
    _add_export(
        commands.add_parser(
            "export", help="turn a GGUF file, a safetensors folder or a hub id into a model folder"
        )
    )
    _add_pair(commands.add_parser("pair", help="judge a target and a drafter"))
    _add_score(commands.add_parser("score", help="measure how well a model predicts a text"))
    _add_bench(commands.add_parser("bench", help="compare speculation with plain decoding on your prompts"))
    return parser


def _add_model(parser: argparse.ArgumentParser, *, default: str | None = None) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?" if default else None,
        default=default,
        help="a model folder, a .gguf file, a safetensors folder, a hub id (org/name), or a name: "
        f"{', '.join(CATALOG)}" + (f" (default {default})" if default else ""),
    )
    parser.add_argument("--offline", action="store_true", help="never connect to anything")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of the target (default: all cores)")


def _add_chat(parser: argparse.ArgumentParser) -> None:
    _add_model(parser, default=DEFAULT_MODEL)
    parser.add_argument("--prompt", metavar="TEXT", help="answer this and leave; without it, read stdin or chat")
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="the most tokens of an answer (default: no limit)"
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the answer here; repeatable"
    )
    sampling = parser.add_argument_group("sampling (default: greedy)")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P")
    sampling.add_argument("--min-p", type=float, default=0.0, metavar="P")
    sampling.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R")
    sampling.add_argument("--presence-penalty", type=float, default=0.0, metavar="A")
    sampling.add_argument("--frequency-penalty", type=float, default=0.0, metavar="A")
    sampling.add_argument("--seed", type=int, default=0, metavar="S")
    _add_speculation(parser)
    parser.add_argument("--json", action="store_true", help="print the answer and its figures as one document")
    parser.set_defaults(run=_chat)


def _add_speculation(parser: argparse.ArgumentParser) -> None:
    speculation = parser.add_argument_group("speculation (never changes the text under --deterministic)")
    speculation.add_argument("--drafter", default="auto", metavar="D", help="auto, none, ngram, self or a model")
    speculation.add_argument("--draft-length", default="auto", metavar="N", help="auto, or tokens a draft")
    speculation.add_argument("--schedule", default="auto", choices=["auto", "serial"])
    speculation.add_argument("--acceptance", default="equality", choices=["equality"])
    speculation.add_argument("--device", default="auto", metavar="NAME", help="where the target runs: auto, cpu")
    speculation.add_argument("--drafter-device", default="auto", metavar="NAME", help="where a model drafter runs")
    speculation.add_argument(
        "--deterministic", action="store_true", help="the same bytes whatever drafts, about a fifth slower"
    )


def _add_bench(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument(
        "--prompts", metavar="FILE", type=Path, required=True, help="JSON Lines with turns or prompt"
    )
    parser.add_argument("--per-category", type=int, metavar="N", help="the first N prompts of each category")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens an answer (default 128)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T")
    _add_speculation(parser)
    parser.add_argument("--json", action="store_true", help="print one document")
    parser.set_defaults(run=_bench)


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a .gguf file, a folder with safetensors, or a hub id: org/name, org/name:Q4_K_M, org/name:FILE.gguf",
    )
    parser.add_argument(
        "--revision", metavar="REV", help="branch, tag or commit of SOURCE on the hub (default: main)"
    )
    parser.add_argument("--offline", action="store_true", help="never connect to anything")
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
        "--check", action="store_true", help="compare the result with its source; needs ONNX Runtime"
    )
    parser.add_argument(
        "--drafter", metavar="SOURCE", help="export this too and write a folder that loads as a pair"
    )
    parser.add_argument("--drafter-precision", default="source", choices=_PRECISIONS)
    parser.add_argument("--json", action="store_true", help="print the manifest, or the check of a pair")
    parser.set_defaults(run=_export)


def _add_pair(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    check = actions.add_parser("check", help="compare their tokens and measure what drafting gains")
    check.add_argument("target", metavar="TARGET", help="a model, as for chat")
    check.add_argument("drafter", metavar="DRAFTER", help="a model, as for chat")
    check.add_argument("--offline", action="store_true", help="never connect to anything")
    check.add_argument("--json", action="store_true", help="print one document")
    check.set_defaults(run=_pair_check)


def _add_score(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--file", metavar="FILE", type=Path, required=True, help="a text file")
    parser.add_argument("--device", default="auto", metavar="NAME", help="where the model runs: auto, cpu")
    parser.add_argument("--json", action="store_true", help="print tokens and nll as one document")
    parser.set_defaults(run=_score)


def _chat(options: argparse.Namespace) -> int:
    from edgespec.chat import answer_once, converse
    from edgespec.sampling import SamplingParams

    sampling = SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        seed=options.seed,
    )
    if options.max_tokens is not None and options.max_tokens < 1:
        raise UsageError(f"--max-tokens is {options.max_tokens}; wanted at least 1")
    prompt = options.prompt and _as_typed(options.prompt)
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    if prompt is None and options.json:
        raise UsageError("--json answers one prompt; give it with --prompt or on stdin")
    if prompt is not None and not prompt.strip():
        raise UsageError("the prompt is empty; give some text with --prompt or on stdin")
    with _engine(options) as engine:
        if prompt is None:
            return converse(engine, options.system, sampling, options.max_tokens, options.stop)
        return answer_once(
            engine, prompt, options.system, sampling, options.max_tokens, options.stop, as_json=options.json
        )


def _as_typed(argument: str) -> str:
    """UTF-8 from a command line whose locale is another: Python escapes the bytes that it does not know."""
    try:
        return os.fsencode(argument).decode()
    except UnicodeError:
        return argument


def _engine(options: argparse.Namespace) -> "Engine":
    from edgespec.loading import load

    return load(
        options.model,
        drafter=options.drafter,
        draft_length=options.draft_length,
        device=options.device,
        drafter_device=options.drafter_device,
        num_threads=options.threads,
        deterministic=options.deterministic,
        offline=options.offline,
        report=say_stage,
    )


def _bench(options: argparse.Namespace) -> int:
    from edgespec.benchmark import measure, read_prompts, table
    from edgespec.sampling import SamplingParams

    for name in ("per_category", "max_tokens"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; wanted at least 1")
    prompts = read_prompts(options.prompts, options.per_category)
    sampling = SamplingParams(temperature=options.temperature)
    with _engine(options) as engine:
        document = measure(engine, prompts, max_tokens=options.max_tokens, sampling=sampling, report=say_stage)
    print(json.dumps(document) if options.json else table(document))
    return 0


def _export(options: argparse.Namespace) -> int:
    return _export_model(options) if options.drafter is None else _export_pair(options)


def _export_pair(options: argparse.Namespace) -> int:
    from edgespec.export.convert import expect_nothing
    from edgespec.home import ModelHome, default_home
    from edgespec.pairing import export_pair

    expect_nothing(options.output)  # before anything is fetched
    home = ModelHome(default_home(), options.offline, say_stage)
    check = export_pair(
        home.locate(options.source, options.revision),
        home.locate(options.drafter),
        options.output,
        precision=options.precision,
        drafter_precision=options.drafter_precision,
        report=say_stage,
    )
    _print_pair(check, options.json)
    say_stage(f"use it with: edgespec chat {shlex.quote(str(options.output))}")
    return 0


def _pair_check(options: argparse.Namespace) -> int:
    from edgespec.pairing import judge_pair

    check = judge_pair(options.target, options.drafter, offline=options.offline, report=say_stage)
    _print_pair(check, options.json)
    return 0


def _print_pair(check: "PairCheck", as_json: bool) -> None:
    from dataclasses import asdict

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
    from dataclasses import asdict

    from edgespec.export.convert import expect_nothing, export_model
    from edgespec.home import ModelHome, default_home
    from edgespec.loading import open_decoder

    expect_nothing(options.output)  # before anything is fetched
    source = ModelHome(default_home(), options.offline, say_stage).locate(options.source, options.revision)
    settings: dict[str, Any] = {
        "precision": options.precision,
        "repository": source.repository,
        "revision": source.revision,
        "license": source.license,
        "open_decoder": open_decoder if options.check else None,
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
            drafting=_drafting(options),
            hidden_layers=tuple(sorted(_layers(options.hidden_states, "--hidden-states") or ())),
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
        say_stage(f"wrote {options.output} ({manifest.weights_bytes / 1e6:.0f} MB)")
        say_stage(f"use it with: edgespec chat {shlex.quote(str(options.output))}")
    return 0


def _layers(text: str | None, what: str) -> frozenset[int] | None:
    from edgespec.export.drafting import parse_layers

    return None if text is None else parse_layers(text, what)


def _drafting(options: argparse.Namespace) -> "Drafting":
    from edgespec.export.drafting import Drafting

    return Drafting(
        keep=_layers(options.keep_layers, "--keep-layers"),
        skip=_layers(options.skip_layers, "--skip-layers"),
        num_tokens=options.vocab_subset,
        corpus=options.vocab_corpus,
    )


def _score(options: argparse.Namespace) -> int:
    from edgespec.loading import load
    from edgespec.scoring import score

    try:
        text = options.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {options.file}: {error}") from None
    with load(
        options.model,
        drafter="none",
        device=options.device,
        num_threads=options.threads,
        offline=options.offline,
        report=say_stage,
    ) as engine:
        tokens, nll = score(engine, text)
    print(
        json.dumps({"tokens": tokens, "nll": nll})
        if options.json
        else f"{nll:.4f} nats/token over {tokens} tokens"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
