"""The command line: arguments in, an exit code out. What a command does lives in the modules it calls.

Data goes to stdout, talk to stderr; --json prints one document. Exit codes are those of errors.py, 130
after an interrupt.
"""

import argparse
import errno
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from edgespec import __version__
from edgespec.bench_command import add_bench
from edgespec.chat_command import add_chat
from edgespec.doctor_command import add_doctor
from edgespec.errors import EdgeSpecError, MemoryExhausted
from edgespec.export_command import add_export, add_pair
from edgespec.models_command import add_models
from edgespec.plan_command import add_plan
from edgespec.score_command import add_score
from edgespec.simulate_command import add_simulate
from edgespec.talk import drop, say_stage

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
    add_chat(commands.add_parser("chat", help="talk to a model, or answer one prompt"))
    add_export(
        commands.add_parser(
            "export", help="turn a GGUF file, a safetensors folder or a hub id into a model folder"
        )
    )
    add_pair(commands.add_parser("pair", help="judge a target and a drafter"))
    add_models(commands.add_parser("models", help="list, fetch, verify or remove prepared models"))
    add_plan(commands.add_parser("plan", help="who is to run where, in which schedule, and how fast that will be"))
    add_score(commands.add_parser("score", help="measure how well a model predicts a text"))
    add_doctor(commands.add_parser("doctor", help="what is installed here, and whether speculation is exact"))
    add_bench(commands.add_parser("bench", help="compare speculation with plain decoding on your prompts"))
    add_simulate(
        commands.add_parser(
            "simulate", help="what two devices would yield, from figures or from a trace of a pair"
        )
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
