"""Which devices auto takes for a model: the decision as one line and as a file of the model home."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from edgespec.runtimes.devices import Device
from edgespec.setup.device_search import Where
from edgespec.setup.plan_option import AnySchedule, Plan, PlannedOption
from edgespec.system.disk import replace_file
from edgespec.system.typed_json import read_as, read_json
from edgespec.system.units import format_speed

FOLDER = "placements"
_VERSION = 1
_LARGEST_BYTES = 1 << 20

_Text = Annotated[str, Meta(max_length=1 << 12)]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Where a model and its drafters run.

    made_for: What the decision holds for: the devices of the machine with the versions of all that drives them.
    schedule: The one that was best then; each answer weighs it again.
    refused: Devices that did not run the model, with the reasons.
    """

    made_for: tuple[_Text, ...]
    device: _Text
    drafter_device: _Text
    schedule: AnySchedule
    line: _Text
    refused: Annotated[dict[_Text, _Text], Meta(max_length=64)] = field(default_factory=dict)

    @property
    def where(self) -> Where:
        return Where(self.device, self.drafter_device)


@dataclass(frozen=True)
class _Document:
    version: int
    decision: Decision


def read_decision(home: Path, models: Sequence[str], made_for: Sequence[str]) -> Decision | None:
    """The decision for models on a machine as it is now; None where there is none that can be used."""
    try:
        document = read_as(_Document, read_json(_path(home, models), _LARGEST_BYTES))
    except (OSError, ValueError):
        return None
    decision = document.decision
    return decision if document.version == _VERSION and decision.made_for == tuple(made_for) else None


def write_decision(home: Path, models: Sequence[str], decision: Decision) -> None:
    """Save a decision in place of an earlier one for the models; raises OSError: the home cannot be written."""
    path = _path(home, models)
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"version": _VERSION, "models": list(models), "decision": asdict(decision)}
    replace_file(path, json.dumps(document, indent=1).encode())


def _path(home: Path, models: Sequence[str]) -> Path:
    return home / FOLDER / f"{hashlib.sha256(json.dumps(list(models)).encode()).hexdigest()[:16]}.json"


def where_of(plan: Plan) -> Where:
    """The devices of a plan; a drafter that is not expected to pay is placed where it promises most."""
    chosen = plan.chosen
    beside = [chosen, *(option for option in plan.refused if option.target == chosen.target)]
    able = (each for each in beside if each.drafter_place and each.can_be_chosen and each.is_measured)
    best = max(able, key=lambda option: option.tokens_per_second, default=None)
    place = chosen.drafter_place or (best.drafter_place if best else None)
    return Where(chosen.target.device, place.device if place else "cpu")


def in_one_line(model: str, plan: Plan, devices: Mapping[str, Device]) -> str:
    """A line with the choice, and the speed that other devices promise.

    Example: tiny runs on webgpu (Radeon 780M): 41 tokens/s expected, 18 on the CPU; drafter on the CPU, pipelined
    """
    chosen = plan.chosen
    others = [
        f"{_format_rate(best)} on {describe(devices[name])}"
        for name in devices
        if name != chosen.target.device and (best := _best_on(plan, name))
    ]
    rates = ", ".join([f"{_format_rate(chosen)} tokens/s expected", *others])
    drafter = ""
    if chosen.drafter_place is not None:
        drafter = f"; drafter on {describe(devices[chosen.drafter_place.device])}, {chosen.schedule}"
    elif any(option.drafter for option in plan.refused):
        drafter = "; no drafter model is expected to pay"
    return f"{model} runs on {describe(devices[chosen.target.device])}: {rates}{drafter}"


def describe(device: Device) -> str:
    """Example: webgpu (Radeon 780M)."""
    if device.name == "cpu":
        return "the CPU"
    return f"{device.name} ({device.hardware})" if device.hardware else device.name


def _best_on(plan: Plan, device: str) -> PlannedOption | None:
    """The fastest option of a target on a device that may be chosen."""
    able = (option for option in plan.refused if option.target.device == device and option.can_be_chosen)
    return max(able, key=lambda option: option.tokens_per_second, default=None)


def _format_rate(option: PlannedOption) -> str:
    return ("" if option.is_measured else "about ") + format_speed(option.tokens_per_second, 0)
