"""The command that predicts how fast each schedule would be on a machine that you do not have."""

import argparse
from typing import TYPE_CHECKING

from edgespec.cli.arguments import add_count, add_file, print_result
from edgespec.errors import UsageError
from edgespec.policy.limits import MAX_FIXED_TOKENS
from edgespec.system.console import info

if TYPE_CHECKING:
    from edgespec.simulation.recording import Recording
    from edgespec.simulation.schedules import Scenario

# Beyond these limits, sums of floats no longer resolve the times.
_SHORTEST_MS, _LONGEST_MS, _DEAREST = 1e-6, 1e9, 1e6


def add_simulate(parser: argparse.ArgumentParser) -> None:
    figures = {
        "--target-ms": ("T", "milliseconds per target pass over one token"),
        "--draft-ms": ("D", "milliseconds per drafted token"),
        "--acceptance": ("A", "probability from 0 to 1 that a token is kept if all drafted before it were"),
    }
    for flag, (metavar, what) in figures.items():
        parser.add_argument(flag, type=float, metavar=metavar, help=what)
    add_count(parser, "--draft-length", "tokens per serial draft (default: the fastest length)")
    parser.add_argument(
        "--verify-cost",
        metavar="1,R,…",
        help="time of a pass over 1, 2, … tokens, relative to a pass over one; the last increase is repeated for "
        "longer passes (default: all passes take equally long)",
    )
    add_file(parser, "--trace", "output of `chat --log-rounds`; supplies the figures that are not given")
    parser.set_defaults(run=_simulate)


def _simulate(options: argparse.Namespace) -> None:
    from edgespec.simulation.schedules import best_possible, simulate, text_acceptance

    scenario = _scenario(options)
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
    figures = {name: speed._asdict() for name, speed in speeds.items()}
    print_result(options, {**figures, "bound": most, "acceptance": acceptance}, *lines)


def _scenario(options: argparse.Namespace) -> "Scenario":
    from edgespec.simulation.device_pair import Machine
    from edgespec.simulation.recording import read_recording
    from edgespec.simulation.schedules import Scenario

    _require_in_range(options)
    recording = read_recording(options.trace) if options.trace else None
    figures = {name: getattr(options, name) for name in ("target_ms", "draft_ms", "acceptance")}
    if recording:
        if options.acceptance is not None and recording.acceptance is not None:
            raise UsageError(
                f"--acceptance is {options.acceptance}, but {options.trace} records which drafts were kept; "
                "leave out --acceptance, or leave out --trace and give --target-ms and --draft-ms"
            )
        recorded = {
            "target_ms": recording.verify_ms.get(0),
            "draft_ms": recording.draft_ms,
            "acceptance": recording.acceptance,
        }
        figures = {name: recorded[name] if given is None else given for name, given in figures.items()}
    if missing := [_flag(name) for name, figure in figures.items() if figure is None]:
        found = f"{options.trace} does not record" if recording else "missing:"
        raise UsageError(f"{found} {', '.join(missing)}; give {' and '.join(missing)}")
    target_s, draft_s = (max(_SHORTEST_MS, figures[name]) / 1e3 for name in ("target_ms", "draft_ms"))
    if options.verify_cost is not None:
        ratios = _parse_ratios(options.verify_cost)
    else:
        ratios = _recorded_ratios(recording, target_s) if recording else (1.0,)
    return Scenario(
        machine=Machine(target_s=target_s, draft_s=draft_s, ratios=ratios),
        acceptance=figures["acceptance"],
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
    from edgespec.policy.costs import pass_costs

    taken_s = {num_draft + 1: taken_ms / 1e3 for num_draft, taken_ms in recording.verify_ms.items()}
    costs = pass_costs({**taken_s, 1: target_s})
    return tuple(costs.ratio(width) for width in range(1, MAX_FIXED_TOKENS + 2))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
