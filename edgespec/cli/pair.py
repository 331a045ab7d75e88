"""The command that checks pairs, and ranks what could be one: pair check."""

import argparse
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.cli.arguments import add_options, model_home, print_result
from edgespec.cli.parser import CommandParser
from edgespec.system.console import info

if TYPE_CHECKING:
    from edgespec.models.home import ModelHome
    from edgespec.models.pair import PairCheck


def add_pair(parser: CommandParser) -> None:
    """Add the commands below pair, and their arguments."""
    check = parser.add_command(
        "check",
        "compare their tokens, and measure how much faster the drafter makes the target; without a drafter, rank "
        "those that there are",
    )
    check.add_argument("target", metavar="TARGET", help="a model, as for chat")
    check.add_argument(
        "drafter",
        metavar="DRAFTER",
        nargs="?",
        help="a smaller model, which guesses tokens for the target. Without it a pair folder is measured, which "
        "records the result; for any other TARGET all that could draft for it is ranked, and nothing is run",
    )
    add_options(check)
    check.set_defaults(run=_pair_check)


def _pair_check(options: argparse.Namespace) -> None:
    from edgespec.engine.pair_check import check_pair

    devices = {"device": options.device, "drafter_device": options.drafter_device}
    how = {**devices, "offline": options.offline, "report": info}
    home = model_home(offline=options.offline)
    if options.drafter is not None:
        check = check_pair(options.target, options.drafter, **how)
    elif (folder := _pair_folder(home, options.target)) is not None:
        check = check_pair(str(folder), **how)
    else:
        _print_ranking(options, home, devices)
        return
    print_result(options, asdict(check), format_pair(check))


def _pair_folder(home: "ModelHome", target: str) -> Path | None:
    """The pair folder that a user names, also one without its pair.json; None where it is something else."""
    from edgespec.models.pair import is_pair, lacks_pair_file

    folder = home.fixed_folder(target) or Path(target)
    with suppress(OSError, ValueError):  # the name of no folder, which is reported as that of a model
        return folder if is_pair(folder) or lacks_pair_file(folder) else None
    return None


def _print_ranking(options: argparse.Namespace, home: "ModelHome", devices: dict[str, str]) -> None:
    from edgespec.engine.drafter_choice import rank_for_model
    from edgespec.planning.drafter_ranking import ranking_document, ranking_in_words

    document = ranking_document(rank_for_model(home, options.target, **devices))
    print_result(options, document, ranking_in_words(document))


def format_pair(check: "PairCheck") -> str:
    """The check of a pair as lines for a person."""
    return (
        f"{check.drafter} drafting for {check.target}: {check.verdict}\n"
        f"  why               {check.reason}\n"
        f"  tokens accepted   {check.greedy_acceptance:.0%} greedy, "
        f"{check.sampled_acceptance:.0%} at temperature 1\n"
        f"  expected speed    {check.expected_gain:.2f} × plain decoding, "
        f"with {check.num_draft} tokens per draft\n"
        f"  special tokens    {'identical' if check.same_special_tokens else 'different'}\n"
        f"  chat templates    {'identical' if check.same_chat_template else 'different'}"
    )
