"""The parts of a check, in their order, and the process that each of them has."""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from signal import SIGKILL, Signals
from threading import Event, Timer
from time import perf_counter
from typing import NamedTuple

from device_figures.answers import (
    answer_in_schedules,
    answer_plainly,
    answer_with_recordings,
    answer_with_text_drafters,
)
from device_figures.models import Checked, LeftOut
from device_figures.page import Figure
from device_figures.passes import (
    compare_rows_by_width,
    compare_to_cpu,
    find_placement,
    time_passes,
    time_prompts,
)
from edgespec.errors import EdgeSpecError, MemoryExhausted

NO_TIME = Figure("left out: no time is left")
_LEAST_S = 3.0  # a process takes a second to begin


class Part(NamedTuple):
    """A part of the check. limit_s: what its process may take."""

    name: str
    limit_s: float
    run: Callable[[Checked], Iterator[Figure]]


def _prepare(checked: Checked, precision: str) -> Iterator[Figure]:
    yield Figure(f"{precision}: {checked.prepare(precision)}", {"form": precision})


def _parts_of_form(precision: str) -> list[Part]:
    """Passes and rows of a form."""
    rows = partial(compare_rows_by_width, precision=precision)
    return [
        Part(f"prepare {precision}", 90, partial(_prepare, precision=precision)),
        Part(f"passes, {precision}", 40, partial(time_passes, precision=precision)),
        Part(f"rows, {precision}", 30, rows),
        Part(f"rows in a second session, {precision}", 30, rows),
    ]


# What decides a design comes first: a run may end at any moment.
_SOURCE = _parts_of_form("source")
PARTS = (
    _SOURCE[0],
    Part("placement and choice", 40, partial(find_placement, precision="source")),
    *_SOURCE[1:],
    Part("passes, fpA_intB", 40, partial(time_passes, precision="source", has_other_kernels=True)),
    *_parts_of_form("fp16"),
    Part("plain, source", 30, partial(answer_plainly, precision="source")),
    Part("plain, fp16", 30, partial(answer_plainly, precision="fp16")),
    Part("CUDA graphs, source", 70, partial(answer_with_recordings, precision="source")),
    Part("CUDA graphs, fp16", 70, partial(answer_with_recordings, precision="fp16")),
    Part("text drafters, source", 60, partial(answer_with_text_drafters, precision="source")),
    Part("prepare drafter", 60, partial(_prepare, precision="drafter")),
    Part("schedules, source", 60, partial(answer_in_schedules, precision="source")),
    Part("prompts, source", 60, partial(time_prompts, precision="source")),
    Part("text drafters, fp16", 60, partial(answer_with_text_drafters, precision="fp16")),
    Part("schedules, fp16", 60, partial(answer_in_schedules, precision="fp16")),
    *_parts_of_form("int4")[:2],
    Part("passes, int4, fpA_intB", 40, partial(time_passes, precision="int4", has_other_kernels=True)),
    Part("beside the CPU, source", 60, partial(compare_to_cpu, precision="source")),
)


def find_parts(names: str) -> list[Part]:
    """Parts with one of several words, which commas separate, in their names, and those that prepare forms."""
    wanted = [part for part in PARTS if any(name.strip() in part.name for name in names.split(","))]
    return [part for part in PARTS if part in wanted or (wanted and part.name.startswith("prepare"))]


def run_here(part: Part, checked: Checked) -> int:
    """Run a part in this process; each figure is a line of JSON on stdout. Returns the exit code."""
    try:
        for figure in part.run(checked):
            print(json.dumps(asdict(figure)), flush=True)
    except LeftOut as error:
        print(json.dumps(asdict(Figure(f"left out: {error}"))), flush=True)
    except MemoryExhausted as error:
        print(json.dumps(asdict(Figure(f"left out: {error}", advice=f"{part.name}: {error}"))), flush=True)
    except Exception as error:  # of any kind: the next part may do, and the page says what this one met
        text = f"failed: {type(error).__name__}: {error}"
        print(json.dumps(asdict(Figure(text, advice=f"{part.name} {text}", is_wrong=True))), flush=True)
        if not isinstance(error, EdgeSpecError):
            traceback.print_exc()
    return 0


def run_apart(part: Part, command: list[str], left_s: float) -> Iterator[Figure]:
    """Run a part in a process of its own, which ends after its limit; each figure comes at once."""
    if left_s < _LEAST_S:
        yield NO_TIME
        return
    limit_s, is_cut_off, started_s = min(part.limit_s, left_s), Event(), perf_counter()
    script = Path(__file__).parents[1] / "gpu_check.py"
    with subprocess.Popen(
        [sys.executable, str(script), *command, "--in-process", part.name],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None

        def end() -> None:
            is_cut_off.set()
            _kill(process)

        timer = Timer(limit_s, end)
        timer.start()
        try:
            for line in process.stdout:
                if line.startswith("{"):  # libraries of drivers print to it too
                    yield Figure(**json.loads(line))
            process.wait()
        finally:
            timer.cancel()
            _kill(process)
    if is_cut_off.is_set():
        is_own = limit_s == part.limit_s
        advice = f"{part.name} was cut off after {limit_s:.0f} s" + ("" if is_own else ": raise --minutes")
        yield Figure(f"cut off after {limit_s:.0f} s", advice=advice, is_wrong=is_own)
    elif process.returncode:
        code = process.returncode
        how = Signals(-code).name if code < 0 else f"exit code {code}"
        text = f"its process ended with {how} after {perf_counter() - started_s:.0f} s"
        yield Figure(text, advice=f"{part.name}: {text}", is_wrong=True)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process and those that it has begun, which hold its output open."""
    if sys.platform == "win32":
        process.kill()
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, SIGKILL)
