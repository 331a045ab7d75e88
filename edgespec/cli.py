"""The command line: arguments in, an exit code out. What a command does lives in the modules it calls.

Data goes to stdout, talk to stderr; --json prints one document. Exit codes are those of errors.py, 130
after an interrupt.
"""

import argparse
import errno
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from edgespec import __version__
from edgespec.catalog import CATALOG, DEFAULT_MODEL
from edgespec.doctor_command import add_doctor
from edgespec.drafter_names import WORDS
from edgespec.errors import EdgeSpecError, MemoryExhausted, UsageError
from edgespec.export_command import add_export, add_pair
from edgespec.models_command import add_models
from edgespec.plan_command import add_plan
from edgespec.simulate_command import add_simulate
from edgespec.talk import drop, say_stage

if TYPE_CHECKING:
    from edgespec.engine import Engine

_INTERRUPTED = 130
_NO_MEMORY = "out of memory; close other programs or use a smaller model"


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
        return _failed(_NO_MEMORY, MemoryExhausted.exit_code)
    except OSError as error:
        drop(sys.stdout)
        if error.errno == errno.ENOMEM:
            return _failed(_NO_MEMORY, MemoryExhausted.exit_code)
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
    add_export(
        commands.add_parser(
            "export", help="turn a GGUF file, a safetensors folder or a hub id into a model folder"
        )
    )
    add_pair(commands.add_parser("pair", help="judge a target and a drafter"))
    add_models(commands.add_parser("models", help="list, fetch, verify or remove prepared models"))
    add_plan(commands.add_parser("plan", help="who is to run where, in which schedule, and how fast that will be"))
    _add_score(commands.add_parser("score", help="measure how well a model predicts a text"))
    add_doctor(commands.add_parser("doctor", help="what is installed here, and whether speculation is exact"))
    _add_bench(commands.add_parser("bench", help="compare speculation with plain decoding on your prompts"))
    add_simulate(
        commands.add_parser(
            "simulate", help="what two devices would yield, from figures or from a trace of a pair"
        )
    )
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
    parser.add_argument(
        "--no-memory", action="store_true", help="keep no answers for later drafts, and use no earlier ones"
    )
    parser.add_argument("--json", action="store_true", help="print the answer and its figures as one document")
    parser.add_argument(
        "--log-rounds", metavar="FILE", type=Path, help="write a JSON line a round: what was expected of whom"
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="write when target and drafter worked, for chrome://tracing or Perfetto, and show the last of it",
    )
    parser.set_defaults(run=_chat)


def _add_speculation(parser: argparse.ArgumentParser) -> None:
    speculation = parser.add_argument_group(
        "speculation (the same text for any drafter under --deterministic, but for --acceptance rejection)"
    )
    speculation.add_argument(
        "--drafter",
        default="auto",
        metavar="D",
        help=f"auto, none, {WORDS}",
    )
    speculation.add_argument("--draft-length", default="auto", metavar="N", help="auto, or tokens a draft")
    speculation.add_argument("--schedule", default="auto", choices=["auto", "serial", "pipelined", "hedged"])
    speculation.add_argument("--acceptance", default="equality", choices=["equality", "rejection"])
    speculation.add_argument("--device", default="auto", metavar="NAME", help="where the target runs: auto, cpu")
    speculation.add_argument("--drafter-device", default="auto", metavar="NAME", help="where a model drafter runs")
    parser.add_argument(
        "--memory",
        metavar="BYTES",
        help="hold no more than this in all, such as 2G or 512M, and draft accordingly",
    )
    speculation.add_argument(
        "--deterministic", action="store_true", help="the same bytes whatever drafts, about a fifth slower"
    )


def _add_bench(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        required=True,
        action="append",
        help="JSON Lines with turns or prompt; repeatable",
    )
    parser.add_argument("--per-category", type=int, metavar="N", help="the first N prompts of each category")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens an answer (default 128)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T")
    _add_speculation(parser)
    parser.add_argument("--json", action="store_true", help="print one document")
    parser.set_defaults(run=_bench)


def _add_score(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--file", metavar="FILE", type=Path, required=True, help="a text file")
    parser.add_argument("--device", default="auto", metavar="NAME", help="where the model runs: auto, cpu")
    parser.add_argument("--json", action="store_true", help="print tokens and nll as one document")
    parser.set_defaults(run=_score)


def _chat(options: argparse.Namespace) -> int:
    from edgespec.chat import answer_once, converse
    from edgespec.sampling import SamplingParams
    from edgespec.trace_file import TraceFile

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
    if options.log_rounds:
        _log_rounds(options.log_rounds)
    trace = TraceFile(options.trace) if options.trace else None
    with _engine(options, memory=not options.no_memory) as engine:
        if prompt is None:
            return converse(engine, options.system, sampling, options.max_tokens, options.stop, trace)
        return answer_once(
            engine,
            prompt,
            options.system,
            sampling,
            options.max_tokens,
            options.stop,
            as_json=options.json,
            trace=trace,
        )


class _RoundsFile(logging.FileHandler):
    """Says once that it cannot be written, and falls silent."""

    def handleError(self, record: logging.LogRecord) -> None:
        logging.getLogger(record.name).setLevel(logging.CRITICAL)
        say_stage(f"rounds are logged no further: cannot write {self.baseFilename}")


def _log_rounds(path: Path) -> None:
    """Raises UsageError: The file cannot be written."""
    try:
        handler = _RoundsFile(path, mode="w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    rounds = logging.getLogger("edgespec.rounds")
    rounds.addHandler(handler)
    rounds.setLevel(logging.DEBUG)
    rounds.propagate = False


def _as_typed(argument: str) -> str:
    """UTF-8 from a command line whose locale is another: Python escapes the bytes that it does not know."""
    try:
        return os.fsencode(argument).decode()
    except UnicodeError:
        return argument


def _engine(options: argparse.Namespace, *, memory: bool = False) -> "Engine":
    from edgespec.loading import load

    return load(
        options.model,
        drafter=options.drafter,
        draft_length=options.draft_length,
        acceptance=options.acceptance,
        schedule=options.schedule,
        device=options.device,
        drafter_device=options.drafter_device,
        num_threads=options.threads,
        deterministic=options.deterministic,
        offline=options.offline,
        memory=memory,
        memory_limit=options.memory,
        report=say_stage,
    )


def _bench(options: argparse.Namespace) -> int:
    from edgespec.benchmark import measure, read_prompts, table
    from edgespec.sampling import SamplingParams

    for name in ("per_category", "max_tokens"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; wanted at least 1")
    prompts = [prompt for path in options.prompts for prompt in read_prompts(path, options.per_category)]
    sampling = SamplingParams(temperature=options.temperature)
    with _engine(options) as engine:
        document = measure(engine, prompts, max_tokens=options.max_tokens, sampling=sampling, report=say_stage)
    print(json.dumps(document) if options.json else table(document))
    return 0


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
