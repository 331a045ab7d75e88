"""The first module of the console command: Ctrl-C while the package is imported ends the process without a word.

It lies beside the package, as Python would import all of `edgespec` first.
"""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell shows it as exit code 130


def main() -> int:
    """Run the command that this process was started with; its exit code. Ctrl-C is its own from here on."""
    from edgespec.__main__ import main as run

    return run()
