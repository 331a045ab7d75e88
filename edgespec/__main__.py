"""The command. Ctrl-C ends it with its code also while its parts are still being imported."""

import sys


def main() -> int:
    """Run the command that this process was started with, and return its exit code."""
    try:
        from edgespec.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("edgespec: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
