"""The command that answers one prompt, or holds a conversation."""

import argparse
import logging
import sys
from pathlib import Path

from edgespec.arguments import add_model, add_option, add_sampling, add_speculation, as_typed, load_engine
from edgespec.catalog import DEFAULT_MODEL
from edgespec.errors import UsageError
from edgespec.talk import say_problem


def add_chat(parser: argparse.ArgumentParser) -> None:
    add_model(parser, default=DEFAULT_MODEL)
    parser.add_argument("--prompt", metavar="TEXT", help="answer this and leave; without it, read stdin or chat")
    add_option(parser, "system")
    add_option(parser, "max-tokens")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the answer here; repeatable"
    )
    add_sampling(parser)
    add_speculation(parser)
    add_option(parser, "no-memory")
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
    prompt = options.prompt and as_typed(options.prompt)
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    if prompt is None and options.json:
        raise UsageError("--json answers one prompt; give it with --prompt or on stdin")
    if prompt is not None and not prompt.strip():
        raise UsageError("the prompt is empty; give some text with --prompt or on stdin")
    if options.log_rounds:
        _log_rounds(options.log_rounds)
    trace = TraceFile(options.trace) if options.trace else None
    with load_engine(options, memory=not options.no_memory) as engine:
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
        say_problem(f"rounds are logged no further: cannot write {self.baseFilename}")


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
