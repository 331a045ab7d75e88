"""The entry point of the command line. Ctrl-C gives the right exit code even while modules are being imported."""

import os
import signal
import sys

_STOPPED = (130, 143, 129)  # by Ctrl-C, SIGTERM, SIGHUP


def main() -> int:
    """Run the command that this process was started with, and return its exit code, or end with it."""
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see edgespec_command
            signal.signal(signal.SIGINT, signal.default_int_handler)
        _open_closed_streams()
        code = _run()
    except KeyboardInterrupt:
        print("edgespec: interrupted", file=sys.stderr)
        code = _STOPPED[0]
    except SystemExit as end:
        if end.code not in _STOPPED:
            raise
        code = int(end.code)
    if code in _STOPPED:
        _leave(code)
    return code


def _open_closed_streams() -> None:
    """Give what the caller closed of stdin, stdout and stderr the null device; to write to such a stdout fails.

    Else the next files that are opened would take its place, and native code would print into them.
    """
    for name, flags, mode in (
        ("stdin", os.O_RDONLY, "r"),
        ("stdout", os.O_RDONLY, "w"),
        ("stderr", os.O_WRONLY, "w"),
    ):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, flags)  # the lowest that is free
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def _run() -> int:
    # The library would start a thread for each core, of which a call with one text uses none.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from edgespec.cli.supervisor import WORKER, supervise, supervised_command

    if WORKER in os.environ:
        from edgespec.cli.worker import run_worker as run
    elif command := supervised_command(sys.argv[1:]):
        return supervise(command)
    else:
        from edgespec.cli.main import main as run
    return run()


def _leave(code: int) -> None:
    """End here, and leave threads alone that are still within native code.

    Python's own end frees what they use, and the process aborts: "terminate called without an active exception".
    """
    import atexit

    try:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (OSError, ValueError, KeyboardInterrupt):  # the reader has left, or Ctrl-C once more
        pass
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
