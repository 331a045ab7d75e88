"""The commands that predict speed: plan, pair check, and simulate for a machine that you do not have."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import edgespec
from edgespec import MAX_FIXED_TOKENS, UsageError
from edgespec.cli.arguments import (
    add_actions,
    add_flags,
    add_option,
    add_options,
    load_arguments,
    model_home,
    print_result,
)
from edgespec.cli.parser import CommandParser
from edgespec.system.console import info
from edgespec.system.tables import read_table

if TYPE_CHECKING:
    from edgespec.simulation.machines import PublishedMachine
    from edgespec.simulation.recording import Recording
    from edgespec.simulation.schedules import Scenario, Speed

# Rounds of Qwen2.5-Coder 1.5B Instruct (Q4_K_M), for which SmolLM2 135M Instruct (Q4_1) drafted 5 tokens each.
RECORDING = Path(__file__).parents[1] / "simulation" / "qwen_smollm2.jsonl"
_PICTURES = (".svg", ".html", ".json")
# Beyond these limits, sums of floats no longer resolve the times.
_SHORTEST_MS, _LONGEST_MS, _DEAREST = 1e-6, 1e9, 1e6


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


def add_simulate(parser: argparse.ArgumentParser) -> None:
    table = read_table(__file__, "simulate.toml")
    add_flags(parser, table["figures"])
    parser.add_argument(
        "--replay",
        type=Path,
        nargs="?",
        const=RECORDING,
        metavar="FILE",
        help="accept and reject drafts as a real pair did: output of `chat --log-rounds`, which also supplies the "
        "figures that are not given; without FILE a recording that comes with edgespec",
    )
    add_flags(parser, table["drawing"])
    parser.set_defaults(run=_simulate)


def _simulate(options: argparse.Namespace) -> None:
    if options.machine == "list":
        _list_machines(options)
        return
    from edgespec.simulation.machines import describe, find_machine
    from edgespec.simulation.schedules import best_possible, simulate, text_acceptance

    if options.drafter_device and not options.machine:
        raise UsageError("--drafter-device belongs to --machine; leave it out, or give --machine")
    machine = find_machine(options.machine) if options.machine else None
    scenario = _scenario(options, machine)
    if options.trace:
        _require_picture(options.trace)
    for line in describe(machine, options.drafter_device) if machine else ():
        info(line)
    if scenario.recording and not options.draft_length:
        info("serial drafts as many tokens as were recorded, which may be too many here: try --draft-length")
    speeds, most = simulate(scenario, info), best_possible(scenario)
    acceptance = scenario.acceptance if scenario.recording else text_acceptance(scenario)
    plain = speeds["plain"].tokens_per_second
    lines = [
        f"{name:<10}{speed.tokens_per_second:8.2f} tokens/s   {speed.tokens_per_second / plain:5.2f} × plain   "
        f"{speed.tokens_per_pass:.2f} tokens per pass"
        for name, speed in speeds.items()
    ]
    sampled = "" if scenario.recording else f"; {acceptance:.3f} of the drafted tokens were right in these runs"
    lines.append(f"{'bound':<10}{most:8.2f} tokens/s   with chain drafts and both devices always busy{sampled}")
    if options.trace:
        title = machine.title if machine else f"target {1e3 * scenario.machine.target_s:g} ms a pass, drafter "
        title += "" if machine else f"{1e3 * scenario.machine.draft_s:g} ms a token"
        _draw(options.trace, scenario, speeds, title, lines)
    figures = {name: speed._asdict() for name, speed in speeds.items()}
    origin = {"machine": asdict(machine)} if machine else {}
    print_result(options, {**figures, "bound": most, "acceptance": acceptance, **origin}, *lines)


def _list_machines(options: argparse.Namespace) -> None:
    from edgespec.simulation.machines import describe, read_machines

    machines = read_machines()
    lines = ["\n".join([name, *describe(machine, None), ""]) for name, machine in machines.items()]
    print_result(options, {name: asdict(machine) for name, machine in machines.items()}, *lines)


def _require_picture(path: Path) -> None:
    """Raises UsageError: The file would be no picture, perhaps a recording to be replayed, or has no folder."""
    if path.suffix not in _PICTURES:
        raise UsageError(
            f"--trace is {path}; wanted a file to draw into that ends in {', '.join(_PICTURES)} "
            f"(to replay what `chat --log-rounds` wrote: --replay {path})"
        )
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.parent}; make it, or give another path")


def _draw(
    path: Path, scenario: "Scenario", speeds: "Mapping[str, Speed]", title: str, lines: Sequence[str]
) -> None:
    from edgespec.simulation.lane_picture import draw, observe, page

    runs = [observe(scenario, schedule) for schedule in speeds]
    picture = draw(runs, {name: speed.tokens_per_second for name, speed in speeds.items()}, title)
    intervals = [each for run in runs for each in run.intervals()]
    documents = {
        ".svg": lambda: picture,
        ".html": lambda: page(picture, title, lines),
        ".json": lambda: json.dumps(edgespec.chrome_trace(intervals)),
    }
    try:
        path.write_text(documents[path.suffix](), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    info(f"drew {path}")


def _scenario(options: argparse.Namespace, machine: "PublishedMachine | None") -> "Scenario":
    from edgespec.simulation.machines import Machine
    from edgespec.simulation.recording import read_recording
    from edgespec.simulation.schedules import Scenario

    _require_in_range(options)
    recording = read_recording(options.replay) if options.replay else None
    figures = {name: getattr(options, name) for name in ("target_ms", "draft_ms", "acceptance")}
    known: dict[str, float | None] = {}
    if recording:
        if options.acceptance is not None and recording.acceptance is not None:
            raise UsageError(
                f"--acceptance is {options.acceptance}, but {options.replay} records which drafts were kept; "
                "leave out --acceptance, or leave out --replay and give --target-ms and --draft-ms"
            )
        known = {
            "target_ms": recording.verify_ms.get(0),
            "draft_ms": recording.draft_ms,
            "acceptance": recording.acceptance,
        }
    if machine:
        devices = machine.devices(options.drafter_device)
        known = {"acceptance": machine.acceptance.value, **known}
        known |= {"target_ms": 1e3 * devices.target_s, "draft_ms": 1e3 * devices.draft_s}
    figures = {name: known.get(name) if given is None else given for name, given in figures.items()}
    if missing := [_flag(name) for name, figure in figures.items() if figure is None]:
        found = f"{options.replay} does not record" if recording else "missing:"
        raise UsageError(f"{found} {', '.join(missing)}; give {' and '.join(missing)}, or --machine")
    target_s, draft_s = (max(_SHORTEST_MS, figures[name] or 0.0) / 1e3 for name in ("target_ms", "draft_ms"))
    if options.verify_cost is not None:
        ratios = _parse_ratios(options.verify_cost)
    elif machine:
        ratios = tuple(devices.ratios)
    else:
        ratios = _recorded_ratios(recording, target_s) if recording else (1.0,)
    return Scenario(
        machine=Machine(target_s=target_s, draft_s=draft_s, ratios=ratios),
        acceptance=figures["acceptance"] or 0.0,
        draft_length=options.draft_length,
        recording=recording,
    )


def _require_in_range(options: argparse.Namespace) -> None:
    ranges = {
        "target_ms": (_SHORTEST_MS, _LONGEST_MS),
        "draft_ms": (_SHORTEST_MS, _LONGEST_MS),
        "acceptance": (0, 1),
        "draft_length": (1, MAX_FIXED_TOKENS),
    }
    for name, (low, high) in ranges.items():
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            raise UsageError(f"{_flag(name)} is {value}; wanted a number from {low:g} to {high:g}")


def _parse_ratios(text: str) -> tuple[float, ...]:
    try:
        ratios = tuple(map(float, text.split(",")))
    except ValueError:
        ratios = ()
    if not ratios or ratios[0] != 1 or not all(0 < ratio <= _DEAREST for ratio in ratios):
        raise UsageError(f"--verify-cost is '{text}'; wanted numbers such as 1,1.03,1.05, the first of them 1")
    return ratios


def _recorded_ratios(recording: "Recording", target_s: float) -> tuple[float, ...]:
    taken_s = {num_draft + 1: taken_ms / 1e3 for num_draft, taken_ms in recording.verify_ms.items()}
    costs = edgespec.pass_costs({**taken_s, 1: target_s})
    return tuple(costs.ratio(width) for width in range(1, MAX_FIXED_TOKENS + 2))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
