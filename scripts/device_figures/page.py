"""The page that a person reads: the machine, then the figures of each model."""

from collections.abc import Iterator
from typing import Any

from device_figures.passes import OTHER_KERNELS


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
    reason = f" ({found['verdict_reason']})" if "verdict_reason" in found else ""
    return [
        f"{title}: weights {found['weights_bytes'] / 1e6:.0f} MB, {found['device_bytes'] / 1e6:.0f} on a device; "
        f"opened in {found['opened_s']:.1f} s; drafter: {found['drafter']}",
        f"  {found['placement']}; passes of up to {found['max_pass_tokens']} tokens are right; "
        f"trees: {found['trees']}",
        *([f"  {found['strays']}"] if found["strays"] else []),
        *format_passes(found),
        *format_transfers(found),
        *format_answers(found["schedules"]),
        format_peak_memory(found["peak_bytes"]),
        *format_comparison(found),
        f"  verdict: {found['verdict']}{reason}",
        "",
    ]


def format_passes(found: dict[str, Any]) -> Iterator[str]:
    """What passes take by width: later ones, the first ones, and those with other kernels."""
    for past, widths in found["passes_s"].items():
        step_s = widths[min(widths)]
        passes = ", ".join(f"{width}: {1e3 * s:.2f} ({s / step_s:.2f})" for width, s in widths.items())
        yield f"  ms a pass after {past} tokens by width, and in steps: {passes}"
    cold = ", ".join(
        f"{width}: {1e3 * one:.1f}, {1e3 * later:.1f}" for width, (one, later) in found["cold_s"].items()
    )
    yield f"  ms of the first pass of a width and of a later one: {cold}"
    if other := found["other_kernels_s"]:
        passes = ", ".join(f"{width}: {1e3 * s:.2f}" for width, s in other["passes_s"].items())
        yield f"  with {'='.join(OTHER_KERNELS)}: {passes}; opened in {other['opened_s']:.1f} s"
    prefill_ms, row_ms = (1e3 * found[each] for each in ("prefill_s", "row_s"))
    yield f"  a token of a prompt {prefill_ms:.3f} ms, a further row {row_ms:.3f} ms"


def format_transfers(found: dict[str, Any]) -> Iterator[str]:
    """The bytes that a pass carries, and what passes take that return whole rows or tokens alone."""
    for width in (1, 8):
        carried = found["bytes"][width]
        out = f"{carried['to_host']} to the host, or {carried['to_host_greedy']} if greedy"
        yield f"  bytes of a pass of {width}: {carried['to_device']} to the device, {out}"
    for width, by_way in (found["fetched_s"] or {}).items():
        rows_ms, tokens_ms = (1e3 * by_way[way] for way in ("rows", "tokens"))
        yield f"  a pass of {width}: {rows_ms:.2f} ms with whole rows, {tokens_ms:.2f} ms with tokens alone"


def format_answers(schedules: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, each in schedules.items():
        accepted = "-" if each["acceptance_rate"] is None else f"{each['acceptance_rate']:.0%}"
        yield (
            f"  {name}: {each['tokens_per_second']:.1f} tokens/s, plain {each['plain_tokens_per_second']:.1f}; "
            f"{accepted} accepted, both models at work {each['overlap']:.0%}; text {each['text']}"
        )


def format_peak_memory(peak: dict[str, int | None]) -> str:
    device, host = peak["device"], peak["host"] or 0
    own = "not reported" if device is None else f"{device / 1e9:.2f} GB"
    return f"  peak memory: device {own}, host {host / 1e9:.2f} GB"


def format_comparison(found: dict[str, Any]) -> Iterator[str]:
    """How far rows are from the CPU's, and how many tokens differ that the device chose itself."""
    for width, rows in found.get("rows", {}).items():
        largest = rows["largest_difference"]
        spread = "not finite" if largest is None else f"within {largest:.2g} standard deviations"
        counts = f"{rows['near_ties']} near-ties and {rows['wrong']} wrong of {rows['num_rows']}"
        yield f"  rows in passes of {width}: {rows['verdict']}, {spread} of the CPU's, {counts}"
    if chosen := found.get("chosen"):
        differing = f"{chosen['other']} of {chosen['num_rows']} differ from its rows"
        yield f"  tokens chosen on the device: {chosen['verdict']}, {differing}"
