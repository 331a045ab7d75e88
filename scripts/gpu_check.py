"""Check a device in five minutes: costs, speeds, memory, and whether it computes what the CPU does.

    python scripts/gpu_check.py [--device cuda] [--minutes 5] [--shapes 0.5b,7b] [--parts rows,passes] [--json]

Needs edgespec in the environment, and no network. It prints one page, for an issue. The models have random
weights in real shapes, in blocks of Q4_0 (random_model.py explains why a drafter agrees with them); --gguf FILE
adds a model of one's own. They are exported for the device, measured and deleted again, in a temporary folder or
in --workplace.

Each part (device_figures/parts.py lists them in their order) has a process and a time limit of its own, and its
figures are on the page at once: a run that is cut off has said all it knew. Printed are, for each model: where
its operators run, and how the likeliest token is found, with ties and by rows; passes by form and rows, the first
one of each width too; which widths give equal rows, also in a second session; what lies between two passes of
plain decoding, the memory that it takes, and whether an answer ran a width that had not run; what CUDA graphs
give, in deterministic mode and without it; answers with drafters that read the text, with likely repeats and
without, and with a drafter on the CPU in three schedules, each beside plain decoding in turn in one session;
prompts of 50 to 1,500 tokens in both modes; and rows, trees and greedy tokens beside the CPU's
(compare_with_cpu.py). Speeds name their mode, which is the default one where modes are not compared. At the end
stands a line for each bad figure, which says what to do about it. The exit code is 1 where anything was wrong or
failed.
"""

import json
import shutil
import signal
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Any

from device_figures.models import Checked
from device_figures.page import Figure, format_machine
from device_figures.parts import NO_TIME, PARTS, find_parts, run_apart, run_here
from random_model import SHAPES

from edgespec.errors import EdgeSpecError
from edgespec.memory.device_memory import read_nvidia_driver
from edgespec.runtimes.devices import Device, driver_versions, find_device
from edgespec.system.console import print_stderr
from edgespec.system.system_info import system_info

_OWN = "gguf"  # the model of --gguf
_SHAPES = ("0.5b", "7b")
_ROWS_OF_FORMS = (1, 4, 8, 64)


def main() -> int:
    options = parse_options()
    if options.in_process:
        (shape,) = options.shapes
        (part,) = (part for part in PARTS if part.name == options.in_process)
        return run_here(part, Checked(shape, options.workplace, options.device, options.tokens, options.gguf))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    document: dict[str, Any] = {"date": str(date.today()), **describe(find_device(options.device)), "parts": []}

    def say(*lines: str) -> None:
        if not options.json:
            print(*lines, sep="\n", flush=True)

    say(*format_machine(document))
    try:
        with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=options.workplace) as workplace:
            for found in run_parts(options, Path(workplace), say):
                document["parts"].append(found)
    finally:
        document["advice"] = list(advise(document["parts"]))
        say("", "what to do:" if document["advice"] else "no figure is bad", *document["advice"])
        if options.json:
            print(json.dumps(document, indent=1))
    return int(any(figure["is_wrong"] for part in document["parts"] for figure in part["figures"]))


def run_parts(options: Namespace, workplace: Path, say: Callable[..., None]) -> Iterator[dict[str, Any]]:
    """Run all parts, model after model; what each found is given as it begins, and grows."""
    ends_s = perf_counter() + 60 * options.minutes
    for shape in options.shapes:
        folder = workplace / shape
        folder.mkdir()
        own = ["--gguf", str(options.gguf)] if shape == _OWN else []
        command = ["--device", options.device, "--tokens", str(options.tokens), "--shapes", shape, *own]
        for part in options.parts:
            say(f"{shape}: {part.name}")
            figures: list[dict[str, Any]] = []
            started_s = perf_counter()
            found = {"model": shape, "part": part.name, "figures": figures}
            yield found
            for figure in run_apart(part, [*command, "--workplace", str(folder)], ends_s - started_s):
                figures.append(asdict(figure))
                say(f"  {figure.text}")
            found["taken_s"] = round(perf_counter() - started_s, 1)
        shutil.rmtree(folder)


def advise(parts: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each bad figure, and the fastest form of each model by rows."""
    for shape in dict.fromkeys(part["model"] for part in parts):
        figures = [Figure(**each) for part in parts if part["model"] == shape for each in part["figures"]]
        yield from (f"- {shape}: {figure.advice}" for figure in figures if figure.advice)
        if num_left := figures.count(NO_TIME):
            yield f"- {shape}: {num_left} parts were left out: raise --minutes"
        passes = {each.values["form"]: each.values["passes_s"] for each in figures if "passes_s" in each.values}
        if len(passes) > 1:
            fastest = {rows: min(passes, key=lambda form: passes[form][str(rows)]) for rows in _ROWS_OF_FORMS}
            listed = ", ".join(f"{rows}: {form}" for rows, form in fastest.items())
            yield f"- {shape}: prepare the form that is fastest at the rows of its passes: {listed}"


def describe(device: Device) -> dict[str, Any]:
    """The device, its driver and memory, and the versions of everything."""
    found: dict[str, Any] = {"device": device.name, "provider": device.provider, "hardware": device.hardware}
    found["options"] = {**dict(device.options), **dict(device.entries)}
    found["drivers"] = list(driver_versions(device))
    if (driver := read_nvidia_driver()) is not None:
        found["nvidia"] = {
            "driver": driver.driver,
            "cuda": ".".join(map(str, driver.cuda)),
            "gpus": [[gpu.name, gpu.memory_bytes, gpu.free_bytes] for gpu in driver.gpus],
        }
    return {**found, "host": system_info()}


def parse_options() -> Namespace:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="as edgespec devices names it (default cuda)")
    parser.add_argument("--minutes", type=float, default=5, help="parts that would begin later are left out")
    parser.add_argument("--gguf", type=Path, help="the file of a model, which is checked first")
    parser.add_argument("--shapes", help=f"among {','.join(SHAPES)} (default {','.join(_SHAPES)})")
    parser.add_argument("--parts", default="", help="parts with one of these words in their names (default all)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens an answer (default 96)")
    parser.add_argument("--workplace", type=Path, help="where models are made (default: the temporary folder)")
    parser.add_argument("--json", action="store_true", help="print one document")
    parser.add_argument("--in-process", metavar="PART", help="run one part here, over models that were made")
    options = parser.parse_args()
    given = options.shapes.split(",") if options.shapes else () if options.gguf else _SHAPES
    options.shapes = list(dict.fromkeys([*([_OWN] if options.gguf else []), *given]))
    if unknown := [each for each in options.shapes if each not in (_OWN, *SHAPES)]:
        parser.error(f"unknown: {', '.join(unknown)}; wanted among {', '.join(SHAPES)}")
    options.parts = find_parts(options.parts)
    if not options.parts:
        parser.error(f"no part has such a name; there are: {'; '.join(part.name for part in PARTS)}")
    if options.tokens < 8:
        parser.error(f"--tokens is {options.tokens}; wanted 8 or more")
    if options.workplace and not options.workplace.is_dir():
        parser.error(f"--workplace is {options.workplace}; wanted a folder that exists")
    if options.gguf and not options.gguf.is_file():
        parser.error(f"--gguf is {options.gguf}; wanted a file that exists")
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EdgeSpecError as error:
        print_stderr(f"gpu_check: {error}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print_stderr("interrupted")
        sys.exit(130)
