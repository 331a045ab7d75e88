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

import gc
import json
import shutil
import signal
import sys
import tempfile
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import date
from math import inf
from pathlib import Path
from threading import Event, Thread
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import onnx
import psutil
from compare_with_cpu import compare_texts, compare_with_cpu
from random_model import SHAPES, drafter_of, write_model

from edgespec import load
from edgespec.config.options import DEFAULT_MODEL
from edgespec.errors import EdgeSpecError, MemoryExhausted
from edgespec.export.convert import export_model
from edgespec.loading.open_model import ModelFolder, open_model, weights_bytes, weights_size
from edgespec.manifest import Manifest, read_manifest
from edgespec.memory.device_memory import Places
from edgespec.memory.free_memory import HOST, free_memory
from edgespec.memory.nvml import read_nvidia_driver
from edgespec.models.catalog import CATALOG, CatalogFile
from edgespec.models.fetch import fetch
from edgespec.profiling.measure import profile_target
from edgespec.runtimes import cuda
from edgespec.runtimes.devices import Device, driver_versions, find_device
from edgespec.runtimes.node_placement import find_strays, format_placement, read_node_placement
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.tree import OnnxTreeDecoder, can_run_trees
from edgespec.system.disk import require_disk_space
from edgespec.system.system_info import system_info
from edgespec.types import ArgmaxDecoder, Decoder, TokenIds

REAL = "smollm2"
_QUICK, _ALL = (REAL, "0.5b"), (REAL, "0.5b", "1.5b", "3b", "7b", "14b")
_SCHEDULES = ("serial", "pipelined", "hedged")
_STATS = ("tokens_per_pass", "acceptance_rate", "overlap", "schedule", "target_device")
_DRAFT_LENGTH = 3
_WIDTHS = (1, 2, 4, 8, 16, 32)
_PROMPT = "The rain in the hall had stopped by the time that anyone thought of the roof."
# Bytes a weight: of the source, in half floats, and of its exports at most.
_SOURCE_BYTES, _EXPORT_BYTES = 2, {"int4": 0.9, "fp16": 2.2, "fp32": 4.2}
_CPU_GROWTH = {"int4": 1.0, "fp16": 2.0, "fp32": 1.0}  # the CPU widens half floats
_RESERVE_BYTES = 2 << 30
_POLL_S = 0.02
_NUM_PASSES = 8
_COLD_WIDTHS = (3, 5, 7, 12)  # which no other measurement has run before
_SMOLLM2_WEIGHTS = 135_000_000
# Other kernels of CUDA's provider for matrices in blocks. ONNX Runtime has them off (docs/log/devices.md).
_OTHER_KERNELS = ("ep.cuda.fpa_intb_gemm", "1")
_FINE = ("right", "not compared", "left out")


class LeftOut(Exception):
    """A model that cannot be had, or that there is no time for."""


class Pair(NamedTuple):
    """A target's and a drafter's folder, and why the drafter agrees with the target."""

    target: ModelFolder
    drafter: Path
    agreement: str


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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


class Budget:
    """Seconds for all models; what the next takes is foreseen from the last one, by their numbers of weights."""

    def __init__(self, budget_s: float) -> None:
        self._started_s, self._budget_s = perf_counter(), budget_s
        self._begun_s = self._started_s
        self._weight_s = 0.0

    def begin(self, num_weights: int) -> None:
        """Raises LeftOut: A model would end after the budget."""
        self._begun_s = perf_counter()
        left_s = self._budget_s - (self._begun_s - self._started_s)
        if self._weight_s * num_weights > left_s:
            foreseen_s = self._weight_s * num_weights
            raise LeftOut(f"it would take about {foreseen_s:.0f} s, and {left_s:.0f} s are left; raise --minutes")

    def end(self, num_weights: int) -> None:
        self._weight_s = (perf_counter() - self._begun_s) / num_weights


def num_weights(name: str) -> int:
    return _SMOLLM2_WEIGHTS if name == REAL else SHAPES[name].num_weights


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
    unknown += [each for each in options.precisions if each not in _EXPORT_BYTES]
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
            report(f"{name} in {precision}: exporting")
            pair = make_pair(name, precision, folder, options)
            found |= {"weights_bytes": weights_bytes(pair.target), "drafter": pair.agreement}
            found["device_bytes"] = weights_size(pair.target).device_bytes
            report(f"{name} in {precision}: passes, and rows beside the CPU's")
            found |= measure_target(pair.target, device)
            report(f"{name} in {precision}: answers")
            found["schedules"] = {each: answer(pair, each, device, options.tokens) for each in _SCHEDULES}
        budget.end(num_weights(name))
    except LeftOut as error:
        found |= {"failed": str(error), "verdict": "left out"}
    except MemoryExhausted as error:
        found |= {"failed": str(error), "verdict": "not compared"}
    except Exception as error:  # of any kind: the next model may do, and the page says what this one met
        found |= {"failed": f"{type(error).__name__}: {error}", "verdict": "failed"}
        if not isinstance(error, EdgeSpecError):
            report(traceback.format_exc())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def make_pair(name: str, precision: str, folder: Path, options: Namespace) -> Pair:
    """Export a model for the device, and its drafter for the CPU."""
    folder.mkdir(parents=True)
    target, drafter = folder / "target", folder / "drafter"
    if name == REAL:
        source = options.gguf or fetch_real(folder, offline=options.offline)
        export_model(source, target, precision=precision, form="gpu")
        export_model(source, drafter, precision="int4")
        return Pair(open_folder(target), drafter, "its own weights in int4 on the CPU")
    shape = SHAPES[name]
    num_bytes = (_SOURCE_BYTES + _EXPORT_BYTES[precision]) * shape.num_weights
    require_disk_space(folder, int(num_bytes), _RESERVE_BYTES)
    for each, output, bits, form in (
        (shape, target, precision, "gpu"),
        (drafter_of(shape), drafter, "int4", "cpu"),
    ):
        write_model(folder / "source", each)
        export_model(folder / "source", output, name=output.name, precision=bits, form=form)
        shutil.rmtree(folder / "source")
    return Pair(open_folder(target), drafter, "its own first layers, as the others change almost nothing")


def fetch_real(folder: Path, *, offline: bool) -> Path:
    """SmolLM2's file; raises LeftOut: It cannot be had."""
    entry = CATALOG[DEFAULT_MODEL].source
    assert isinstance(entry, CatalogFile)
    try:
        return fetch(entry, folder, report, offline=offline)
    except EdgeSpecError as error:
        raise LeftOut(f"{error} (or name its file with --gguf)") from error


def open_folder(folder: Path) -> ModelFolder:
    return ModelFolder(folder, read_manifest(folder))


def measure_target(target: ModelFolder, device: Device) -> dict[str, Any]:
    """Passes of the target by width, the bytes that they carry, and its rows compared with the CPU's."""
    started_s = perf_counter()
    decoder = open_model(target, device, None, False, False)
    assert isinstance(decoder, OnnxDecoder)
    opened_s = perf_counter() - started_s
    placement = read_node_placement(decoder._passes._session)
    cold_s = time_first_passes(decoder)
    profile = profile_target(decoder)
    near = min(profile.passes_s)
    itemsize = logits_itemsize(target)
    found: dict[str, Any] = {
        "opened_s": opened_s,
        "placement": format_placement(placement),
        "strays": find_strays(placement, device, target.manifest.kv_cache.num_layers),
        "max_pass_tokens": decoder.max_pass_tokens,
        "chooses": decoder.has_argmax,
        "cold_s": cold_s,
        "passes_s": {str(past): dict(widths) for past, widths in profile.passes_s.items()},
        "prefill_s": profile.prefill_s,
        "row_s": profile.transfer_s,
        "bytes": {width: bytes_of_pass(target.manifest, near, width, itemsize) for width in _WIDTHS},
        "fetched_s": time_ways_to_fetch(decoder, near),
    }
    room = free_memory()
    needed = _CPU_GROWTH[target.manifest.precision] * weights_bytes(target) * 1.35 + _RESERVE_BYTES
    if needed > room.free_bytes:
        free = f"{room.free_bytes / 2**30:.1f} free within {room.bound}"
        reason = f"about {needed / 2**30:.1f} GiB are needed and {free}"
        found |= {"verdict": "not compared", "verdict_reason": reason}
    else:
        reference = open_model(target, find_device("cpu"), None, False, False)
        found |= compare_with_cpu(decoder, reference)
        del reference
    del decoder  # one session at a time is on the device
    gc.collect()
    return found | {"trees": check_trees(target, device), "other_kernels_s": time_other_kernels(target, device)}


def time_first_passes(decoder: Decoder) -> dict[int, tuple[float, float]]:
    """Seconds of the first pass of a width, and of the fastest of some later ones."""
    found = {}
    for width in _COLD_WIDTHS:
        taken = [time_pass(decoder, width, i) for i in range(4)]
        found[width] = taken[0], min(taken[1:])
    return found


def time_pass(decoder: Decoder, width: int, number: int) -> float:
    text = np.arange(64 + width, dtype=np.int32) % decoder.vocab_size
    decoder.logits(text[:64], 1)
    text[64:] = (text[64:] + number + 1) % decoder.vocab_size
    started = perf_counter()
    decoder.logits(text, width)
    return perf_counter() - started


def check_trees(target: ModelFolder, device: Device) -> str:
    """Whether the device runs trees of drafts in one pass."""
    if not can_run_trees(target.manifest, device):
        return "not for this device"
    try:
        decoder = OnnxTreeDecoder(*target, device)
    except EdgeSpecError as error:
        return f"refused: {error}"
    return "right" if decoder._runs_trees else "wrong, so that each branch has a pass of its own"


def time_other_kernels(target: ModelFolder, device: Device) -> dict[str, Any] | None:
    """Passes by width with CUDA's other kernels for matrices in blocks, and the seconds that opening took."""
    if device.provider != cuda.PROVIDER or target.manifest.precision != "int4":
        return None
    started_s = perf_counter()
    decoder = open_model(target, replace(device, entries=(*device.entries, _OTHER_KERNELS)), None, False, False)
    opened_s = perf_counter() - started_s
    passes_s = {
        width: min(time_pass(decoder, width, i) for i in range(_NUM_PASSES)) for width in (1, 2, 4, 6, 8, 16)
    }
    return {"opened_s": opened_s, "passes_s": passes_s}


def bytes_of_pass(manifest: Manifest, num_past: int, width: int, logits_itemsize: int) -> dict[str, int]:
    """The bytes of the arrays that are bound for one pass; keys and values stay on the device."""
    names, total = manifest.signature, num_past + width
    to_device = 8 * (width + (total if names.attention_mask else 0) + (width if names.position_ids else 0))
    to_device += 8 if names.num_logits_to_keep else 0
    to_host = width * manifest.vocab_size * logits_itemsize
    return {"to_device": to_device, "to_host": to_host, "to_host_greedy": 8 * width if names.best else to_host}


def time_ways_to_fetch(decoder: Decoder, num_past: int) -> dict[int, dict[str, float]] | None:
    """Seconds of passes by width that return whole rows, and tokens alone: the fastest of several in turn.

    None where the device does not choose tokens.
    """
    if not (isinstance(decoder, ArgmaxDecoder) and decoder.has_argmax):
        return None
    ways: dict[str, Callable[[TokenIds, int], object]] = {"rows": decoder.logits, "tokens": decoder.argmax}
    fastest_s: dict[int, dict[str, float]] = {width: dict.fromkeys(ways, inf) for width in (1, 4, 8)}
    text = np.arange(num_past + max(fastest_s), dtype=np.int32) % decoder.vocab_size
    for _ in range(_NUM_PASSES):
        for width, by_way in fastest_s.items():
            for way, run in ways.items():
                started = perf_counter()
                run(text[: num_past + width], width)
                by_way[way] = min(by_way[way], perf_counter() - started)
    return fastest_s


def logits_itemsize(model: ModelFolder) -> int:
    graph = onnx.load(str(model.folder / model.manifest.graph), load_external_data=False).graph
    (kind,) = (v.type.tensor_type.elem_type for v in graph.output if v.name == model.manifest.signature.logits)
    return int(onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize)


def answer(pair: Pair, schedule: str, device: Device, num_tokens: int) -> dict[str, Any]:
    """Answers in a schedule with a drafter on the CPU, and plain ones, twice in turn; the faster of each."""
    how: dict[str, Any] = {"drafter": str(pair.drafter), "draft_length": _DRAFT_LENGTH, "schedule": schedule}
    with load(pair.target.folder, device=device.name, drafter_device="cpu", **how) as engine:
        engines = (engine.plain(), engine)
        rounds = [[each.generate(_PROMPT, max_tokens=num_tokens) for each in engines] for _ in range(2)]
        slow, fast = (max(answers, key=speed) for answers in zip(*rounds, strict=True))
        prompt = engine.encode(_PROMPT)
        text = compare_texts(prompt, slow.token_ids, fast.token_ids, engine.target, _DRAFT_LENGTH + 1)
    stats = fast.stats
    return {
        "plain_tokens_per_second": speed(slow),
        "tokens_per_second": speed(fast),
        **{name: getattr(stats, name) for name in _STATS},
        "text": text,
        "downgrades": list(stats.downgrades),
    }


def speed(answer: Any) -> float:
    return float(answer.stats.decode_tokens_per_second or 0.0)


@contextmanager
def record_peak_memory(device: Device, found: dict[str, Any]) -> Iterator[None]:
    """Record the growth of the device's memory in use at its peak, and the peak of this process on the host."""
    places, ended = Places([device.place], free_memory, report), Event()
    place = places.place_of(device.memory)
    reads: dict[str, Callable[[], int]] = {"host": lambda: psutil.Process().memory_info().rss}
    if place != HOST and place in places():
        before = places()[place].free_bytes
        reads["device"] = lambda: before - places()[place].free_bytes
    peaks = dict.fromkeys(reads, 0)

    def poll() -> None:
        while not ended.wait(_POLL_S):
            with suppress(KeyError):  # the driver no longer reports it
                for each, read in reads.items():
                    peaks[each] = max(peaks[each], read())

    thread = Thread(target=poll, name="memory")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        found["peak_bytes"] = {"device": peaks.get("device"), "host": peaks["host"]}
    gc.collect()


def format_machine(document: dict[str, Any]) -> list[str]:
    """The lines that say what was checked, and with which versions."""
    host = document["host"]
    name = document["hardware"] or "hardware without a name"
    lines = [f"{document['date']}: {document['device']} ({document['provider']}), {name}"]
    if nvidia := document.get("nvidia"):
        gpus = (f"{name}, {format_memory(total, free)}" for name, total, free in nvidia["gpus"])
        lines.append(f"  NVIDIA driver {nvidia['driver']}, CUDA up to {nvidia['cuda']}: {'; '.join(gpus)}")
    lines += [f"  {line}" for line in document["drivers"]]
    lines.append(f"  {', '.join(f'{label} {text}' for label, text in host.items())}")
    if document["options"]:
        lines.append(f"  {', '.join(f'{key}={value}' for key, value in document['options'].items())}")
    return [*lines, ""]


def format_memory(total: int | None, free: int | None) -> str:
    if total is None or free is None:
        return "no memory of its own"
    return f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} free"


def format_model(found: dict[str, Any]) -> list[str]:
    """The lines that a person reads."""
    title = f"{found['model']} in {found['precision']}"
    if "failed" in found:
        return [f"{title}: {found['verdict']}: {found['failed']}", ""]
    lines = [
        f"{title}: weights {found['weights_bytes'] / 1e6:.0f} MB, {found['device_bytes'] / 1e6:.0f} on a device; "
        f"opened in {found['opened_s']:.1f} s; drafter: {found['drafter']}",
        f"  {found['placement']}; passes of up to {found['max_pass_tokens']} tokens are right; "
        f"trees: {found['trees']}",
    ]
    lines += [f"  {found['strays']}"] if found["strays"] else []
    for past, widths in found["passes_s"].items():
        step_s = widths[min(widths)]
        passes = ", ".join(f"{width}: {1e3 * s:.2f} ({s / step_s:.2f})" for width, s in widths.items())
        lines.append(f"  ms a pass after {past} tokens by width, and in steps: {passes}")
    cold = ", ".join(
        f"{width}: {1e3 * one:.1f}, {1e3 * later:.1f}" for width, (one, later) in found["cold_s"].items()
    )
    lines.append(f"  ms of the first pass of a width and of a later one: {cold}")
    if other := found["other_kernels_s"]:
        passes = ", ".join(f"{width}: {1e3 * s:.2f}" for width, s in other["passes_s"].items())
        lines.append(f"  with {'='.join(_OTHER_KERNELS)}: {passes}; opened in {other['opened_s']:.1f} s")
    prefill_ms, row_ms = (1e3 * found[each] for each in ("prefill_s", "row_s"))
    lines.append(f"  a token of a prompt {prefill_ms:.3f} ms, a further row {row_ms:.3f} ms")
    for width in (1, 8):
        carried = found["bytes"][width]
        out = f"{carried['to_host']} to the host, or {carried['to_host_greedy']} if greedy"
        lines.append(f"  bytes of a pass of {width}: {carried['to_device']} to the device, {out}")
    for width, by_way in (found["fetched_s"] or {}).items():
        rows_ms, tokens_ms = (1e3 * by_way[way] for way in ("rows", "tokens"))
        lines.append(
            f"  a pass of {width}: {rows_ms:.2f} ms with whole rows, {tokens_ms:.2f} ms with tokens alone"
        )
    for name, each in found["schedules"].items():
        accepted = "-" if each["acceptance_rate"] is None else f"{each['acceptance_rate']:.0%}"
        lines.append(
            f"  {name}: {each['tokens_per_second']:.1f} tokens/s, plain {each['plain_tokens_per_second']:.1f}; "
            f"{accepted} accepted, both models at work {each['overlap']:.0%}; text {each['text']}"
        )
    peak = found["peak_bytes"]
    own = "not reported" if peak["device"] is None else f"{peak['device'] / 1e9:.2f} GB"
    lines.append(f"  peak memory: device {own}, host {peak['host'] / 1e9:.2f} GB")
    for width, rows in found.get("rows", {}).items():
        largest = rows["largest_difference"]
        spread = "not finite" if largest is None else f"within {largest:.2g} standard deviations"
        counts = f"{rows['near_ties']} near-ties and {rows['wrong']} wrong of {rows['num_rows']}"
        lines.append(f"  rows in passes of {width}: {rows['verdict']}, {spread} of the CPU's, {counts}")
    if chosen := found.get("chosen"):
        differing = f"{chosen['other']} of {chosen['num_rows']} differ from its rows"
        lines.append(f"  tokens chosen on the device: {chosen['verdict']}, {differing}")
    reason = f" ({found['verdict_reason']})" if "verdict_reason" in found else ""
    return [*lines, f"  verdict: {found['verdict']}{reason}", ""]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EdgeSpecError as error:
        report(f"gpu_check: {error}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        report("interrupted")
        sys.exit(130)
