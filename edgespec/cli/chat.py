"""The command that answers one prompt or holds a conversation."""

import argparse
import logging
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

import edgespec
from edgespec import FormatError, ModelError, UsageError, in_flags
from edgespec.cli.arguments import (
    add_flags,
    add_mcp,
    add_model,
    add_options,
    attribute_name,
    load_arguments,
    load_engine,
    model_home,
    stated_flags,
)
from edgespec.cli.chat_prompt import may_be_prompt, read_prompt, read_schema, tell_model_from_prompt
from edgespec.cli.parser import CommandParser
from edgespec.config.options import DEFAULT_MODEL, OPTIONS, SAMPLING_OPTIONS
from edgespec.system.command_line import quote
from edgespec.system.console import info, warn
from edgespec.system.disk import has_content, open_read
from edgespec.system.tables import read_table

if TYPE_CHECKING:
    from edgespec.chat.files import AutosaveFile, TraceFile
    from edgespec.chat.session import ChatSession


def add_chat(parser: CommandParser) -> None:
    table = read_table(__file__, "chat.toml")
    add_model(parser, DEFAULT_MODEL)
    parser.add_argument("--model", "-m", dest="named_model", metavar="MODEL", help=argparse.SUPPRESS)
    add_flags(parser, table["prompt"])
    add_mcp(parser, "let the model call the tools of an MCP server; you are asked before each call")
    add_flags(parser, table["answer"])
    add_options(parser)
    add_flags(parser.add_argument_group("advanced"), table["advanced"])
    parser.show_first(*table["first"])
    parser.set_defaults(run=_chat, transcript=None)


def _chat(options: argparse.Namespace) -> int:
    from edgespec.chat.attachments import read_attachment
    from edgespec.chat.files import TraceFile, add_files
    from edgespec.chat.first_model import load_first
    from edgespec.chat.loop import converse
    from edgespec.chat.saved_chats import take_prefix
    from edgespec.chat.tool_box import open_tools, require_tools
    from edgespec.system.terminal import unseen_keys

    tell_model_from_prompt(options)
    _take_tools_of_preset(options)
    stated = _stated_sampling(options)
    _require_usable(options)
    continued = _find_continued(options)
    prompt = read_prompt(options)
    files = [*map(read_attachment, options.attach)] if not options.transcript else []  # sent before a crash
    wanted = read_schema(options.schema) if options.schema else None
    if wanted and prompt is None:
        raise UsageError("--schema answers one prompt; give it with --prompt or on stdin")
    if options.log_rounds:
        _log_rounds(options.log_rounds)
    trace = TraceFile(options.trace) if options.trace else None
    autosave, last = _open_transcripts(options, continued)
    with ExitStack() as engines:
        if autosave:
            engines.callback(autosave.close)
        # Before the model, which takes longer.
        box = open_tools(options.tools, options.mcp, options.allow) if options.tools or options.mcp else None
        if box:
            engines.callback(box.close)

        def load_unseen(options: argparse.Namespace) -> "edgespec.Engine":
            engines.enter_context(unseen_keys())  # what is typed from here on waits in the first input
            return _load(options)

        engine = engines.enter_context(_load(options) if prompt is not None else load_first(options, load_unseen))
        if box:
            require_tools(engine)
        conversation = engine.chat(
            system=options.system,
            overflow=options.overflow,
            sampling=_sampling(options, stated, engine),
            max_tokens=options.max_tokens,
            stop=options.stop,
            ends_loops=None if options.loops is None else options.loops == "stop",
            response_format=wanted,
            tools=box.tools if box else None,
        )
        if options.think is not None:
            conversation.thinking = options.think
        engines.callback(lambda: conversation.engine.close())  # looked up at the end: /model replaces it
        if last:
            _resume(conversation, last, options, stated)
        session = _session(options, conversation, autosave if prompt is None or last else None, trace)
        session.name, session.tools = last.name if last else None, box
        if last:
            take_prefix(session)
        add_files(session, files, info)
        if wanted:
            session.view = "plain"
        if prompt is None:
            options.note("chat", "begun")
            return converse(session, keeps_history=not options.no_history)
        return _answer(session, prompt, options)


def _require_usable(options: argparse.Namespace) -> None:
    """Raises UsageError: An option has a value that it cannot have, or its file is not to be written over."""
    if "" in options.stop:
        raise UsageError("--stop is empty; give the text that ends an answer")
    if options.allow and not (options.tools or options.mcp):
        raise UsageError(
            f"--allow {options.allow[0]} has no tools to allow; give --tools FILE.py or --mcp COMMAND"
        )
    for flag, path in (("--log-rounds", options.log_rounds), ("--trace", options.trace)):
        if path and not options.overwrite and has_content(path):
            raise UsageError(
                f"{flag} {path}: the file exists and is not replaced; name another one, or give --overwrite"
            )


def _resume(
    conversation: "edgespec.Conversation",
    last: "edgespec.Transcript",
    options: argparse.Namespace,
    stated: dict[str, Any],
) -> None:
    """Continue a saved conversation; what the command line states comes before what was saved."""
    sampling = conversation.sampling
    conversation.restore(last)
    is_named = "model_sampling" in stated_flags(options)
    conversation.sampling = sampling if is_named else replace(conversation.sampling, **stated)
    if options.system is not None:
        conversation.system = options.system


def _answer(session: "ChatSession", prompt: str, options: argparse.Namespace) -> int:
    """Answer one prompt; returns the exit code."""
    from edgespec.chat.loop import answer_once
    from edgespec.chat.tool_box import ask_at_terminal
    from edgespec.system.terminal import has_unread_data

    reads_prompt = "-" in (options.prompt or ())
    if sys.stdin.isatty() and sys.stderr.isatty() and not reads_prompt:
        session.permit = partial(ask_at_terminal, show=session.info)
    if options.prompt and not reads_prompt and has_unread_data(sys.stdin):
        info("stdin is not read because --prompt is given; to use both, add --prompt -")
    try:
        return answer_once(session, prompt, as_json=options.json)
    except FormatError as error:
        said = (
            str(error)
            .replace("the JSON schema of response_format", "the schema")
            .replace("response_format", "schema")
        )
        raise FormatError(f"{options.schema}: {said}") from None


def _take_tools_of_preset(options: argparse.Namespace) -> None:
    """Let the model call the functions that its preset names, unless the command line names others."""
    preset = model_home().presets.find(options.model)
    if preset and preset.tools and options.tools is None:
        options.tools = Path(preset.tools)


def _load(options: argparse.Namespace) -> "edgespec.Engine":
    def report(line: str) -> None:
        if not (preset and line == preset.note_on_tools):  # which hold here
            info(line)

    preset = model_home().presets.find(options.model)
    try:
        return load_engine(options, answer_cache=_uses_answer_cache(options), report=report)
    except ModelError as error:
        is_unknown = str(error).startswith((f"no model '{options.model}':", f"'{options.model[:200]}' cannot be"))
        is_prompt = is_unknown and may_be_prompt(options.model)
        if not is_prompt or options.named_model or options.words or options.prompt:
            raise
        raise ModelError(
            f"{error}; to send it to the default model: edgespec chat -p {quote(options.model)}"
        ) from None


def _uses_answer_cache(options: argparse.Namespace) -> bool:
    # The conversation can be read from stored answers, so --no-history stores none either.
    return not (options.no_answer_cache or options.no_history)


def _stated_sampling(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling that flags and configuration state. Raises UsageError: A value is out of range, by its flag."""
    names = options.configured | stated_flags(options).keys()
    stated = {name: getattr(options, name) for name in map(attribute_name, SAMPLING_OPTIONS) if name in names}
    try:
        edgespec.SamplingParams(**stated)
    except UsageError as error:
        name, _, rest = str(error).partition(" ")
        raise UsageError(f"--{name.replace('_', '-')} {rest}") from None
    return stated


def _sampling(
    options: argparse.Namespace, stated: dict[str, Any], engine: "edgespec.Engine"
) -> "edgespec.SamplingParams":
    """How tokens are chosen: as stated, and for the rest as the model suggests, or greedily."""
    suggested, name = engine.model_sampling, engine.manifest.name
    is_asked_for = "model_sampling" in stated_flags(options)
    if not options.model_sampling or options.exact or suggested is None:
        if is_asked_for and options.model_sampling:
            why = "--exact is for greedy text" if options.exact else f"the files of {name} suggest no sampling"
            info(f"{why}; --model-sampling has no effect")
        of_preset = engine.preset.sampling if engine.preset and not options.exact else {}
        return edgespec.SamplingParams(**{**of_preset, **stated})
    sampling = replace(suggested, **stated)
    if is_asked_for:
        values = {option: getattr(sampling, attribute_name(option)) for option in SAMPLING_OPTIONS}
        changed = [f"{option} {value}" for option, value in values.items() if value != OPTIONS[option].default]
        info(f"sampling as {name} suggests: {', '.join(changed) or 'greedy'}")
    return sampling


def _find_continued(options: argparse.Namespace) -> Path | None:
    """The file of the conversation to continue. Raises UsageError: There is none."""
    from edgespec.chat.saved_chats import find_chat, find_latest

    given: Path | None = options.transcript
    if given or options.continues is None:
        return given
    folder = edgespec.default_home() / "chats"
    if options.continues:
        try:
            return find_chat(folder, options.continues).path
        except UsageError as error:
            raise UsageError(f"{error}; a prompt goes after --prompt") from None
    if (latest := find_latest(folder)) is None:
        raise UsageError(f"there is no conversation to continue in {folder}; leave out --continue")
    return latest


def _open_transcripts(
    options: argparse.Namespace, path: Path | None
) -> tuple["AutosaveFile | None", "edgespec.Transcript | None"]:
    """The file that saves this conversation, and the one to continue, whose model is used unless one is named."""
    from edgespec.chat.files import AutosaveFile

    last = edgespec.Transcript.read(path) if path else None
    if last and last.model and options.model is options.parser.get_default("model"):
        options.model = model_home().current_name(last.model)
    if options.no_history:
        return None, last
    chats = edgespec.default_home() / "chats"
    return AutosaveFile(chats, warn, path, lambda path: options.note("transcript", str(path))), last


def _print_aside(line: str) -> None:
    from edgespec.chat.printer import print_line  # takes 0.1 s to import, which a single answer does not need

    print_line(line)


def _session(
    options: argparse.Namespace,
    conversation: "edgespec.Conversation",
    autosave: "AutosaveFile | None",
    trace: "TraceFile | None",
) -> "ChatSession":
    from edgespec.chat.session import ChatSession

    def open_engine(model: str, drafter: str | None) -> "edgespec.Engine":
        asked = {} if drafter is None else {"drafter": drafter}
        return load_engine(options, model=model, answer_cache=_uses_answer_cache(options), **asked)

    def describe_plan(model: str, drafter: str | None) -> str:
        asked = {"model": model, "drafter": drafter or options.drafter}
        wish = edgespec.Wish(**load_arguments(options, "plan") | asked)
        return in_flags(edgespec.plan_in_words(edgespec.plan_document(wish, remeasure=False)))

    return ChatSession(
        conversation=conversation,
        model=options.model,
        drafter=options.drafter if "drafter" in stated_flags(options) else None,
        open_engine=open_engine,
        describe_plan=describe_plan,
        info=_print_aside,
        autosave=autosave,
        trace=trace,
        is_quiet=options.quiet,
        shows_figures=options.stats,
        keeps_prefix=options.keep_prefix,
    )


class _RoundsFile(logging.FileHandler):
    """A log file whose first failed write is reported, and is the last."""

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=open_read)  # type: ignore[return-value]

    def handleError(self, record: logging.LogRecord) -> None:
        logging.getLogger(record.name).setLevel(logging.CRITICAL)
        warn(f"stopped logging rounds: cannot write {self.baseFilename}")


def _log_rounds(path: Path) -> None:
    try:
        handler = _RoundsFile(path, mode="w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    rounds = logging.getLogger("edgespec.rounds")
    rounds.addHandler(handler)
    rounds.setLevel(logging.DEBUG)
    rounds.propagate = False
