"""The command line: arguments in, an exit code out.

Results go to stdout, messages to stderr; --json prints one document. Exit codes are those of errors.py, and 130
after an interrupt.
"""

import argparse
import errno
import logging
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from io import TextIOWrapper

from edgespec import EdgeSpecError, MemoryExhausted, ModelError, UsageError, __version__, in_flags
from edgespec.cli.arguments import attribute_name, stated_flags
from edgespec.cli.bench import add_bench, add_score
from edgespec.cli.chat import add_chat
from edgespec.cli.completion import add_completion, answer_shell, is_asked_by_shell
from edgespec.cli.config import add_config
from edgespec.cli.contradictions import remarks, require_consistent
from edgespec.cli.doctor import add_devices, add_doctor
from edgespec.cli.export import add_export
from edgespec.cli.models import add_models
from edgespec.cli.parser import CommandParser
from edgespec.cli.plan import add_pair, add_plan, add_simulate
from edgespec.cli.preset import add_preset
from edgespec.cli.serve import add_serve
from edgespec.cli.service import add_service
from edgespec.cli.stats import add_stats
from edgespec.cli.train import add_train
from edgespec.config.config_file import Setting, default_home, read_settings, unknown_variables
from edgespec.config.options import OPTIONS
from edgespec.system.console import (
    discard_output,
    give_up_stdout,
    has_no_reader,
    info,
    log_to_stderr,
    print_stderr,
    warn,
)
from edgespec.system.signals import exit_on_signals, ignore_ctrl_c
from edgespec.system.tables import read_table
from edgespec.system.threads import NO_THREAD, hand_over_soon

_INTERRUPTED = 130
_NO_MEMORY = "out of memory; close other programs or use a smaller model"
_LOG = logging.getLogger(__name__)
# How each command adds its arguments; commands.toml has its line of help, and examples.
_COMMANDS: dict[str, Callable[[CommandParser], None]] = {
    "chat": add_chat,
    "serve": add_serve,
    "service": add_service,
    "models": add_models,
    "stats": add_stats,
    "preset": add_preset,
    "bench": add_bench,
    "doctor": add_doctor,
    "devices": add_devices,
    "config": add_config,
    "plan": add_plan,
    "export": add_export,
    "pair": add_pair,
    "train": add_train,
    "score": add_score,
    "simulate": add_simulate,
    "completion": add_completion,
}


def main(
    arguments: Sequence[str] | None = None, prepare: Callable[[argparse.Namespace], None] = lambda options: None
) -> int:
    """Run the command of these arguments, or of this process; prepare gets its options first. Its exit code."""
    if arguments is None:
        _keep_stdout_for_data()
        hand_over_soon()
    origins: dict[str, str] = {}  # what the configuration file and the environment set, and where
    try:
        _prepare_streams()
        exit_on_signals()
        options, notes = _parse(arguments, origins)
        is_server = options.command == "serve"
        with log_to_stderr(quiet=options.quiet, verbose=options.verbose, has_times=is_server):
            for line in notes:
                _LOG.debug("%s", line)
            _warn_of_unknown_variables(options.command)
            for line in remarks(options):
                info(line)
            prepare(options)
            code = int(options.run(options) or 0)
        if problem := _stdout_problem():
            raise EdgeSpecError(problem)
        return code
    except SystemExit:  # of --help and of what cannot be parsed
        if problem := _stdout_problem():
            raise SystemExit(_report_failure(problem, EdgeSpecError.exit_code)) from None
        raise
    except EdgeSpecError as error:
        # Where a value that the message quotes was set, if not on the command line.
        message = in_flags(str(error))
        found = dict.fromkeys(origin for quotation, origin in origins.items() if quotation in message)
        return _report_failure(f"{message} ({'; '.join(found)})" if found else message, error.exit_code)
    except KeyboardInterrupt:
        ignore_ctrl_c()  # once is enough
        return _report_failure("interrupted", _INTERRUPTED)
    except MemoryError:
        return _report_failure(_NO_MEMORY, MemoryExhausted.exit_code)
    except RuntimeError as error:
        if str(error) != "can't start new thread":
            raise
        return _report_failure(NO_THREAD, EdgeSpecError.exit_code)
    except OSError as error:
        if has_no_reader(error):
            discard_output(sys.stdout)
            return 0
        if error.errno == errno.ENOMEM:
            discard_output(sys.stdout)
            return _report_failure(_NO_MEMORY, MemoryExhausted.exit_code)
        message = _stdout_problem() or _words_of(error)
        discard_output(sys.stdout)
        return _report_failure(message, EdgeSpecError.exit_code)


def _quotations(name: str, value: object) -> tuple[str, ...]:
    """How messages quote the value of an option: a text in quotes or as a path, a number behind the name."""
    if isinstance(value, str):
        return f"'{value}'", f"file or folder {value} ("
    names = (name, attribute_name(name), f"(--{name})")  # as in "the number of threads (--threads) is 0;"
    return (*(f"{each} is {value};" for each in names), f"{name} is {value}, ")


def _stdout_problem() -> str:
    """The reason why stdout cannot be written; empty where it can, or where its reader has gone."""
    try:
        sys.stdout.flush()
    except OSError as error:
        said = give_up_stdout(error)
        return "" if has_no_reader(error) else said
    return ""


def _keep_stdout_for_data() -> None:
    """Send to stderr what native libraries print to stdout, as QNN's does once it is loaded."""
    try:
        if sys.platform == "win32" and sys.stdout.isatty():  # file 1 is where prompt_toolkit looks for the console
            return
        data = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    except (AttributeError, OSError, ValueError):  # one of them is closed, or no file
        return
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdout = open(data, "w", encoding=encoding, errors=errors, buffering=1 if os.isatty(data) else -1)  # noqa: SIM115


def _prepare_streams() -> None:
    """Replace bytes that are no text, also in UTF-8 for pipes and files on Windows.

    Windows gives these the code page of the system, which lacks most of what a model may write.
    """
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            is_file = sys.platform == "win32" and stream is not sys.stdin and not stream.isatty()
            stream.reconfigure(errors="replace", encoding="utf-8" if is_file else None)


def _words_of(error: OSError) -> str:
    """An error of a file or folder that no other message explains, such as a name that is too long."""
    if not error.filename or not error.strerror:
        return str(error)
    return f"{os.fsdecode(error.filename)} cannot be used ({error.strerror}); name another file or folder"


def _report_failure(message: str, code: int) -> int:
    print_stderr(f"edgespec: {message}")
    return code


def _parse(arguments: Sequence[str] | None, origins: dict[str, str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse a command line with the user's configuration as defaults; return one line for each such default too.

    origins gets what messages quote of these defaults, with what set each.
    """
    given = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if is_asked_by_shell():
        answer_shell(command_parser())
    parser = command_parser(given[0])
    options = parser.parse_args(given)
    if options.command.startswith(("completion", "config", "help")):
        return options, []
    try:
        settings = read_settings()
    except UsageError:
        if options.command != "doctor":  # which reports it
            raise
        settings = {}
    if "color" in settings and settings["color"].value == "never":
        os.environ["NO_COLOR"] = "1"  # which other programs know too
    decided = _preset_options(options, settings)  # which are about this model, come before what is for all
    defaults = {
        name: each
        for name, each in settings.items()
        if options.command in OPTIONS[name].commands and name not in decided
    }
    if defaults:
        options.parser.set_defaults(**{attribute_name(name): each.value for name, each in defaults.items()})
        options = parser.parse_args(given)
    for name, each in defaults.items():
        if not OPTIONS[name].is_secret:
            origins.update(dict.fromkeys(_quotations(name, each.value), f"{name} is set in {each.origin}"))
    options.configured, options.stated = {attribute_name(name) for name in defaults}, stated_flags(options)
    require_consistent(options, {name: each.origin for name, each in defaults.items()})
    shown = {name: "…" if OPTIONS[name].is_secret else each.value for name, each in defaults.items()}
    return options, [f"default of --{name}: {shown[name]} ({each.origin})" for name, each in defaults.items()]


def _preset_options(options: argparse.Namespace, settings: Mapping[str, Setting]) -> Collection[str]:
    """The options that a preset sets, where the command line or the configuration names one as its model."""
    from edgespec.config.presets import PresetFolder

    stated = vars(options)
    name = stated.get("named_model") or stated.get("model")
    if "model" in settings and name == options.parser.get_default("model"):
        name = settings["model"].value
    try:
        preset = PresetFolder(default_home()).find(str(name)) if name else None
    except ModelError:
        if options.command != "doctor":  # which reports it
            raise
        return ()
    return preset.options if preset else ()


def _warn_of_unknown_variables(command: str) -> None:
    if command.startswith(("completion", "help")):
        return
    for line in unknown_variables(os.environ):
        warn(line)


def command_parser(word: str = "") -> CommandParser:
    """The parser of the whole command line, in 15 ms.

    word: The first word given. If it is a command, that alone gets its arguments, in 3 ms; for --help none does.
    """
    texts = read_table(__file__, "commands.toml")
    parser = CommandParser(prog="edgespec", **texts["edgespec"])
    parser.add_argument("--version", action="version", version=f"edgespec {__version__}")
    for name, add_arguments in _COMMANDS.items():
        text = texts[name]
        command = parser.add_command(name, text["what"], epilog=f"examples:\n\n{text['examples']}")
        if more := text.get("more"):
            command.description = f"{command.description}\n\n{more}"
        if word != name and word in (*_COMMANDS, "-h", "--help"):
            continue
        add_arguments(command)
        for leaf in command.leaves():
            if name != "completion":
                leaf.add_argument("--json", action="store_true", help="print one JSON document")
            verbosity = leaf.add_mutually_exclusive_group()
            verbosity.add_argument("-q", "--quiet", action="store_true", help="print problems only")
            verbosity.add_argument("-v", "--verbose", action="store_true", help="explain decisions on stderr")
            leaf.add_argument("--no-supervisor", action="store_true", help=argparse.SUPPRESS)
            leaf.set_defaults(command=leaf.prog.partition(" ")[2], parser=leaf, note=lambda name, value: None)
    about = parser.add_command("help", "print the help of a command")
    about.add_argument("words", metavar="COMMAND", nargs="*", help="such as: models pull")
    about.set_defaults(
        command="help",
        quiet=False,
        verbose=False,
        run=lambda options: parser.parse_args([*options.words, "--help"]),
    )
    return parser
