"""Check a device: costs, speeds, memory, and whether it computes what the CPU does.

    python scripts/gpu_check.py [--device cuda] [--shapes smollm2,0.5b,1.5b,3b,7b,14b] [--quick] [--json]

Needs edgespec in the environment. Fetches nothing but SmolLM2, which is skipped where it cannot be had. Models
with random weights in real shapes are made here (random_model.py explains why a drafter agrees with them),
exported for the device, measured and deleted again, in a temporary folder or in --workplace. Each is measured by
itself. Where one does not fit or fails, the reason is printed and the next one follows.

Printed are, for each model: passes by width after a short and a long text; tokens a second with drafts of three by
a drafter on the CPU, in sequence, ahead and hedged, each beside plain decoding in turn in the same session; the
share of the time in which both models worked; bytes between host and device for a pass, computed from the arrays
that are bound, and the time of passes that return whole rows and of passes that return likeliest tokens alone; the
peak of the device's memory, where its driver reports it; and rows and greedy tokens beside the CPU's
(compare_with_cpu.py). The exit code is 1 where any model was wrong or failed.
"""

import gc
import json
import shutil
import signal
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
from edgespec.loading.open_model import ModelFolder, open_model, weights_bytes
from edgespec.manifest import Manifest, read_manifest
from edgespec.memory.device_memory import Places
from edgespec.memory.free_memory import HOST, free_memory
from edgespec.models.catalog import CATALOG, CatalogFile
from edgespec.models.fetch import fetch
from edgespec.profiling.measure import profile_target
from edgespec.runtimes.devices import Device, find_device
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
    found = {"device": device.name, "provider": device.provider, "host": system_info()}
    document: dict[str, Any] = {**found, "models": []}
    with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=options.workplace) as workplace:
        for name in options.shapes:
            for precision in options.precisions:
                document["models"].append(
                    check(name, precision, device, options.tokens, Path(workplace) / "model")
                )
                if not options.json:
                    print("\n".join(format_model(document["models"][-1])), flush=True)
    if options.json:
        print(json.dumps(document, indent=1))
    return int(any(found["verdict"] not in ("right", "not compared") for found in document["models"]))


def parse_options() -> Namespace:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="as edgespec devices names it (default cuda)")
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
    return options


def check(name: str, precision: str, device: Device, num_tokens: int, folder: Path) -> dict[str, Any]:
    """The figures of one model, or the reason why there are none. Its folder is deleted."""
    found: dict[str, Any] = {"model": name, "precision": precision, "verdict": "not compared"}
    try:
        with record_peak_memory(device, found):
            report(f"{name} in {precision}: exporting")
            pair = make_pair(name, precision, folder)
            found |= {"weights_bytes": weights_bytes(pair.target), "drafter": pair.agreement}
            report(f"{name} in {precision}: passes, and rows beside the CPU's")
            found |= measure_target(pair.target, device)
            report(f"{name} in {precision}: answers")
            found["schedules"] = {each: answer(pair, each, device, num_tokens) for each in _SCHEDULES}
    except EdgeSpecError as error:
        verdict = "not compared" if isinstance(error, MemoryExhausted) else "failed"
        found |= {"failed": f"{type(error).__name__}: {error}", "verdict": verdict}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def make_pair(name: str, precision: str, folder: Path) -> Pair:
    """Export a model for the device, and its drafter for the CPU."""
    folder.mkdir(parents=True)
    target, drafter = folder / "target", folder / "drafter"
    if name == REAL:
        entry = CATALOG[DEFAULT_MODEL].source
        assert isinstance(entry, CatalogFile)
        source = fetch(entry, folder, report)
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


def open_folder(folder: Path) -> ModelFolder:
    return ModelFolder(folder, read_manifest(folder))


def measure_target(target: ModelFolder, device: Device) -> dict[str, Any]:
    """Passes of the target by width, the bytes that they carry, and its rows compared with the CPU's."""
    decoder: Decoder = open_model(target, device, None, False, False)
    profile = profile_target(decoder)
    near = min(profile.passes_s)
    itemsize = logits_itemsize(target)
    found: dict[str, Any] = {
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
        return found | {"verdict": "not compared", "verdict_reason": reason}
    reference = open_model(target, find_device("cpu"), None, False, False)
    return found | compare_with_cpu(decoder, reference)


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


def format_model(found: dict[str, Any]) -> list[str]:
    """The lines that a person reads."""
    title = f"{found['model']} in {found['precision']}"
    if "failed" in found:
        return [f"{title}: {found['failed']}", ""]
    lines = [f"{title}: weights {found['weights_bytes'] / 1e9:.2f} GB; drafter: {found['drafter']}"]
    for past, widths in found["passes_s"].items():
        passes = ", ".join(f"{width}: {1e3 * s:.2f}" for width, s in widths.items())
        lines.append(f"  ms a pass after {past} tokens by width: {passes}")
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
