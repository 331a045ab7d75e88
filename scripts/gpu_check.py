"""What a device makes of edgespec: costs, speeds, memory, and whether it computes what the CPU does.

    python scripts/gpu_check.py [--device cuda] [--shapes smollm2,0.5b,1.5b,3b,7b,14b] [--quick] [--json]

Needs edgespec in the environment, and fetches nothing but SmolLM2, which is left out where it cannot be had.
Models of random weights in real shapes are made on the spot (random_model.py says how a drafter comes to agree
with them), exported for the device, measured and deleted again, in a temporary folder or in --workplace. Each is
measured by itself; of one that does not fit or fails the reason is told, and the rest goes on.

Printed are, for each model: passes by width behind a short and a long text; tokens a second of plain decoding and
of drafts of three by a drafter on the CPU, in sequence, ahead and hedged, each beside plain decoding in the same
session and in turn with it; the share of the time in which both worked; bytes between host and device for a pass,
computed from the arrays that are bound, and what a pass takes whose rows come and one whose likeliest tokens alone
do; the most memory of the device in use, where its driver tells it; and rows and greedy tokens beside those of the
CPU (beside_cpu.py). The exit code is 1 where any was wrong or failed.
"""

import argparse
import gc
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from math import inf
from pathlib import Path
from threading import Event, Thread
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import onnx
import psutil
from beside_cpu import beside_cpu, same_text
from random_model import SHAPES, drafter_of, write_model

from edgespec import load
from edgespec.catalog import CATALOG, DEFAULT_MODEL, CatalogFile
from edgespec.device_memory import Places
from edgespec.disk import expect_room
from edgespec.errors import EdgeSpecError, MemoryExhausted
from edgespec.export.convert import export_model
from edgespec.fetch import fetch
from edgespec.headroom import HOST, headroom
from edgespec.host import host
from edgespec.manifest import Manifest, read_manifest
from edgespec.opening import ModelFolder, open_model, weights_bytes
from edgespec.profiling import profile_target
from edgespec.runtimes.devices import Device, find_device
from edgespec.types import ArgmaxDecoder, Decoder, TokenIds

REAL = "smollm2"
_QUICK, _ALL = (REAL, "0.5b"), (REAL, "0.5b", "1.5b", "3b", "7b", "14b")
_SCHEDULES = ("serial", "pipelined", "hedged")
_DRAFT_LENGTH = 3
_WIDTHS = (1, 2, 4, 8, 16, 32)
_PROMPT = "The rain in the hall had stopped by the time that anyone thought of the roof."
# Of a source in half floats, what its export takes at most, and what is held of it while it is made.
_SOURCE_BYTES, _EXPORT_BYTES = 2, {"int4": 0.9, "fp16": 2.2, "fp32": 4.2}
_WIDENED = {"int4": 1.0, "fp16": 2.0, "fp32": 1.0}  # what the CPU makes of an export's weights
_RESERVE_BYTES = 2 << 30
_POLL_S = 0.02
_NUM_FETCHED = 8  # passes of each kind


class Made(NamedTuple):
    """Model folders, and how the drafter comes to agree."""

    target: ModelFolder
    drafter: Path
    agreement: str


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    device = find_device(options.device)
    document: dict[str, Any] = {"device": device.name, "provider": device.provider, "host": host(), "models": []}
    with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=options.workplace) as workplace:
        for name in options.shapes:
            for precision in options.precisions:
                found = checked(name, precision, device, options, Path(workplace) / "model")
                document["models"].append(found)
                if not options.json:
                    print("\n".join(lines_of(found)), flush=True)
    if options.json:
        print(json.dumps(document, indent=1))
    return int(any(found["verdict"] not in ("right", "not compared") for found in document["models"]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="as edgespec devices names it (default cuda)")
    parser.add_argument("--shapes", help=f"of {REAL},{','.join(SHAPES)} (default {','.join(_ALL)})")
    parser.add_argument("--precisions", default="int4", help="of int4,fp16,fp32 (default int4)")
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
        parser.error(f"--workplace is {options.workplace}; wanted a folder that is there")
    return options


def checked(
    name: str, precision: str, device: Device, options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """All that there is to be said of one model, or why there is not; its folder is deleted."""
    found: dict[str, Any] = {"model": name, "precision": precision, "verdict": "not compared"}
    try:
        with _peak_memory(device, found):
            say(f"{name} in {precision}: making it")
            made = make(name, precision, folder)
            found |= {"weights_bytes": weights_bytes(made.target), "drafter": made.agreement}
            say(f"{name} in {precision}: passes, and rows beside the CPU's")
            found |= on_its_own(made.target, device)
            say(f"{name} in {precision}: answers")
            found["schedules"] = {each: answered(made, each, device, options.tokens) for each in _SCHEDULES}
    except EdgeSpecError as error:
        found |= {"failed": f"{type(error).__name__}: {error}", "verdict": "failed"}
        if isinstance(error, MemoryExhausted):
            found["verdict"] = "not compared"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def make(name: str, precision: str, folder: Path) -> Made:
    """Export a model for the device, and its drafter for the CPU."""
    folder.mkdir(parents=True)
    target, drafter = folder / "target", folder / "drafter"
    if name == REAL:
        entry = CATALOG[DEFAULT_MODEL].source
        assert isinstance(entry, CatalogFile)
        source = fetch(entry, folder, say)
        export_model(source, target, precision=precision, form="gpu")
        export_model(source, drafter, precision="int4")
        return Made(_opened(target), drafter, "the same weights in int4 on the CPU")
    shape = SHAPES[name]
    num_bytes = (_SOURCE_BYTES + _EXPORT_BYTES[precision]) * shape.num_weights
    expect_room(folder, int(num_bytes), _RESERVE_BYTES)
    for each, output, bits, form in (
        (shape, target, precision, "gpu"),
        (drafter_of(shape), drafter, "int4", "cpu"),
    ):
        write_model(folder / "source", each)
        export_model(folder / "source", output, name=output.name, precision=bits, form=form)
        shutil.rmtree(folder / "source")
    return Made(_opened(target), drafter, "the target's own first layers, the others being all but silent")


def _opened(folder: Path) -> ModelFolder:
    return ModelFolder(folder, read_manifest(folder))


def on_its_own(target: ModelFolder, device: Device) -> dict[str, Any]:
    """Passes of the target by width, what they carry, and its rows beside those of the CPU."""
    decoder: Decoder = open_model(target, device, None, False, False)
    profile = profile_target(decoder)
    near = min(profile.passes_s)
    itemsize = _logits_itemsize(target)
    found: dict[str, Any] = {
        "passes_s": {str(past): dict(widths) for past, widths in profile.passes_s.items()},
        "prefill_s": profile.prefill_s,
        "row_s": profile.transfer_s,
        "bytes": {width: bytes_of_pass(target.manifest, near, width, itemsize) for width in _WIDTHS},
        "fetched_s": fetched_s(decoder, near),
    }
    room = headroom()
    needed = _WIDENED[target.manifest.precision] * weights_bytes(target) * 1.35 + _RESERVE_BYTES
    if needed > room.free_bytes:
        free = f"{room.free_bytes / 2**30:.1f} free within {room.bound}"
        reason = f"about {needed / 2**30:.1f} GiB are needed and {free}"
        return found | {"verdict": "not compared", "verdict_reason": reason}
    reference = open_model(target, find_device("cpu"), None, False, False)
    return found | beside_cpu(decoder, reference)


def bytes_of_pass(manifest: Manifest, num_past: int, width: int, logits_itemsize: int) -> dict[str, int]:
    """What one pass carries to the device and back, by the arrays that are bound; keys and values stay there."""
    names, total = manifest.signature, num_past + width
    to_device = 8 * (width + (total if names.attention_mask else 0) + (width if names.position_ids else 0))
    to_device += 8 if names.num_logits_to_keep else 0
    to_host = width * manifest.vocab_size * logits_itemsize
    return {"to_device": to_device, "to_host": to_host, "to_host_greedy": 8 * width if names.best else to_host}


def fetched_s(decoder: Decoder, num_past: int) -> dict[int, dict[str, float]] | None:
    """What passes take when whole rows come and when likeliest tokens do, the fastest of several in turn.

    None where the device does not choose.
    """
    if not (isinstance(decoder, ArgmaxDecoder) and decoder.has_argmax):
        return None
    ways: dict[str, Callable[[TokenIds, int], object]] = {"rows": decoder.logits, "tokens": decoder.argmax}
    taken_s: dict[int, dict[str, float]] = {width: dict.fromkeys(ways, inf) for width in (1, 4, 8)}
    text = np.arange(num_past + max(taken_s), dtype=np.int32) % decoder.vocab_size
    for _ in range(_NUM_FETCHED):
        for width, by_way in taken_s.items():
            for way, run in ways.items():
                started = perf_counter()
                run(text[: num_past + width], width)
                by_way[way] = min(by_way[way], perf_counter() - started)
    return taken_s


def _logits_itemsize(model: ModelFolder) -> int:
    graph = onnx.load(str(model.folder / model.manifest.graph), load_external_data=False).graph
    (kind,) = (v.type.tensor_type.elem_type for v in graph.output if v.name == model.manifest.signature.logits)
    return int(onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize)


def answered(made: Made, schedule: str, device: Device, num_tokens: int) -> dict[str, Any]:
    """Answers in a schedule with a drafter on the CPU, and without, twice in turn; the faster of each."""
    how: dict[str, Any] = {"drafter": str(made.drafter), "draft_length": _DRAFT_LENGTH, "schedule": schedule}
    with load(made.target.folder, device=device.name, drafter_device="cpu", **how) as engine:
        plain = engine.plain()
        rounds = [[each.generate(_PROMPT, max_tokens=num_tokens) for each in (plain, engine)] for _ in range(2)]
        slow, fast = (max(pair, key=_speed) for pair in zip(*rounds, strict=True))
        prompt = engine.encode(_PROMPT)
        text = same_text(prompt, slow.token_ids, fast.token_ids, engine.target, _DRAFT_LENGTH + 1)
    stats = fast.stats
    return {
        "plain_tokens_per_second": _speed(slow),
        "tokens_per_second": _speed(fast),
        "tokens_per_pass": stats.tokens_per_pass,
        "acceptance_rate": stats.acceptance_rate,
        "overlap": stats.overlap,
        "schedule": stats.schedule,
        "target_device": stats.target_device,
        "text": text,
        "downgrades": list(stats.downgrades),
    }


def _speed(answer: Any) -> float:
    return float(answer.stats.decode_tokens_per_second or 0.0)


@contextmanager
def _peak_memory(device: Device, found: dict[str, Any]) -> Iterator[None]:
    """The most in use of the device's own memory beyond what was before, and of this process on the host."""
    places, ended = Places([device.memory], headroom, say), Event()
    place = places.of(device.memory)
    reads: dict[str, Callable[[], int]] = {"host": lambda: psutil.Process().memory_info().rss}
    if place != HOST and place in places():
        before = places()[place].free_bytes
        reads["device"] = lambda: before - places()[place].free_bytes
    peaks = dict.fromkeys(reads, 0)

    def poll() -> None:
        while not ended.wait(_POLL_S):
            with suppress(KeyError):  # the driver tells it no more
                for each, read in reads.items():
                    peaks[each] = max(peaks[each], read())

    with ExitStack() as stack:
        thread = Thread(target=poll, name="memory")
        thread.start()
        stack.callback(thread.join)
        stack.callback(ended.set)
        yield
    gc.collect()
    found["peak_bytes"] = {"device": peaks.get("device"), "host": peaks["host"]}


def lines_of(found: dict[str, Any]) -> list[str]:
    """A model's figures for a person."""
    title = f"{found['model']} in {found['precision']}"
    if "failed" in found:
        return [f"{title}: {found['failed']}", ""]
    lines = [f"{title}: weights {found['weights_bytes'] / 1e9:.2f} GB; its drafter is {found['drafter']}"]
    for past, widths in found["passes_s"].items():
        passes = ", ".join(f"{width}: {1e3 * s:.2f}" for width, s in widths.items())
        lines.append(f"  ms a pass behind {past} tokens by width: {passes}")
    prefill_ms, row_ms = (1e3 * found[each] for each in ("prefill_s", "row_s"))
    lines.append(f"  a token of a prompt {prefill_ms:.3f} ms, a further row {row_ms:.3f} ms")
    one, eight = found["bytes"][1], found["bytes"][8]
    carried = " and ".join(
        f"{each['to_device']} in, {each['to_host']} out, {each['to_host_greedy']} out of a greedy one"
        for each in (one, eight)
    )
    lines.append(f"  bytes of a pass of 1 and of 8: {carried}")
    for width, by_way in (found["fetched_s"] or {}).items():
        rows_ms, tokens_ms = (1e3 * by_way[way] for way in ("rows", "tokens"))
        lines.append(f"  a pass of {width}: {rows_ms:.2f} ms with its rows, {tokens_ms:.2f} with its tokens alone")
    for name, each in found["schedules"].items():
        kept = "-" if each["acceptance_rate"] is None else f"{each['acceptance_rate']:.0%}"
        lines.append(
            f"  {name}: {each['tokens_per_second']:.1f} tokens/s, plain {each['plain_tokens_per_second']:.1f}; "
            f"{kept} kept, both at work {each['overlap']:.0%}; text {each['text']}"
        )
    peak = found["peak_bytes"]
    own = "not told" if peak["device"] is None else f"{peak['device'] / 1e9:.2f} GB"
    lines.append(f"  most memory: device {own}, host {peak['host'] / 1e9:.2f} GB")
    for width, rows in found.get("rows", {}).items():
        apart = (
            "nowhere near" if rows["largest_difference"] is None else f"within {rows['largest_difference']:.2g} of"
        )
        lines.append(
            f"  rows in passes of {width}: {rows['verdict']}, {apart} their spread from the CPU's, "
            f"{rows['near_ties']} near-ties and {rows['wrong']} wrong of {rows['num_rows']}"
        )
    if chosen := found.get("chosen"):
        lines.append(
            f"  tokens chosen there: {chosen['verdict']}, {chosen['other']} of {chosen['num_rows']} others than "
            "those of its rows"
        )
    because = f" ({found['verdict_reason']})" if "verdict_reason" in found else ""
    return [*lines, f"  verdict: {found['verdict']}{because}", ""]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EdgeSpecError as error:
        say(f"gpu_check: {error}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(130)
