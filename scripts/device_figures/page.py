"""The page that a person reads: the machine, then a line for each figure."""

from dataclasses import dataclass, field
from typing import Any

from edgespec.system.units import format_bytes


@dataclass(frozen=True, slots=True)
class Figure:
    """A line of the page.

    values: What the line says, for programs.
    advice: What to do about it, where it is bad.
    is_wrong: The device computes wrongly, or the measurement failed.
    """

    text: str
    values: dict[str, Any] = field(default_factory=dict)
    advice: str | None = None
    is_wrong: bool = False


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


def name_mode(*, is_deterministic: bool) -> str:
    """The mode that a figure is of; deterministic, with one text whatever drafts, is the default if it holds."""
    return "deterministic" if is_deterministic else "not deterministic"


def format_memory(total: int | None, free: int | None) -> str:
    if total is None or free is None:
        return "no memory of its own"
    return f"{format_bytes(total)}, {format_bytes(free)} free"


def by_width(taken_s: dict[int, float], of_one: bool = False) -> str:
    """Milliseconds by width, with of_one also in times of the narrowest."""
    step_s = taken_s[min(taken_s)]
    steps = {width: f" ({s / step_s:.2f})" if of_one else "" for width, s in taken_s.items()}
    return ", ".join(f"{width}: {1e3 * s:.2f}{steps[width]}" for width, s in taken_s.items())
