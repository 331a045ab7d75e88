"""Machines whose figures were published, as machines.toml lists them."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from edgespec.errors import UsageError
from edgespec.simulation.device_pair import Machine
from edgespec.system.typed_json import read_as

Origin = Literal["published", "derived", "assumed"]
_Positive = Annotated[float, Meta(gt=0)]
_FILE = Path(__file__).with_name("machines.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure and where it comes from; how: what a source states, or the arithmetic."""

    value: _Positive
    origin: Origin
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """Times of passes over 1, 2, … tokens relative to one token, and where they come from."""

    value: Annotated[tuple[_Positive, ...], Meta(min_length=1)]
    origin: Origin
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedMachine:
    """drafters: Milliseconds of a drafted token by the device that drafts."""

    title: str
    sources: tuple[str, ...]
    target_ms: Figure
    acceptance: Figure
    verify_cost: Ratios
    drafters: dict[str, Figure]

    def drafter(self, name: str | None) -> tuple[str, Figure]:
        """A drafter by its name, or the fastest one.

        Raises UsageError: There is none of that name.
        """
        if name is None:
            name = min(self.drafters, key=lambda each: self.drafters[each].value)
        if name not in self.drafters:
            raise UsageError(f"--drafter-device is '{name}'; that machine drafts on: {', '.join(self.drafters)}")
        return name, self.drafters[name]

    def devices(self, drafter: str | None = None) -> Machine:
        """Its target and one of its drafters, for a simulation."""
        return Machine(
            target_s=self.target_ms.value / 1e3,
            draft_s=self.drafter(drafter)[1].value / 1e3,
            ratios=self.verify_cost.value,
        )


def read_machines() -> dict[str, PublishedMachine]:
    """All of them by name, in the order of the file."""
    with _FILE.open("rb") as file:
        stated = tomllib.load(file)
    return {name: read_as(PublishedMachine, each) for name, each in stated.items()}


def find_machine(name: str) -> PublishedMachine:
    """Raises UsageError: There is none of that name, with those that there are."""
    machines = read_machines()
    if name in machines:
        return machines[name]
    near = get_close_matches(name, machines, n=1)
    guess = f"did you mean {near[0]}? " if near else ""
    raise UsageError(f"--machine is '{name}'; {guess}the machines are {', '.join(machines)}; or list")


def describe(machine: PublishedMachine, drafter: str | None) -> Sequence[str]:
    """A line for each figure with its origin, and the sources."""
    name, draft_ms = machine.drafter(drafter)
    figures = {
        "target, ms a pass": machine.target_ms,
        f"drafter on the {name}, ms a token": draft_ms,
        "acceptance": machine.acceptance,
    }
    lines = [f"{what}: {each.value:g} ({each.origin}: {each.how})" for what, each in figures.items()]
    cost = machine.verify_cost
    lines.append(f"cost of a pass by rows: {', '.join(f'{x:g}' for x in cost.value)} ({cost.origin}: {cost.how})")
    return [machine.title, *(f"  {line}" for line in (*lines, *(f"source: {each}" for each in machine.sources)))]
