"""Which placements are worth measuring, and which is the best: a search that measures as few as it can.

All are foreseen first. Only one that promises nearly as much as the best is measured, for that means to prepare
the model, which may write gigabytes. The decision is one line for the user, and a file of the model home. Knows
nothing of how costs are foreseen or measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from edgespec.draft.limits import MIN_GAIN_OF_SCHEDULE
from edgespec.runtimes.devices import Device
from edgespec.setup.device_choice import describe
from edgespec.setup.planner import Plan, PlannedOption, Weighed, decide
from edgespec.system.typed_json import RecordFile
from edgespec.system.units import format_speed

# What is foreseen is right to about a third: attention, the way of logits, and other programs are not in it.
_REACH = 0.7


class Where(NamedTuple):
    """Names of the devices of a target and its drafters."""

    device: str
    drafter_device: str


class Refusal(NamedTuple):
    """A device that does not run its model; where both are named, devices that do not run both models at once."""

    device: str | None
    drafter_device: str | None
    reason: str

    def hits(self, where: Where) -> bool:
        pairs = zip((self.device, self.drafter_device), where, strict=True)
        return all(refused in (None, name) for refused, name in pairs)


def search(
    placements: Sequence[Where],
    foresee: Callable[[Where], Sequence[Weighed]],
    measure: Callable[[Where], Sequence[Weighed] | Refusal],
    is_wanted: Callable[[Where], bool] = lambda where: False,
) -> Plan | None:
    """The plan of all placements, of which the chosen one is always measured; None where none runs the models.

    Args:
        foresee: Options of a placement, with what is known by then of its target.
        measure: Options of a placement whose models were measured there, or why there are none.
        is_wanted: Whether a placement is measured whatever it promises; asked again after each measurement, for
            which models may have been prepared.

    Raises MemoryExhausted: No placement has room for the target.
    """
    options = {where: foresee(where) for where in placements}
    measured: set[Where] = set()
    refused: dict[Where, str] = {}
    while True:
        if options.keys() <= refused.keys() - measured:
            return None
        in_order = sorted(options, key=lambda where: where not in measured)  # of equal ones the first counts
        plan = decide([weighed for where in in_order for weighed in options[where]])
        done = measured | refused.keys()
        waiting = {where: _best_rate(weighed) for where, weighed in options.items() if where not in done}
        where = _most_promising(waiting, plan) or next(filter(is_wanted, waiting), None)
        if where is None:
            return plan
        found = measure(where)
        if isinstance(found, Refusal):
            refused |= {each: found.reason for each in options if found.hits(each)}
        else:
            options[where] = found
            measured.add(where)
        for each in options.keys() - measured:
            options[each] = [_refuse(one, refused.get(each, "")) for one in foresee(each)]


def _most_promising(rates: Mapping[Where, float], plan: Plan) -> Where | None:
    """The placement with the highest rate, if it may turn out better than a plan."""
    best = max(rates, key=rates.__getitem__, default=None)
    return None if best is None or rates[best] < _REACH * plan.chosen.tokens_per_second else best


def _best_rate(weighed: Sequence[Weighed]) -> float:
    """The most tokens a second of what may be chosen and was not measured elsewhere; 0 where nothing may.

    A drafter has to promise a gain: one that is too slow to be of use leaves a pipelined target what it was.
    """
    able = [option for _, option in weighed if option.can_be_chosen]
    plain = max((option.tokens_per_second for option in able if option.drafter is None), default=0.0)
    useful = (
        option.tokens_per_second
        for option in able
        if not option.is_measured
        and (option.drafter is None or option.tokens_per_second > MIN_GAIN_OF_SCHEDULE * plain)
    )
    return max(useful, default=0.0)


def _refuse(weighed: Weighed, reason: str) -> Weighed:
    case, option = weighed
    return (case, replace(option, obstacle=reason)) if reason else weighed


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Where a model and its drafters run, and the line that says so to the user."""

    device: str
    drafter_device: str
    line: str

    @property
    def where(self) -> Where:
        return Where(self.device, self.drafter_device)


FILE_NAME = "placements.json"


def decisions_in(home: Path) -> RecordFile[Decision]:
    """The decisions of a model home, by all that each holds for."""
    return RecordFile(home / FILE_NAME, dict[str, Decision], "decisions", version=1, most=64)


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
        drafter = "; no drafter model is expected to save time"
    return f"{model} runs on {describe(devices[chosen.target.device])}: {rates}{drafter}"


def _best_on(plan: Plan, device: str) -> PlannedOption | None:
    """The fastest option of a target on a device that may be chosen."""
    able = (option for option in plan.refused if option.target.device == device and option.can_be_chosen)
    return max(able, key=lambda option: option.tokens_per_second, default=None)


def _format_rate(option: PlannedOption) -> str:
    return ("" if option.is_measured else "about ") + format_speed(option.tokens_per_second, 0)
