"""Tokens a second of the schedules on two paced devices, on a grid of draft costs and acceptance rates.

    python bench/schedules.py [--virtual] [--steps C,…] [--acceptances A,…] [--json FILE]

Rows are c, the time of a drafted token in passes of the target; columns are a, the chance that a drafted token is
accepted. Each further token makes a pass 3 % longer, and branches cost the drafter no more than a chain. Target
and drafter are synthetic and sleep as long as a device would compute: in two real threads, or with --virtual under
a virtual clock, where nothing but the devices takes time.

Printed are the tokens in the time of a pass with the best fixed draft length in sequence; the speed of drafting
ahead and of hedging relative to it; and wall time relative to the same run under the virtual clock. A ratio of
speeds is the ratio of long virtual runs, divided by what wall time adds to both: a short real run measures time
well and acceptance badly.

Targets: wall time at most 1.03 of the ideal; ahead at least 0.99 of the best in sequence everywhere, and 1.15 at
c = 0.3, a = 0.8; hedged at least 0.99 everywhere and 1.4 there. The exit code is 1 where one is missed.
"""

import json
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from interleaved import command_line

from edgespec.policy.limits import MAX_DRAFT_TOKENS
from edgespec.policy.overlap import best_serial
from edgespec.simulation.device_pair import Machine
from edgespec.simulation.schedules import Scenario, real_devices, run, virtual_devices
from edgespec.system.console import print_stderr

STEPS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
ACCEPTANCES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
# Time of a pass by its width. A further token takes 3 % of a step, or what ONNX Runtime's table of its kernels on
# an A100 says (docs/contrib_ops/cuda/matmul_nbits_small_m_experiments.md), summed over the matrices of an 8B model.
ROWS = {"flat": {1: 1.0, 2: 1.03}, "a100": {1: 1.0, 2: 1.19, 4: 1.39, 8: 2.0, 16: 3.3}}
MIDDLE = (0.3, 0.8)
SCHEDULES = ("serial", "pipelined", "hedged")


class Cell(NamedTuple):
    step: float
    acceptance: float
    length: int  # the best draft length in sequence; 0 is plain decoding
    speeds: dict[str, float]  # tokens in the time of a pass, by schedule, in long virtual runs
    wall: dict[str, float]  # real time over virtual time, by schedule; 1 without real runs

    def gain(self, schedule: str) -> float:
        """The speed relative to the best draft length in sequence."""
        return self.speeds[schedule] / self.wall[schedule] / (self.speeds["serial"] / self.wall["serial"])


def measure(step: float, acceptance: float, options: Namespace) -> Cell:
    target_s = options.target_ms / 1e3
    machine = Machine(target_s=target_s, draft_s=step * target_s, ratios=ratios_by_width(options.rows))
    best = best_serial([acceptance] * MAX_DRAFT_TOKENS, machine.ratio, step, MAX_DRAFT_TOKENS)
    scenario = Scenario(
        machine=machine, acceptance=acceptance, draft_length=best.length, num_tokens=options.virtual_tokens
    )
    speeds = {
        name: target_s * run(scenario, schedule_of(name, best.length), virtual_devices()).tokens_per_second
        for name in SCHEDULES
    }
    wall = dict.fromkeys(SCHEDULES, 1.0)
    if not options.virtual:
        short = replace(scenario, num_tokens=options.tokens)
        for name in SCHEDULES:
            schedule = schedule_of(name, best.length)
            ideal = run(short, schedule, virtual_devices())
            wall[name] = ideal.tokens_per_second / run(short, schedule, real_devices()).tokens_per_second
    return Cell(step, acceptance, best.length, speeds, wall)


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
        wanted = {"pipelined": 1.15 if is_middle else 0.99, "hedged": 1.4 if is_middle else 0.99}
        for schedule, least in wanted.items():
            if (gain := cell.gain(schedule)) < least:
                lines.append(f"{where}: {schedule} yields {gain:.3f} of the best in sequence; wanted {least}")
        lines += [
            f"{where}: {schedule} takes {wall:.3f} of the ideal time; wanted 1.03"
            for schedule, wall in cell.wall.items()
            if wall > 1.03
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
    parser.add_argument("--rows", choices=ROWS, default="flat", help="what a further token of a pass takes")
    parser.add_argument("--steps", type=partial(parse_numbers, most=1e6), default=STEPS, metavar="C,…")
    parser.add_argument("--acceptances", type=partial(parse_numbers, most=1), default=ACCEPTANCES, metavar="A,…")
    parser.add_argument("--target-ms", type=float, default=40.0, metavar="T", help="ms of a pass (default 40)")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="tokens of a real run (default 200)")
    parser.add_argument(
        "--virtual-tokens", type=int, default=4000, metavar="N", help="tokens of a virtual run (default 4000)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args()
    cells = []
    for step in options.steps:
        for acceptance in options.acceptances:
            cells.append(cell := measure(step, acceptance, options))
            gains = ", ".join(f"{name} {cell.gain(name):.3f}" for name in SCHEDULES[1:])
            print_stderr(f"c = {step}, a = {acceptance}: {gains}")
    best = [f"{cell.length}: {cell.speeds['serial'] / cell.wall['serial']:.2f}" for cell in cells]
    print(table("best length in sequence, tokens in the time of a pass", cells, best))
    for name, title in (("pipelined", "ahead"), ("hedged", "hedged")):
        print(table(f"{title} / best in sequence", cells, [f"{cell.gain(name):.3f}" for cell in cells]))
    for name in SCHEDULES if not options.virtual else ():
        print(table(f"wall time / ideal, {name}", cells, [f"{cell.wall[name]:.3f}" for cell in cells]))
    missed = missed_targets(cells)
    print("\n".join(["missed:", *missed]) if missed else "all targets met")
    if options.json:
        options.json.write_text(json.dumps([cell._asdict() for cell in cells], indent=1))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
