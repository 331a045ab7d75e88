"""Two devices by their figures, and an upper bound of the speed of every schedule on them. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import combinations_with_replacement
from typing import Annotated, Generic, Literal, TypeVar

from msgspec import Meta

from edgespec.draft.limits import MAX_FIXED_TOKENS
from edgespec.draft.option import expected_tokens
from edgespec.errors import UsageError
from edgespec.system.tables import read_table
from edgespec.system.typed_json import read_as


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A target on one device and a drafter on another.

    target_s: Seconds of a pass over one token.
    draft_s: Seconds of a drafted token.
    ratios: Times of passes over 1, 2, … tokens, relative to one token; extended by the last difference.
    draft_ratios: Times of steps of the drafter over 1, 2, … branches, relative to one; extended likewise.
    """

    target_s: float
    draft_s: float
    ratios: Sequence[float] = (1.0,)
    draft_ratios: Sequence[float] = (1.0,)

    @property
    def step(self) -> float:
        """Time of a drafted token relative to a pass over one token."""
        return self.draft_s / self.target_s

    def ratio(self, num_draft: int) -> float:
        """Time of a pass over num_draft + 1 tokens relative to a pass over one token."""
        return _extended(self.ratios, num_draft)

    def draft_ratio(self, num_rows: int) -> float:
        """Time of a step of the drafter over num_rows branches relative to a step over one."""
        return _extended(self.draft_ratios, num_rows - 1)

    def verify_s(self, num_fed: int) -> float:
        return self.target_s * self.ratio(max(0, num_fed - 1))


def _extended(ratios: Sequence[float], index: int) -> float:
    """A ratio of a sequence that goes on with its last difference."""
    beyond = index - (len(ratios) - 1)
    if beyond <= 0:
        return ratios[index]
    slope = ratios[-1] - ratios[-2] if len(ratios) > 1 else 0.0
    return ratios[-1] + max(0.0, slope) * beyond


def bound(machine: Machine, chance_at: Callable[[int], float]) -> float:
    """The most tokens a second that any schedule yields with drafts in a chain and both devices always busy.

    A pass over n drafted tokens yields E(n) = 1 + a₁ + a₁a₂ + … and takes r(n); the drafter takes a step of time c
    for each of them. For every mixture of rounds the time is at least that of the passes and that of the drafts,
    so the rate is at most the maximum over mixtures of (mean E) / max(mean r, c · mean n). At an integer n and
    without the drafter's part this is the ceiling of perfect prediction. Overlap at most doubles the speed of
    drafts in sequence.

    chance_at: The chance that the token at a position in a draft is accepted, if all before it were.
    """
    totals = expected_tokens(map(chance_at, range(MAX_FIXED_TOKENS)))
    points = [(totals[n], machine.ratio(n), n * machine.step) for n in range(MAX_FIXED_TOKENS + 1)]
    return (
        max(_best_mixture(one, other) for one, other in combinations_with_replacement(points, 2))
        / machine.target_s
    )


def _best_mixture(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    """The best rate of a mixture of two kinds of rounds, given the yield, pass time and draft time of each.

    It is at an end or where verifying and drafting take equally long: between these points the rate is a ratio of
    linear functions of the share.
    """
    shares = [0.0, 1.0]
    gap, other_gap = one[1] - one[2], other[1] - other[2]
    if gap * other_gap < 0:
        shares.append(gap / (gap - other_gap))
    rates = []
    for share in shares:
        total, verifying, drafting = ((1 - share) * x + share * y for x, y in zip(one, other, strict=True))
        rates.append(total / max(verifying, drafting))
    return max(rates)


Origin = Literal["published", "measured", "derived", "assumed"]
_Positive = Annotated[float, Meta(gt=0)]


Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated(Generic[Value]):
    """A figure and where it comes from; how: what a source states, or the arithmetic."""

    value: Value
    origin: Origin
    how: str


Figure = Stated[_Positive]
Ratios = Stated[Annotated[tuple[_Positive, ...], Meta(min_length=1)]]  # of passes over 1, 2, … tokens to one token


_Pass = tuple[Annotated[int, Meta(gt=0)], _Positive]  # rows, and milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CardForm:
    """Times of passes of a model in one form on a GPU, by their rows and where the figures come from."""

    vocab_size: int
    measured: tuple[_Pass, ...] = ()
    derived: tuple[_Pass, ...] = ()
    assumed: tuple[_Pass, ...] = ()

    @property
    def passes_ms(self) -> dict[int, float]:
        """Milliseconds of a pass by its rows, ascending."""
        return dict(sorted((*self.measured, *self.derived, *self.assumed)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Figures of a GPU beside the times of its passes.

    first_use_ms: Added to the first pass of a width.
    host_gap_ms: Between two passes. plain_gap_ms: Where nothing drafts.
    copied_gb_s: 10⁹ bytes a second of rows of logits that are copied to the host.
    """

    first_use_ms: Figure
    host_gap_ms: Figure
    plain_gap_ms: Figure
    copied_gb_s: Figure
    forms: dict[str, CardForm]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedMachine:
    """drafters: Milliseconds of a drafted token by the device that drafts. card: Of a GPU that edgespec ran on."""

    title: str
    sources: tuple[str, ...]
    target_ms: Figure
    acceptance: Figure
    verify_cost: Ratios
    drafters: dict[str, Figure]
    card: Card | None = None

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
        """Its target and one of its drafters, for a simulation; passes with the host's time between them."""
        gap_ms, one_ms = self.card.host_gap_ms.value if self.card else 0.0, self.target_ms.value
        return Machine(
            target_s=(one_ms + gap_ms) / 1e3,
            draft_s=self.drafter(drafter)[1].value / 1e3,
            ratios=[(one_ms * ratio + gap_ms) / (one_ms + gap_ms) for ratio in self.verify_cost.value],
        )


def read_machines() -> dict[str, PublishedMachine]:
    """All of them by name, in the order of the file."""
    return {name: read_as(PublishedMachine, each) for name, each in read_table(__file__, "machines.toml").items()}


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
    if machine.card:
        figures["between two passes, ms"] = machine.card.host_gap_ms
    lines = [f"{what}: {each.value:g} ({each.origin}: {each.how})" for what, each in figures.items()]
    cost = machine.verify_cost
    lines.append(f"cost of a pass by rows: {', '.join(f'{x:g}' for x in cost.value)} ({cost.origin}: {cost.how})")
    return [machine.title, *(f"  {line}" for line in (*lines, *(f"source: {each}" for each in machine.sources)))]
