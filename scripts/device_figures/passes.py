"""A target's passes on a device: what they take, how many bytes they carry, and whether they are right."""

import gc
from dataclasses import replace
from math import inf
from time import perf_counter
from typing import Any

import numpy as np
import onnx
from compare_with_cpu import compare_with_cpu

from edgespec.decoding.decoder import BEST, LOGITS, Decoder, Pass
from edgespec.errors import EdgeSpecError
from edgespec.manifest import Manifest
from edgespec.memory.free_memory import free_memory
from edgespec.runtimes import cuda
from edgespec.runtimes.devices import Device, find_device
from edgespec.runtimes.node_placement import find_strays, format_placement, read_node_placement
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.tree import OnnxTreeDecoder, can_run_trees
from edgespec.setup.measure import profile_target
from edgespec.setup.open_model import ModelFolder, open_model, weights_bytes

_WIDTHS = (1, 2, 4, 8, 16, 32)
_CPU_GROWTH = {"int4": 1.0, "fp16": 2.0, "fp32": 1.0}  # the CPU widens half floats
_RESERVE_BYTES = 2 << 30
_NUM_PASSES = 8
_COLD_WIDTHS = (3, 5, 7, 12)  # which no other measurement has run before
# Other kernels of CUDA's provider for matrices in blocks. ONNX Runtime has them off (docs/log/devices.md).
OTHER_KERNELS = ("ep.cuda.fpa_intb_gemm", "1")


def measure_target(target: ModelFolder, device: Device) -> dict[str, Any]:
    """Passes of the target by width, the bytes that they carry, and its rows compared with the CPU's."""
    started_s = perf_counter()
    decoder: Any = open_model(target, device, None, False, False)
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
        "chooses": decoder.can.best,
        "cold_s": cold_s,
        "passes_s": {str(past): dict(widths) for past, widths in profile.passes_s.items()},
        "prefill_s": profile.prefill_s,
        "row_s": profile.transfer_s,
        "bytes": {width: bytes_of_pass(target.manifest, near, width, itemsize) for width in _WIDTHS},
        "fetched_s": time_ways_to_fetch(decoder, near),
    }
    found |= compare_if_room(target, decoder)
    del decoder  # one session at a time is on the device
    gc.collect()
    return found | {"trees": check_trees(target, device), "other_kernels_s": time_other_kernels(target, device)}


def compare_if_room(target: ModelFolder, decoder: OnnxDecoder) -> dict[str, Any]:
    """The rows compared with the CPU's, where the host has memory for the model a second time."""
    room = free_memory()
    needed = _CPU_GROWTH[target.manifest.precision] * weights_bytes(target) * 1.35 + _RESERVE_BYTES
    if needed > room.free_bytes:
        free = f"{room.free_bytes / 2**30:.1f} free within {room.bound}"
        reason = f"about {needed / 2**30:.1f} GiB are needed and {free}"
        return {"verdict": "not compared", "verdict_reason": reason}
    return compare_with_cpu(decoder, open_model(target, find_device("cpu"), None, False, False))


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
    decoder = open_model(target, replace(device, entries=(*device.entries, OTHER_KERNELS)), None, False, False)
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
    if not decoder.can.best:
        return None
    ways = {"rows": LOGITS, "tokens": BEST}
    fastest_s: dict[int, dict[str, float]] = {width: dict.fromkeys(ways, inf) for width in (1, 4, 8)}
    text = np.arange(num_past + max(fastest_s), dtype=np.int32) % decoder.vocab_size
    for _ in range(_NUM_PASSES):
        for width, by_way in fastest_s.items():
            for way, wants in ways.items():
                started = perf_counter()
                decoder.run(Pass(text[: num_past + width], num_last=width, wants=wants))
                by_way[way] = min(by_way[way], perf_counter() - started)
    return fastest_s


def logits_itemsize(model: ModelFolder) -> int:
    graph = onnx.load(str(model.folder / model.manifest.graph), load_external_data=False).graph
    (kind,) = (v.type.tensor_type.elem_type for v in graph.output if v.name == model.manifest.signature.logits)
    return int(onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize)
