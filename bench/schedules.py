"""Tokens a second of the schedules on two paced devices, on a grid of draft costs and acceptance rates.

    python bench/schedules.py [--rows flat|a100] [--repeat N] [--virtual] [--steps C,…] [--acceptances A,…]

Rows are c, the time of a drafted token in passes of the target; columns are a, the chance that a drafted token is
accepted. Target and drafter are synthetic and sleep as long as a device would compute: in two real threads, or
with --virtual under a virtual clock, where nothing but the devices takes time. The grid takes some 4 minutes.

Printed are the tokens in the time of a pass with the best fixed draft length in sequence; the speed of drafting
ahead and of hedging relative to it; and wall time relative to the ideal: the time that the decisions of that run
take under the virtual clock. A ratio of speeds is the ratio of virtual runs, divided by what real runs took more
than the virtual ones: a short real run measures time well and acceptance badly.

Targets, pipelined and hedged: wall time at most 1.03 of the ideal; at least 0.98 of the best in sequence
everywhere, and 1.25 and 1.56 at c = 0.3, a = 0.8. The exit code is 1 where one is missed.
"""

import json
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from command_line import command_line
from decisions import Calls, RecordedDrafter, ReplayPolicy
from real_pace import real_devices

from edgespec.config.drafter_names import MAX_DRAFT_TOKENS
from edgespec.decoding.scheduler import DraftPolicy
from edgespec.draft.drafter import Drafter
from edgespec.draft.overlap import best_serial
from edgespec.simulation.machines import Machine
from edgespec.simulation.schedules import Scenario, policy_for, run, virtual_devices
from edgespec.system.console import print_stderr

STEPS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
ACCEPTANCES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
# Time of a pass by its width. A further token takes 3 % of a step, or what ONNX Runtime's table of its kernels on
# an A100 says (docs/contrib_ops/cuda/matmul_nbits_small_m_experiments.md), summed over an 8B model's matrices.
ROWS = {"free": {1: 1.0}, "flat": {1: 1.0, 2: 1.03}, "a100": {1: 1.0, 2: 1.19, 4: 1.39, 8: 2.0, 16: 3.3}}
MIDDLE = (0.3, 0.8)
SCHEDULES = ("serial", "pipelined", "hedged")
WANTED = {"pipelined": 0.98, "hedged": 0.98}
WANTED_IN_THE_MIDDLE = {"pipelined": 1.25, "hedged": 1.56}
WALL = 1.03


class Cell(NamedTuple):
    step: float
    acceptance: float
    length: int  # the best draft length in sequence; 0 is plain decoding
    speeds: dict[str, float]  # tokens in the time of a pass, by schedule, in virtual runs
    wall: dict[str, float]  # real time over the virtual time of the decisions taken, by schedule
    slowdown: dict[str, float]  # real time over the time of a virtual run; 1 without real runs, as wall is

    def gain(self, schedule: str) -> float:
        """The speed relative to the best draft length in sequence."""
        serial = self.speeds["serial"] / self.slowdown["serial"]
        return self.speeds[schedule] / self.slowdown[schedule] / serial


class Conditions(NamedTuple):
    """What all cells share."""

    target_s: float
    rows: str
    draft_rows: str
    virtual_tokens: int


def simulate(cell: tuple[float, float], conditions: Conditions) -> Cell:
    """A cell in virtual time."""
    scenario = scenario_of(*cell, conditions)
    length = scenario.draft_length or 0
    speeds = {
        name: conditions.target_s * run(scenario, schedule_of(name, length), virtual_devices()).tokens_per_second
        for name in SCHEDULES
    }
    ones = dict.fromkeys(SCHEDULES, 1.0)
    return Cell(*cell, length, speeds, ones, ones)


def measure(cell: Cell, conditions: Conditions, seconds: float, num_rounds: int) -> Cell:
    """A cell on real threads."""
    scenario = scenario_of(cell.step, cell.acceptance, conditions)
    wall, slowdown = {}, {}
    for name in SCHEDULES:
        num_tokens = max(20, round(seconds * cell.speeds[name] / conditions.target_s))
        short, schedule = replace(scenario, num_tokens=num_tokens), schedule_of(name, cell.length)
        ideal = run(short, schedule, virtual_devices()).tokens_per_second
        ratios = [measure_once(short, schedule, ideal) for _ in range(num_rounds)]
        wall[name], slowdown[name] = (median(each) for each in zip(*ratios, strict=True))
    return cell._replace(wall=wall, slowdown=slowdown)


def measure_once(scenario: Scenario, schedule: str, ideal: float) -> tuple[float, float]:
    """How much longer a real run takes than its decisions take in virtual time, and than a virtual run."""
    devices, calls = real_devices(), list[Calls]()

    def recorded(drafter: Drafter) -> DraftPolicy:
        return policy_for(scenario, schedule, devices, RecordedDrafter(drafter, calls))

    real = run(scenario, schedule, devices, recorded).tokens_per_second
    # Plain decoding asks nothing of a drafter.
    again = run(scenario, schedule, virtual_devices(), partial(ReplayPolicy, rounds=calls)) if calls else None
    return again.tokens_per_second / real if again else ideal / real, ideal / real


def scenario_of(step: float, acceptance: float, conditions: Conditions) -> Scenario:
    """Target and drafter of a cell, with the best draft length in sequence."""
    target_s, rows, draft_rows, num_tokens = conditions
    machine = Machine(
        target_s=target_s,
        draft_s=step * target_s,
        ratios=ratios_by_width(rows),
        draft_ratios=ratios_by_width(draft_rows),
    )
    best = best_serial([acceptance] * MAX_DRAFT_TOKENS, machine.ratio, step, MAX_DRAFT_TOKENS)
    return Scenario(machine=machine, acceptance=acceptance, draft_length=best.length, num_tokens=num_tokens)


def ratios_by_width(rows: str) -> tuple[float, ...]:
    known = ROWS[rows]
    return tuple(np.interp(range(1, max(known) + 1), list(known), list(known.values())).tolist())


def schedule_of(name: str, length: int) -> str:
    # The best draft length in sequence may be none.
    return "plain" if name == "serial" and not length else name


def missed_targets(cells: Sequence[Cell]) -> list[str]:
    lines = []
    for cell in cells:
        where = f"c = {cell.step}, a = {cell.acceptance}"
        is_middle = (cell.step, cell.acceptance) == MIDDLE
        for schedule, gain in (WANTED_IN_THE_MIDDLE if is_middle else WANTED).items():
            if cell.gain(schedule) < gain:
                found = f"{schedule} yields {cell.gain(schedule):.3f} of the best in sequence"
                lines.append(f"{where}: {found}; wanted {gain}")
        lines += [
            f"{where}: {schedule} takes {cell.wall[schedule]:.3f} of the ideal time; wanted {WALL}"
            for schedule in WANTED
            if cell.wall[schedule] > WALL
        ]
    return lines


def table(title: str, cells: Sequence[Cell], texts: Sequence[str]) -> str:
    acceptances = sorted({cell.acceptance for cell in cells})
    lines = [title, "c \\ a " + "".join(f"{a:>9g}" for a in acceptances)]
    for step in sorted({cell.step for cell in cells}):
        row = {cell.acceptance: text for cell, text in zip(cells, texts, strict=True) if cell.step == step}
        lines.append(f"{step:<6g}" + "".join(f"{row.get(a, ''):>9}" for a in acceptances))
    return "\n".join(lines) + "\n"


def parse_numbers(text: str, most: float) -> tuple[float, ...]:
    try:
        numbers = tuple(map(float, text.split(",")))
    except ValueError:
        numbers = (-1.0,)
    if not all(0 <= number <= most for number in numbers):
        raise ArgumentTypeError(f"it is '{text}'; wanted numbers from 0 to {most:g} with commas between")
    return numbers


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--virtual", action="store_true", help="use the virtual clock alone")
    parser.add_argument("--rows", choices=ROWS, default="flat", help="cost of a pass's rows (default flat)")
    parser.add_argument("--draft-rows", choices=ROWS, default="free", help="cost of a draft step's (default free)")
    parser.add_argument("--steps", type=partial(parse_numbers, most=1e6), default=STEPS, metavar="C,…")
    parser.add_argument("--acceptances", type=partial(parse_numbers, most=1), default=ACCEPTANCES, metavar="A,…")
    parser.add_argument("--target-ms", type=float, default=40.0, metavar="T", help="ms of a pass (default 40)")
    parser.add_argument(
        "--seconds", type=float, default=1.0, metavar="S", help="length of each real run (default 1)"
    )
    parser.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="real runs; the median counts (default 1)"
    )
    parser.add_argument(
        "--virtual-tokens", type=int, default=1000, metavar="N", help="tokens of a virtual run (default 1000)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args()
    conditions = Conditions(options.target_ms / 1e3, options.rows, options.draft_rows, options.virtual_tokens)
    grid = [(step, acceptance) for step in options.steps for acceptance in options.acceptances]
    with ProcessPoolExecutor() as pool:
        cells = list(pool.map(partial(simulate, conditions=conditions), grid))
    for i, cell in enumerate(cells):
        if not options.virtual:
            cell = cells[i] = measure(cell, conditions, options.seconds, options.repeat)
        gains = ", ".join(f"{name} {cell.gain(name):.3f} ({cell.wall[name]:.3f})" for name in SCHEDULES[1:])
        print_stderr(f"c = {cell.step}, a = {cell.acceptance}: {gains}")
    best = [f"{cell.length}: {cell.speeds['serial'] / cell.slowdown['serial']:.2f}" for cell in cells]
    print(table("best length in sequence, tokens in the time of a pass", cells, best))
    for name in SCHEDULES[1:]:
        print(table(f"{name} / best in sequence", cells, [f"{cell.gain(name):.3f}" for cell in cells]))
    for name in SCHEDULES if not options.virtual else ():
        walls = [f"{cell.wall[name]:.3f}" for cell in cells]
        print(table(f"wall time / ideal time of the decisions taken, {name}", cells, walls))
    missed = missed_targets(cells)
    print("\n".join([f"missed ({len(missed)}):", *missed]) if missed else "all targets met")
    if options.json:
        options.json.write_text(json.dumps([cell._asdict() for cell in cells], indent=1))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
