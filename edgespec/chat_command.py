"""The command that answers one prompt, or holds a conversation."""

import argparse
import logging
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.arguments import add_model, add_option, add_sampling, add_speculation, as_typed, load_engine
from edgespec.catalog import DEFAULT_MODEL
from edgespec.errors import UsageError
from edgespec.talk import say_problem, say_stage

if TYPE_CHECKING:
    from edgespec.chat_session import ChatSession
    from edgespec.conversation import Conversation
    from edgespec.sampling import SamplingParams
    from edgespec.trace_file import TraceFile
    from edgespec.transcript import AutosaveFile, Transcript


def add_chat(parser: argparse.ArgumentParser) -> None:
    add_model(parser, default=DEFAULT_MODEL)
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="answer this and leave; - is what stdin holds; several are joined by blank lines (without it: stdin "
        "if it is no terminal, or a chat)",
    )
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
    parser.add_argument(
        "--continue", dest="continues", action="store_true", help="go on with the conversation of the last chat"
    )
    add_option(parser, "no-history")
    add_option(parser, "overflow")
    parser.set_defaults(run=_chat, transcript=None)


def _chat(options: argparse.Namespace) -> int:
    from edgespec.chat import answer_once, converse
    from edgespec.piped import waits
    from edgespec.trace_file import TraceFile

    sampling = _sampling(options)
    if options.max_tokens is not None and options.max_tokens < 1:
        raise UsageError(f"--max-tokens is {options.max_tokens}; wanted at least 1")
    prompt = _prompt(options)
    if options.log_rounds:
        _log_rounds(options.log_rounds)
    trace = TraceFile(options.trace) if options.trace else None
    kept, last = _kept(options)
    with ExitStack() as engines:
        engine = engines.enter_context(load_engine(options, memory=_remembers(options)))
        conversation = engine.chat(
            options.system,
            overflow=options.overflow,
            sampling=sampling,
            max_tokens=options.max_tokens,
            stop=options.stop,
        )
        engines.callback(lambda: conversation.engine.close())  # which /model exchanges
        if last:
            conversation.restore(last)
            if options.system is not None:
                conversation.system = options.system
        session = _session(options, conversation, kept if prompt is None or last else None, trace)
        if prompt is None:
            options.note("chat", "begun")
            return converse(session, keeps_history=not options.no_history)
        if "-" not in (options.prompt or "-") and waits(sys.stdin):
            say_stage("stdin is not read, as --prompt is given; to answer both, add --prompt -")
        return answer_once(session, prompt, as_json=options.json)


def _remembers(options: argparse.Namespace) -> bool:
    """Whether answers are kept to draft from: what is said could be read off them."""
    return not (options.no_memory or options.no_history)


def _sampling(options: argparse.Namespace) -> "SamplingParams":
    from edgespec.sampling import SamplingParams

    return SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        seed=options.seed,
    )


def _prompt(options: argparse.Namespace) -> str | None:
    """What is to be answered once; None to converse."""
    parts = options.prompt or ([] if sys.stdin.isatty() else ["-"])
    if parts.count("-") > 1:
        raise UsageError("--prompt - is given twice; stdin can be read once")
    prompt = "\n\n".join(sys.stdin.read() if part == "-" else as_typed(part) for part in parts) if parts else None
    if prompt is None and options.json:
        raise UsageError("--json answers one prompt; give it with --prompt or on stdin")
    if prompt is not None and not prompt.strip():
        raise UsageError("the prompt is empty; give some text with --prompt or on stdin")
    return prompt


def _kept(options: argparse.Namespace) -> tuple["AutosaveFile | None", "Transcript | None"]:
    """Where the conversation is kept, and the one to go on with, whose model is taken unless another is named.

    Raises:
        UsageError: There is none to go on with, or it is damaged.
    """
    from edgespec.home import default_home
    from edgespec.transcript import AutosaveFile, latest, read_transcript

    folder = default_home() / "chats"
    path = options.transcript or (latest(folder) if options.continues else None)
    if options.continues and path is None:
        raise UsageError(f"there is no conversation to continue in {folder}; leave out --continue")
    last = read_transcript(path) if path else None
    is_named = options.model is not options.parser.get_default("model")
    if last and last.model and not is_named:
        options.model = last.model
    if options.no_history:
        return None, last
    return AutosaveFile(folder, say_problem, path, lambda path: options.note("transcript", str(path))), last


def _aside(line: str) -> None:
    from edgespec.chat_printer import Aside  # 0.1 s that a single answer can do without

    Aside()(line)


def _session(
    options: argparse.Namespace,
    conversation: "Conversation",
    kept: "AutosaveFile | None",
    trace: "TraceFile | None",
) -> "ChatSession":
    from edgespec.chat_session import ChatSession
    from edgespec.plan_command import plan_document
    from edgespec.plan_words import in_words

    def asked(model: str, drafter: str) -> argparse.Namespace:
        return argparse.Namespace(**{**vars(options), "model": model, "drafter": drafter, "measure": False})

    return ChatSession(
        conversation=conversation,
        model=options.model,
        drafter=options.drafter,
        open_engine=lambda *names: load_engine(asked(*names), memory=_remembers(options)),
        plan=lambda *names: in_words(plan_document(asked(*names))),
        say=_aside,
        autosave=kept,
        trace=trace,
        is_quiet=options.quiet,
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
