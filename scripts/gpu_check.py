"""Check a device: costs, speeds, memory, and whether it computes what the CPU does.

    python scripts/gpu_check.py [--device cuda] [--minutes 10] [--json] [--gguf SMOLLM2] [--shapes 0.5b,7b]

Needs edgespec in the environment, and no network. It prints one page, for an issue, and ends within about ten
minutes: a model that would take longer is left out. So is SmolLM2 where it cannot be fetched and --gguf does not
name its file. The other models have random weights in real shapes; they are made here (random_model.py explains
why a drafter agrees with them), exported for the device, measured and deleted again, in a temporary folder or in
--workplace. Each is measured by itself. Where one does not fit or fails, the reason is printed and the next one
follows.

Printed are, for each model: where its operators run; passes by width after a short and a long text, and the first
pass of a width beside a later one; tokens a second with drafts of three by a drafter on the CPU, in sequence,
ahead and hedged, each beside plain decoding in turn in the same session; the share of the time in which both
models worked; bytes between host and device for a pass, computed from the arrays that are bound, and the time of
passes that return whole rows and of passes that return likeliest tokens alone; the peak of the device's memory,
where its driver reports it; and rows, trees and greedy tokens beside the CPU's (compare_with_cpu.py). On CUDA
passes are measured again with ONNX Runtime's other kernels for matrices in blocks (ep.cuda.fpa_intb_gemm). The
exit code is 1 where any model was wrong or failed.
"""

import json
import shutil
import signal
import sys
import tempfile
import traceback
from argparse import ArgumentParser, Namespace
from datetime import date
from pathlib import Path
from typing import Any

from device_figures.answers import answer
from device_figures.budget import Budget, LeftOut
from device_figures.page import format_machine, format_model
from device_figures.pairs import EXPORT_BYTES, REAL, make_pair, num_weights
from device_figures.passes import measure_target
from device_figures.peak_memory import record_peak_memory
from random_model import SHAPES

from edgespec.errors import EdgeSpecError, MemoryExhausted
from edgespec.memory.device_memory import read_nvidia_driver
from edgespec.runtimes.devices import Device, driver_versions, find_device
from edgespec.setup.open_model import weights_bytes, weights_size
from edgespec.system.console import print_stderr
from edgespec.system.system_info import system_info

_QUICK, _ALL = (REAL, "0.5b"), (REAL, "0.5b", "1.5b", "3b", "7b", "14b")
_SCHEDULES = ("serial", "pipelined", "hedged")
_FINE = ("right", "not compared", "left out")


def main() -> int:
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    device = find_device(options.device)
    document: dict[str, Any] = {"date": str(date.today()), **describe(device), "models": []}
    if not options.json:
        print("\n".join(format_machine(document)), flush=True)
    budget = Budget(60 * options.minutes)
    with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=options.workplace) as workplace:
        for name in options.shapes:
            for precision in options.precisions:
                document["models"].append(
                    check(name, precision, device, options, budget, Path(workplace) / "model")
                )
                if not options.json:
                    print("\n".join(format_model(document["models"][-1])), flush=True)
    if options.json:
        print(json.dumps(document, indent=1))
    return int(any(found["verdict"] not in _FINE for found in document["models"]))


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
    parser.add_argument("--minutes", type=float, default=10, help="models that would end later are left out")
    parser.add_argument("--gguf", type=Path, help="SmolLM2's file, in place of fetching it")
    parser.add_argument("--offline", action="store_true", help="fetch nothing: without --gguf, no SmolLM2")
    parser.add_argument("--shapes", help=f"among {REAL},{','.join(SHAPES)} (default {','.join(_ALL)})")
    parser.add_argument("--precisions", default="int4", help="among int4,fp16,fp32 (default int4)")
    parser.add_argument("--quick", action="store_true", help=f"{','.join(_QUICK)} and shorter answers")
    parser.add_argument("--tokens", type=int, help="tokens an answer (default 128, with --quick 48)")
    parser.add_argument("--workplace", type=Path, help="where models are made (default: the temporary folder)")
    parser.add_argument("--json", action="store_true", help="print one document")
    options = parser.parse_args()
    options.shapes = options.shapes.split(",") if options.shapes else _QUICK if options.quick else _ALL
    options.precisions = options.precisions.split(",")
    options.tokens = options.tokens or (48 if options.quick else 128)
    unknown = [each for each in options.shapes if each not in (REAL, *SHAPES)]
    unknown += [each for each in options.precisions if each not in EXPORT_BYTES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    if options.workplace and not options.workplace.is_dir():
        parser.error(f"--workplace is {options.workplace}; wanted a folder that exists")
    if options.gguf and not options.gguf.is_file():
        parser.error(f"--gguf is {options.gguf}; wanted a file that exists")
    return options


def check(
    name: str, precision: str, device: Device, options: Namespace, budget: Budget, folder: Path
) -> dict[str, Any]:
    """The figures of one model, or the reason why there are none. Its folder is deleted."""
    found: dict[str, Any] = {"model": name, "precision": precision, "verdict": "not compared"}
    try:
        budget.begin(num_weights(name))
        with record_peak_memory(device, found):
            print_stderr(f"{name} in {precision}: exporting")
            pair = make_pair(name, precision, folder, options)
            found |= {"weights_bytes": weights_bytes(pair.target), "drafter": pair.agreement}
            found["device_bytes"] = weights_size(pair.target).device_bytes
            print_stderr(f"{name} in {precision}: passes, and rows beside the CPU's")
            found |= measure_target(pair.target, device)
            print_stderr(f"{name} in {precision}: answers")
            found["schedules"] = {each: answer(pair, each, device, options.tokens) for each in _SCHEDULES}
        budget.end(num_weights(name))
    except LeftOut as error:
        found |= {"failed": str(error), "verdict": "left out"}
    except MemoryExhausted as error:
        found |= {"failed": str(error), "verdict": "not compared"}
    except Exception as error:  # of any kind: the next model may do, and the page says what this one met
        found |= {"failed": f"{type(error).__name__}: {error}", "verdict": "failed"}
        if not isinstance(error, EdgeSpecError):
            traceback.print_exc()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EdgeSpecError as error:
        print_stderr(f"gpu_check: {error}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print_stderr("interrupted")
        sys.exit(130)
