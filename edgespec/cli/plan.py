"""The commands that predict speed: plan, for a model on this machine, and pair check, for a drafter."""

import argparse
from dataclasses import asdict

import edgespec
from edgespec.cli.arguments import add_actions, add_option, add_options, load_arguments, model_home, print_result
from edgespec.cli.parser import CommandParser
from edgespec.system.console import info
from edgespec.system.tables import read_table


def add_plan(parser: CommandParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="the target: a model, as for chat")
    add_option(parser, "drafter")
    parser.add_argument("--measure", action="store_true", help="repeat all measurements, also on separate cores")
    add_options(parser)
    parser.show_first("--drafter", "--measure", "--device", "--drafter-device", "--memory", "--offline", "--json")
    parser.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> None:
    wish = edgespec.Wish(**load_arguments(options), drafter=options.drafter)
    document = edgespec.plan_document(wish, remeasure=options.measure)
    print_result(options, document, edgespec.plan_in_words(document))


def add_pair(parser: CommandParser) -> None:
    add_actions(parser, read_table(__file__, "plan.toml"), {"check": _pair_check})


def _pair_check(options: argparse.Namespace) -> None:
    devices = {"device": options.device, "drafter_device": options.drafter_device}
    how = {**devices, "offline": options.offline, "report": info}
    home = model_home(offline=options.offline)
    if options.drafter is not None:
        check = edgespec.check_pair(options.target, options.drafter, **how)
    elif (folder := home.pair_folder(options.target)) is not None:
        check = edgespec.check_pair(str(folder), **how)
    else:
        document = edgespec.ranking_document(edgespec.rank_for_model(home, options.target, **devices))
        print_result(options, document, edgespec.ranking_in_words(document))
        return
    print_result(options, asdict(check), check.in_words())
