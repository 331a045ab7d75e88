"""What a plan compares: placements with what is known of their costs, and schedules on them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from edgespec.manifest import Manifest
from edgespec.memory.ladder import Bytes
from edgespec.profiling.profile import Place, Profile

Schedule = Literal["serial", "pipelined", "hedged"]
AnySchedule = Schedule | Literal["plain"]
SCHEDULES: tuple[AnySchedule, ...] = ("plain", "serial", "pipelined", "hedged")  # simple ones first


class Layout(NamedTuple):
    """A placement and its costs.

    drafter: The name of its manifest.
    is_measured: False where the costs are estimated from a model's size and a probe of its device.
    obstacle: Why it is compared and never chosen; empty if it may be.
    """

    target: Place
    profile: Profile
    drafter: str | None = None
    drafter_place: Place | None = None
    is_measured: bool = True
    obstacle: str = ""


class MemoryNeeds(NamedTuple):
    """What models need, and what is free.

    needed: Bytes by place that a model takes at a context length on a device.
    free_bytes: Bytes by place; a place that is missing is not bounded.
    """

    needed: Callable[[Manifest, int, str], Bytes]
    free_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A schedule on a placement, and its expected speed.

    draft_length: The most tokens that are verified at a time. wait: Drafted tokens that the target waits for
    after a miss. context_length: The longest context that fits the memory; 0 if none does, or the models cannot
    run the schedule. memory_bytes: What all its models take at that context, or at the shortest one if none
    fits. is_measured: Whether its speed rests on measurements of the models there. obstacle: Why it may not be
    chosen, though it could run. reason: Why it was chosen or refused.
    """

    schedule: AnySchedule
    target: Place
    drafter: str | None = None
    drafter_place: Place | None = None
    draft_length: int = 0
    wait: int = 0
    tokens_per_second: float
    context_length: int
    memory_bytes: int = 0
    is_measured: bool = True
    obstacle: str = ""
    reason: str = ""

    @property
    def can_be_chosen(self) -> bool:
        return self.context_length > 0 and not self.obstacle


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The chosen option, and the others."""

    chosen: Option
    refused: tuple[Option, ...]
    drafters: tuple[str, ...]  # names in order of use; those that draft from the text cost nothing and come last
    downgrades: tuple[str, ...]  # what does not fit the memory
    plain_tokens_per_second: float

    @property
    def options(self) -> tuple[Option, ...]:
        return (self.chosen, *self.refused)
