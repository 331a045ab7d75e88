"""The command that says what schedules would yield on a machine that one does not own."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.errors import UsageError
from edgespec.talk import say_stage

if TYPE_CHECKING:
    from edgespec.recording import Recording
    from edgespec.simulation import Scenario

_LONGEST_DRAFT = 64
# Beyond these sums of floats are no times any more.
_SHORTEST_MS, _LONGEST_MS, _DEAREST = 1e-6, 1e9, 1e6
_NEEDED = ("target_ms", "draft_ms", "acceptance")


def add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target-ms", type=float, metavar="T", help="milliseconds of a pass of the target over one token"
    )
    parser.add_argument("--draft-ms", type=float, metavar="D", help="milliseconds of a drafted token")
    parser.add_argument(
        "--acceptance", type=float, metavar="A", help="the chance that a token is kept, if all before it were"
    )
    parser.add_argument(
        "--draft-length", type=int, metavar="N", help="tokens a draft in sequence (default: what pays best)"
    )
    parser.add_argument(
        "--verify-cost",
        metavar="1,R,…",
        help="passes over 1, 2, … tokens, in passes over one; the last step goes on (default: all cost the same)",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="rounds of a real pair, as chat --log-rounds writes them: they say what is not given here",
    )
    parser.add_argument("--json", action="store_true", help="print one document")
    parser.set_defaults(run=_simulate)


def _simulate(options: argparse.Namespace) -> int:
    from edgespec.simulation import best_possible, drawn_acceptance, simulate

    scenario = _scenario(options)
    speeds, most = simulate(scenario, say_stage), best_possible(scenario)
    acceptance = scenario.acceptance if scenario.recording else drawn_acceptance(scenario)
    if options.json:
        print(
            json.dumps(
                {
                    **{name: speed._asdict() for name, speed in speeds.items()},
                    "bound": most,
                    "acceptance": acceptance,
                }
            )
        )
        return 0
    for name, speed in speeds.items():
        gain = speed.tokens_per_second / speeds["plain"].tokens_per_second
        print(
            f"{name:<10}{speed.tokens_per_second:8.2f} tokens/s   {gain:5.2f} × plain   "
            f"{speed.tokens_per_pass:.2f} tokens a pass"
        )
    drawn = "" if scenario.recording else f"; {acceptance:.3f} of them were right in these runs"
    print(f"{'bound':<10}{most:8.2f} tokens/s   with drafts in a chain and both devices always at work{drawn}")
    return 0


def _scenario(options: argparse.Namespace) -> "Scenario":
    """Raises UsageError: Neither the command line nor a trace says all that is needed, or one cannot be meant."""
    from edgespec.machine import Machine
    from edgespec.recording import read_recording
    from edgespec.simulation import Scenario

    _expect_sound(options)
    recording = read_recording(options.trace) if options.trace else None
    figures = {name: getattr(options, name) for name in _NEEDED}
    if recording:
        if options.acceptance is not None and recording.acceptance is not None:
            raise UsageError(
                f"--acceptance is {options.acceptance}, but {options.trace} tells which drafts were kept; wanted "
                "one of the two: leave out --acceptance, or leave out --trace and give --target-ms and --draft-ms"
            )
        recorded = {
            "target_ms": recording.verify_ms.get(0),
            "draft_ms": recording.draft_ms,
            "acceptance": recording.acceptance,
        }
        figures = {name: recorded[name] if given is None else given for name, given in figures.items()}
    if missing := [_option(name) for name, figure in figures.items() if figure is None]:
        found = f"{options.trace} does not tell" if recording else "no --trace tells"
        raise UsageError(f"{found} {', '.join(missing)}; give {' and '.join(missing)}")
    figures["target_ms"], figures["draft_ms"] = (max(_SHORTEST_MS, figures[name]) for name in _NEEDED[:2])
    target_s, draft_s = figures["target_ms"] / 1e3, figures["draft_ms"] / 1e3
    if options.verify_cost is not None:
        ratios = _ratios(options.verify_cost)
    else:
        ratios = _recorded_ratios(recording, target_s) if recording else (1.0,)
    return Scenario(
        machine=Machine(target_s=target_s, draft_s=draft_s, ratios=ratios),
        acceptance=figures["acceptance"],
        draft_length=options.draft_length,
        recording=recording,
    )


def _expect_sound(options: argparse.Namespace) -> None:
    for name in ("target_ms", "draft_ms"):
        value = getattr(options, name)
        if value is not None and not _SHORTEST_MS <= value <= _LONGEST_MS:
            raise UsageError(
                f"{_option(name)} is {value}; wanted milliseconds from {_SHORTEST_MS:g} to {_LONGEST_MS:g}"
            )
    if options.acceptance is not None and not 0 <= options.acceptance <= 1:
        raise UsageError(f"--acceptance is {options.acceptance}; wanted a number from 0 to 1")
    if options.draft_length is not None and not 1 <= options.draft_length <= _LONGEST_DRAFT:
        raise UsageError(f"--draft-length is {options.draft_length}; wanted 1 to {_LONGEST_DRAFT}")


def _ratios(text: str) -> tuple[float, ...]:
    try:
        ratios = tuple(map(float, text.split(",")))
    except ValueError:
        ratios = ()
    if not ratios or ratios[0] != 1 or not all(0 < ratio <= _DEAREST for ratio in ratios):
        raise UsageError(f"--verify-cost is '{text}'; wanted numbers such as 1,1.03,1.05, the first of them 1")
    return ratios


def _recorded_ratios(recording: "Recording", target_s: float) -> tuple[float, ...]:
    from edgespec.costs import measured

    taken_s = {num_draft + 1: taken_ms / 1e3 for num_draft, taken_ms in recording.verify_ms.items()}
    costs = measured({**taken_s, 1: target_s})
    return tuple(costs.ratio(width) for width in range(1, _LONGEST_DRAFT + 2))


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
