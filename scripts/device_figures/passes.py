"""A target's passes on a device: what they take by width, and whether they are right and always the same."""

import json
import zlib
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from compare_with_cpu import compare_with_cpu

from device_figures.models import Checked, LeftOut
from device_figures.page import Figure, by_width, name_mode
from edgespec.errors import EdgeSpecError
from edgespec.memory.free_memory import free_memory
from edgespec.runtimes import cuda
from edgespec.runtimes.device_checks import DeviceCheck, DeviceChecks
from edgespec.runtimes.device_rows import choice_graph
from edgespec.runtimes.devices import Device, find_device, import_onnxruntime
from edgespec.runtimes.node_placement import find_strays, format_placement, read_node_placement
from edgespec.runtimes.session import fast_model, load_graph
from edgespec.runtimes.tree import OnnxTreeDecoder, can_run_trees
from edgespec.setup.open_model import ModelFolder, open_model, weights_bytes
from edgespec.setup.row_proof import MOST_COST
from edgespec.system.units import format_bytes

# Other kernels of CUDA's provider for matrices in blocks. ONNX Runtime has them off (docs/log/devices.md).
OTHER_KERNELS = ("ep.cuda.fpa_intb_gemm", "1")
_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_NEAR, _FAR, _WIDTHS_FAR = 256, 2048, (1, 8)  # tokens of text before passes
_REPEATS = 6
_FREE = 1.3  # four rows that take longer than this many times one row cost a draft more than it gives
_CHOICE_ROWS, _CHOICE_S = (1, 2, 4, 8), 0.0005
_READ, _LONGEST_ROWS = 64, 192  # tokens that are read at once, and of the text whose rows are compared
_ROW_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
_PROMPTS = (50, 200, 500, 1000, 1500)
_CPU_GROWTH, _RESERVE_BYTES = {"fp16": 2.0}, 2 << 30  # the CPU widens half floats


def open_target(target: ModelFolder, device: Device, *, deterministic: bool = False) -> Any:
    """A decoder whose passes are started anew each time, not replayed."""
    return open_model(target, replace(device, records_passes=False), deterministic=deterministic)


def find_placement(checked: Checked, precision: str) -> Iterator[Figure]:
    """Where operators run, and how the likeliest token is found, with ties and by rows."""
    target, device = checked.form(precision), checked.device
    started_s = perf_counter()
    decoder = open_target(target, device)
    opened_s = perf_counter() - started_s
    placement = read_node_placement(decoder._passes._session)
    strays = find_strays(placement, device, target.manifest.kv_cache.num_layers)
    widths = decoder.can.widths
    yield Figure(
        f"opened in {opened_s:.1f} s, {name_mode(is_deterministic=False)}; "
        f"{format_placement(placement)}; passes of up to {decoder.chunk_tokens} "
        f"tokens are right, padded to widths {', '.join(map(str, widths)) or '(none)'}",
        {"opened_s": opened_s, "max_pass_tokens": decoder.chunk_tokens, "widths": widths},
        strays and f"{strays}: each costs a copy to the host and back in every pass",
    )
    del decoder
    yield from _find_mode(DeviceChecks(target.folder, target.manifest, device).read())
    graph, names = target.folder / target.manifest.graph, target.manifest.signature
    if names.best is None:
        raise LeftOut("the graph finds no likeliest token")
    is_first = DeviceChecks(target.folder, target.manifest, device).chooses_the_first()
    content = fast_model(graph, target.manifest, device) or graph.read_bytes()
    taken_s = _time_choice(load_graph(graph, device, choice_graph(content, names)), target, device)
    is_slow = max(taken_s.values()) > max(_CHOICE_S, 5 * taken_s[1]) and device.memory != "cpu"
    yield Figure(
        f"the likeliest token of {target.manifest.vocab_size} by rows, ms: {by_width(taken_s)}; of equal ones "
        f"{'the first' if is_first else 'another than the first'}",
        {"is_first": is_first, "taken_s": taken_s},
        "the nodes that find the likeliest token are slow on this device: runtimes/device_rows.py needs others"
        if is_slow
        else None
        if is_first
        else "ties are not resolved as on the host, so whole rows are copied: see runtimes/device_rows.py",
    )


def _find_mode(check: DeviceCheck | None) -> Iterator[Figure]:
    """What deterministic mode costs before a draft, and whether it is the default where rows are equal."""
    if not check or not (same := check.shapes[True]):
        return
    mode = name_mode(is_deterministic=check.same_cost <= MOST_COST)
    yield Figure(
        f"in deterministic mode passes have {same.rows[0]} tokens, and {same.reads[0]} of a prompt; one without a "
        f"draft takes {check.same_cost:.2f} times as long as outside it; the default, if rows are equal: {mode}",
        {"widths": same.rows, "reads": same.reads, "cost": check.same_cost, "mode": mode},
    )


def _time_choice(session: Any, target: ModelFolder, device: Device) -> dict[int, float]:
    """Seconds of the nodes that find the likeliest token, by rows, over rows that are on the device."""
    names, new = target.manifest.signature, import_onnxruntime().OrtValue.ortvalue_from_shape_and_type
    if device.memory != "cpu":
        new = session.create_ortvalue_from_shape_and_type
    taken_s = {}
    for num_rows in _CHOICE_ROWS:
        binding, taken_s[num_rows] = session.io_binding(), inf
        with cuda.GATE:
            rows = new((1, num_rows, target.manifest.vocab_size), np.float32, device.memory, device.memory_index)
            binding.bind_ortvalue_input(names.logits, rows)
            binding.bind_output(names.best, "cpu")
            for _ in range(2 * _REPEATS):
                started_s = perf_counter()
                session.run_with_iobinding(binding)
                taken_s[num_rows] = min(taken_s[num_rows], perf_counter() - started_s)
    return taken_s


def time_passes(checked: Checked, precision: str, *, has_other_kernels: bool = False) -> Iterator[Figure]:
    """Passes by width as they are, without padding, and the first pass of each width."""
    target, device, name = checked.form(precision), checked.device, precision
    if has_other_kernels:
        if device.provider != cuda.PROVIDER:
            raise LeftOut("only CUDA has these kernels")
        device, name = replace(device, entries=(*device.entries, OTHER_KERNELS)), f"{precision}, fpA_intB"
    started_s = perf_counter()
    decoder = open_target(target, device)
    opened_s = perf_counter() - started_s
    first_s, near_s = _time_widths(decoder, _NEAR, _WIDTHS)
    yield Figure(
        f"{name}, {name_mode(is_deterministic=False)}, opened in {opened_s:.1f} s; "
        f"ms a pass after {_NEAR} tokens by rows, and in passes of one: "
        f"{by_width(near_s, of_one=True)}",
        {"form": name, "opened_s": opened_s, "passes_s": near_s},
        f"four rows take {near_s[4] / near_s[1]:.2f} times one row in {name}: a draft has to be accepted more "
        "often than that costs; a form whose rows are free serves drafting better"
        if near_s[4] > _FREE * near_s[1]
        else None,
    )
    yield Figure(f"{name}, ms of the first pass of a width: {by_width(first_s)}", {"first_s": first_s})
    _, far_s = _time_widths(decoder, _FAR, _WIDTHS_FAR)
    yield Figure(f"{name}, ms a pass after {_FAR} tokens: {by_width(far_s)}", {"far_s": far_s})


def _time_widths(
    decoder: Any, num_past: int, widths: tuple[int, ...]
) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of the first pass of each width, and of the fastest later one."""
    decoder.cache.pretend(np.arange(num_past, dtype=np.int32) % decoder.vocab_size)
    output = decoder._best_name if decoder.has_argmax and decoder._best_name else decoder._logits_name
    first_s, later_s = {}, dict.fromkeys(widths, inf)
    for i in range(_REPEATS):
        for width in widths:
            started_s = perf_counter()
            decoder._passes.run(np.zeros(width, np.int32), num_past, width, output=output)
            taken_s = perf_counter() - started_s
            if i:
                later_s[width] = min(later_s[width], taken_s)
            else:
                first_s[width] = taken_s
    return first_s, later_s


def compare_rows_by_width(checked: Checked, precision: str) -> Iterator[Figure]:
    """Which widths give equal bits, whether a width always does, and whether it does so in another session.

    The first session leaves its rows in a file; the second one compares with these.
    """
    decoder = open_target(checked.form(precision), checked.device)
    found, again = (_row_sums(decoder) for _ in range(2))
    alike: dict[tuple[int, ...], list[int]] = {}
    for width, sums in found.items():
        alike.setdefault(sums, []).append(width)
    groups = list(alike.values())
    yield Figure(
        f"{precision}: widths whose rows are equal to the bit: {' | '.join(map(_listed, groups))}",
        {"form": precision, "groups": groups},
    )
    changed = [width for width in found if found[width] != again[width]]
    yield Figure(
        f"{precision}: widths whose rows change from one pass to the next: {_listed(changed)}",
        {"form": precision, "changed": changed},
        f"no text can be repeated in {precision} in passes of {_listed(changed)}: some kernel adds in no fixed "
        "order; find it by outputs after each layer"
        if changed
        else None,
    )
    yield from _compare_sessions(checked.folder / f"rows-{precision}.json", found, precision)


def _compare_sessions(path: Path, found: dict[int, tuple[int, ...]], precision: str) -> Iterator[Figure]:
    if not path.exists():
        path.write_text(json.dumps({str(width): sums for width, sums in found.items()}))
        return
    before = {int(width): tuple(sums) for width, sums in json.loads(path.read_text()).items()}
    differing = {width: sum(map(int.__ne__, found[width], before[width])) for width in found}
    changed = [width for width, num in differing.items() if num]
    yield Figure(
        f"{precision}: rows that another session computes differently, by width, of {_LONGEST_ROWS - _READ}: "
        f"{', '.join(f'{width}: {num}' for width, num in differing.items())}",
        {"form": precision, "differing": differing},
        f"{precision} gives another text in another session in passes of {_listed(changed)}: kernels are chosen "
        "by timing; deterministic mode holds within a session only"
        if changed
        else None,
    )


def _listed(widths: list[int]) -> str:
    return ", ".join(map(str, widths)) or "none"


def _row_sums(decoder: Any) -> dict[int, tuple[int, ...]]:
    """Checksums of the rows of one text, by the width of the passes that make them."""
    text = (np.arange(_LONGEST_ROWS) * 7919 % decoder.vocab_size).astype(np.int32)
    sums = {}
    for width in _ROW_WIDTHS:
        decoder.cache.pretend(text[:0])
        decoder._passes.run(text[:_READ], 0, 1)
        of_width: list[int] = []
        for start in range(_READ, _LONGEST_ROWS, width):
            rows = decoder._passes.run(text[start : start + width], start, width)
            of_width += [zlib.crc32(row.tobytes()) for row in rows]
        sums[width] = tuple(of_width)
    return sums


def time_prompts(checked: Checked, precision: str) -> Iterator[Figure]:
    """Prompts by length, each the first time and again, in the mode with one text, the default, and without it."""
    for deterministic in (True, False):
        decoder = open_target(checked.form(precision), checked.device, deterministic=deterministic)
        yield from _time_prompts(decoder, name_mode(is_deterministic=deterministic))
        del decoder


def _time_prompts(decoder: Any, mode: str) -> Iterator[Figure]:
    for i, num_tokens in enumerate(_PROMPTS):
        taken_s = []
        for again in range(3):
            text = (np.arange(num_tokens, dtype=np.int32) + 10 * i + again) % decoder.vocab_size
            started_s = perf_counter()
            decoder.logits(text, 1)
            taken_s.append(perf_counter() - started_s)
        first_s, later_s = taken_s[0], min(taken_s[1:])
        yield Figure(
            f"{mode}, a prompt of {num_tokens}: {1e3 * first_s:.1f} ms first, {1e3 * later_s:.1f} later "
            f"({num_tokens / later_s:.0f} tokens/s)",
            {"mode": mode, "num_tokens": num_tokens, "first_s": first_s, "later_s": later_s},
            f"the first prompt of {num_tokens} tokens took {first_s / later_s:.1f} times a later one: it met a "
            "width or a size of the cache that had not run; see runtimes/pass_shapes.py"
            if first_s > 2 * later_s and first_s - later_s > 0.01
            else None,
        )


def compare_to_cpu(checked: Checked, precision: str) -> Iterator[Figure]:
    """Rows, greedy tokens and trees beside the CPU's, where the host has memory for the model a second time."""
    target, device, room = checked.form(precision), checked.device, free_memory()
    needed = _CPU_GROWTH.get(precision, 1.0) * weights_bytes(target) * 1.35 + _RESERVE_BYTES
    if needed > room.free_bytes:
        free = f"{format_bytes(room.free_bytes)} free within {room.bound}"
        raise LeftOut(f"about {format_bytes(needed)} are needed on the host and {free}")
    found = compare_with_cpu(open_target(target, device), open_target(target, find_device("cpu")))
    for width, rows in found["rows"].items():
        largest = rows["largest_difference"]
        spread = "not finite" if largest is None else f"within {largest:.2g} standard deviations"
        counts = f"{rows['near_ties']} near-ties and {rows['wrong']} wrong of {rows['num_rows']}"
        text = f"rows in passes of {width}: {rows['verdict']}, {spread} of the CPU's, {counts}"
        yield Figure(text, {"width": width, **rows}, is_wrong=rows["verdict"] != "right")
    if chosen := found["chosen"]:
        differing = f"{chosen['other']} of {chosen['num_rows']} differ from its rows"
        text = f"tokens chosen on the device: {chosen['verdict']}, {differing}"
        yield Figure(text, {"chosen": chosen}, is_wrong=chosen["verdict"] != "right")
    trees = _check_trees(target, device)
    yield Figure(f"trees of drafts in one pass: {trees}", {"trees": trees})


def _check_trees(target: ModelFolder, device: Device) -> str:
    if not can_run_trees(target.manifest, device):
        return "not for this device"
    try:
        decoder = OnnxTreeDecoder(*target, device)
    except EdgeSpecError as error:
        return f"refused: {error}"
    return "right" if decoder._runs_trees else "wrong, so that each branch has a pass of its own"
