"""What the command lines of the benchmarks share."""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence


def command_line(description: str | None) -> ArgumentParser:
    """A parser whose help shows the description as it is laid out."""
    return ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments before "--", and those after it, which are for another program."""
    own = list(arguments)
    return (own[: own.index("--")], own[own.index("--") + 1 :]) if "--" in own else (own, [])


def parse_ways(parser: ArgumentParser, stated: str, known: Sequence[str]) -> list[str]:
    """The names in a list with commas; an unknown one ends the program with a usage error."""
    ways = stated.split(",")
    if unknown := [way for way in ways if way not in known]:
        parser.error(f"--ways has {unknown[0]}; wanted some of {', '.join(known)}")
    return ways
