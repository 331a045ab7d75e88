"""The command that checks pairs: pair check."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.cli.arguments import add_options, model_home, print_result
from edgespec.cli.parser import CommandParser
from edgespec.system.console import info

if TYPE_CHECKING:
    from edgespec.models.pair import PairCheck


def add_pair(parser: CommandParser) -> None:
    check = parser.add_command(
        "check", "compare their tokens, and measure how much faster the drafter makes the target"
    )
    check.add_argument("target", metavar="TARGET", help="a model, as for chat")
    check.add_argument(
        "drafter",
        metavar="DRAFTER",
        nargs="?",
        help="a smaller model, which guesses tokens for the target; none where TARGET is a pair folder, which "
        "then records what was measured",
    )
    add_options(check)
    check.set_defaults(run=_pair_check)


def _pair_check(options: argparse.Namespace) -> None:
    from edgespec.evaluation.pairing import check_folder, check_pair

    how = {
        "device": options.device,
        "drafter_device": options.drafter_device,
        "offline": options.offline,
        "report": info,
    }
    if options.drafter is None:
        folder = model_home(offline=options.offline).fixed_folder(options.target) or Path(options.target)
        check = check_folder(folder, **how)
    else:
        check = check_pair(options.target, options.drafter, **how)
    print_result(options, asdict(check), format_pair(check))


def format_pair(check: "PairCheck") -> str:
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
