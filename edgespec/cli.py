"""The command line: arguments in, an exit code out. What a command does lives in the modules it calls.

Data goes to stdout, talk to stderr; --json prints one document. Exit codes are those of errors.py, 130
after an interrupt.
"""

import argparse
import errno
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from edgespec import __version__
from edgespec.arguments import add_talk
from edgespec.bench_command import add_bench
from edgespec.chat_command import add_chat
from edgespec.completion_command import add_completion
from edgespec.config_command import add_config
from edgespec.devices_command import add_devices
from edgespec.doctor_command import add_doctor
from edgespec.errors import EdgeSpecError, MemoryExhausted, UsageError
from edgespec.export_command import add_export, add_pair
from edgespec.models_command import add_models
from edgespec.options import OPTIONS
from edgespec.parser import CommandParser
from edgespec.plan_command import add_plan
from edgespec.score_command import add_score
from edgespec.simulate_command import add_simulate
from edgespec.supervisor import can_fork
from edgespec.talk import drop, heard, say, say_problem
from edgespec.worker import run_in_worker

_INTERRUPTED = 130
# Commands that run native code which others may have brought.
_SUPERVISED = ("bench", "chat", "devices", "doctor", "export", "models pull", "pair check", "plan", "score")
_NO_MEMORY = "out of memory; close other programs or use a smaller model"
_LOG = logging.getLogger(__name__)
_CODES = """\
exit codes: 0 done, 1 failure, 2 usage, 3 model missing or invalid, 4 device unavailable, 5 out of memory, \
6 integrity refused, 7 context overflow, 130 interrupted

Help of a command: edgespec COMMAND --help. Options that you always give: edgespec config set KEY VALUE."""


class _Command(NamedTuple):
    """help stands in the list of commands and above its own help; examples below that."""

    add: Callable[[CommandParser], None]
    help: str
    examples: str


_COMMANDS = {
    "chat": _Command(
        add_chat,
        "talk to a model, or answer one prompt",
        """\
  edgespec chat                                       the default model, fetched and prepared on first use
  edgespec chat --prompt "Why is the sky blue?"       one answer
  git diff | edgespec chat --system "Write a commit message for this change."
  edgespec chat big-model --drafter small-model       drafts with a smaller model
  edgespec chat my-model --temperature 0.8 --seed 7   sampled; the same text for the same seed
  edgespec chat my-model --prompt "Hello" --json      the answer and its figures as one document""",
    ),
    "export": _Command(
        add_export,
        "turn a GGUF file, a safetensors folder or a hub id into a model folder",
        """\
  edgespec export model.gguf --output my-model                    the file's own precision
  edgespec export Qwen/Qwen2.5-0.5B-Instruct --output my-model --precision int8
  edgespec export big.gguf --drafter small.gguf --output pair     both, judged, in one folder
  edgespec export model.gguf --output my-model --dry-run          only say what it would take""",
    ),
    "pair": _Command(
        add_pair,
        "judge a target and a drafter",
        "  edgespec pair check big-model small-model   same tokens? what does drafting gain here, and why?",
    ),
    "models": _Command(
        add_models,
        "list, fetch, verify or remove prepared models",
        """\
  edgespec models list
  edgespec models pull smollm2-135m
  edgespec models verify          every file against its hash, offline
  edgespec models remove smollm2-135m""",
    ),
    "plan": _Command(
        add_plan,
        "who is to run where, in which schedule, and how fast that will be",
        """\
  edgespec plan big-model --drafter small-model             from what is known; the first time it measures
  edgespec plan big-model --drafter small-model --measure   anew, and with cores of their own""",
    ),
    "bench": _Command(
        add_bench,
        "compare speculation with plain decoding on your prompts",
        "  edgespec bench smollm2-135m --prompts prompts.jsonl   JSON Lines with prompt, or with turns",
    ),
    "score": _Command(
        add_score,
        "measure how well a model predicts a text",
        "  edgespec score my-model --file text.txt   nats a token",
    ),
    "devices": _Command(
        add_devices,
        "which devices there are, which can be used, and what mends the others",
        "  edgespec devices --json",
    ),
    "doctor": _Command(
        add_doctor,
        "what is installed here, and whether speculation is exact",
        """\
  edgespec doctor                            versions, devices, memory, and a short test of a prepared model
  edgespec doctor --exactness smollm2-135m   speculative text against plain text, token by token""",
    ),
    "simulate": _Command(
        add_simulate,
        "what two devices would yield, from figures or from a trace of a pair",
        """\
  edgespec simulate --target-ms 82 --draft-ms 9.4 --acceptance 0.54 --verify-cost 1,1.03,1.05,1.08
  edgespec simulate --trace rounds.jsonl --draft-ms 34   the rounds of chat --log-rounds, on a slower drafter""",
    ),
    "completion": _Command(
        add_completion,
        "print what completes commands, options and names of models in your shell",
        """\
  source <(edgespec completion bash)                        in ~/.bashrc
  source <(edgespec completion zsh)                         in ~/.zshrc, after compinit
  edgespec completion fish | source                         in ~/.config/fish/config.fish""",
    ),
    "config": _Command(
        add_config,
        "show or change what you have set for good",
        """\
  edgespec config                        every option, its value and where that comes from
  edgespec config set threads 4
  edgespec config unset threads
  EDGESPEC_DEVICE=cpu edgespec chat      for one command; a flag comes before a variable, that before the file""",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if arguments is None:
        _keep_stdout_for_data()
    try:
        _prepare_streams()
        for name in ("SIGTERM", "SIGHUP"):  # the latter where there are terminals to close
            if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) != signal.SIG_IGN:
                signal.signal(getattr(signal, name), _terminate)
        options, told = _parse(arguments)
        with heard(quiet=options.quiet, verbose=options.verbose):
            for line in told:
                _LOG.debug("%s", line)
            _tell_unknown(options.command)
            is_supervised = arguments is None and options.command in _SUPERVISED and not options.no_supervisor
            code = run_in_worker(options) if is_supervised and can_fork() else int(options.run(options))
        sys.stdout.flush()
        return code
    except SystemExit as end:  # of --help and of what cannot be parsed
        return _flushed(end)
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
        if error.errno == errno.ENOMEM:
            drop(sys.stdout)
            return _failed(_NO_MEMORY, MemoryExhausted.exit_code)
        message = _stdout_problem() or str(error)
        drop(sys.stdout)
        return _failed(message, EdgeSpecError.exit_code)


def _flushed(end: SystemExit) -> NoReturn:
    """Raises SystemExit: with another code where stdout cannot be written."""
    if problem := _stdout_problem():
        raise SystemExit(_failed(problem, EdgeSpecError.exit_code)) from None
    raise end


def _stdout_problem() -> str:
    """Why stdout cannot be written, in words; "" where it can, or nobody reads. What it holds is let go then."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        drop(sys.stdout)
    except OSError as error:
        drop(sys.stdout)
        return f"cannot write to stdout ({error.strerror})"
    return ""


def _keep_stdout_for_data() -> None:
    """What providers' libraries print on their own goes to stderr: QNN's does, once it is loaded."""
    try:
        data = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    except (AttributeError, OSError, ValueError):  # one of them is closed, or no file
        return
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdout = open(data, "w", encoding=encoding, errors=errors, buffering=1 if os.isatty(data) else -1)  # noqa: SIM115


def _prepare_streams() -> None:
    """Bytes that are no text are replaced, and a stream that was closed by the caller is the null device."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _terminate(number: int, frame: object) -> NoReturn:
    """Unwinds like an error, so that nothing half written stays; once is enough."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _failed(message: str, code: int) -> int:
    say(f"edgespec: {message}")
    return code


def _parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """What is to be done, with what the user has set for good, and of that a line each.

    Raises:
        UsageError: Something was set that cannot be meant.
    """
    parser = command_parser()
    options = parser.parse_args(arguments)
    if options.command.startswith(("completion", "config", "help")):
        return options, []
    from edgespec.config import settings

    try:
        found = settings()
    except UsageError:
        if options.command != "doctor":  # which reports it
            raise
        found = {}
    if "color" in found and found["color"].value == "never":
        os.environ["NO_COLOR"] = "1"  # which other programs know too
    taken = {name: each for name, each in found.items() if options.command in OPTIONS[name].commands}
    if taken:
        defaults = {name.replace("-", "_"): each.value for name, each in taken.items()}
        options.parser.set_defaults(**defaults)
        options = parser.parse_args(arguments)
    return options, [
        f"unless a flag says otherwise {name} is {each.value} ({each.origin})" for name, each in taken.items()
    ]


def _tell_unknown(command: str) -> None:
    """Of variables that are misspelt, most likely."""
    if command.startswith(("completion", "help")):
        return
    from edgespec.config import unknown_variables

    for line in unknown_variables(os.environ):
        say_problem(line)


def command_parser() -> CommandParser:
    """Of all commands."""
    parser = CommandParser(
        prog="edgespec",
        description="Run language models on this machine, speculatively and exactly.",
        epilog=_CODES,
    )
    parser.add_argument("--version", action="version", version=f"edgespec {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        added = commands.add_parser(
            name,
            help=command.help,
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            epilog=f"examples:\n\n{command.examples}",
        )
        command.add(added)
        for leaf in added.leaves():
            add_talk(leaf)
            leaf.add_argument("--no-supervisor", action="store_true", help=argparse.SUPPRESS)
            leaf.set_defaults(command=leaf.prog.partition(" ")[2], parser=leaf, note=lambda name, value: None)
    about = commands.add_parser("help", help="the help of a command")
    about.add_argument("words", metavar="COMMAND", nargs="*")
    about.set_defaults(
        command="help", quiet=False, verbose=False, run=lambda options: _help(parser, options.words)
    )
    return parser


def _help(parser: CommandParser, words: Sequence[str]) -> int:
    parser.parse_args([*words, "--help"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
