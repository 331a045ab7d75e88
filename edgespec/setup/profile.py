"""How long passes, reading, draft steps, and both models at once take on this machine, in seconds, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, NamedTuple

from msgspec import Meta

from edgespec.draft.costs import ContextCosts, PassCosts, pass_costs
from edgespec.draft.draft_model import DraftCosts
from edgespec.draft.pass_estimate import MEASURED

# How much longer a pass after a longer text takes is believed where the two texts differ by this many tokens.
LEAST_SPAN = 400

# Bounds of what a file may state that somebody wrote by hand.
_Few = Meta(max_length=64)  # widths, texts and drafters
_Seconds = Annotated[float, Meta(ge=1e-9, le=1e5)]
_MaybeSeconds = Annotated[float, Meta(ge=0.0, le=1e5)]
_Factor = Annotated[float, Meta(ge=1.0, le=1e3)]
_Width = Annotated[int, Meta(ge=1, le=1 << 24)]
_NumHeld = Annotated[int, Meta(ge=0, le=1 << 24)]


class MeasuringTime(NamedTuple):
    """Seconds spent on learning a profile; 0 where it was known."""

    opening_s: float = 0.0
    measuring_s: float = 0.0

    def plus(self, more: "MeasuringTime") -> "MeasuringTime":
        return MeasuringTime(self.opening_s + more.opening_s, self.measuring_s + more.measuring_s)


class Place(NamedTuple):
    """Where a model runs, and with how many threads of the host."""

    device: str
    num_threads: int
    drivers: tuple[str, ...] = ()  # versions of what drives the device

    def __str__(self) -> str:
        return f"{self.device}, {self.num_threads} thread{'s' * (self.num_threads > 1)}"


def drafter_key(drafter: str, place: Place) -> str:
    """The name in a profile of a drafter that runs in a place."""
    return ", ".join([f"{drafter} on {place}", *place.drivers])


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterProfile:
    """How long a drafter takes beside its target.

    step_s: for each token that it drafts, or for the block that it drafts in a pass.
    row_s: for each token of the text that it has not read.
    branches: time of a step of several tokens over a step of one, by their number; 1 has 1.
    slowed: factors on a pass of the target and on a step of the drafter while both run.
    """

    step_s: _Seconds
    row_s: _MaybeSeconds
    branches: Annotated[Mapping[_Width, _Factor], _Few] = field(default_factory=lambda: {1: 1.0})
    slowed: tuple[_Factor, _Factor] = (1.0, 1.0)

    def __post_init__(self) -> None:
        if self.branches.get(1) != 1.0:
            raise ValueError("branches without a step of one token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How long a target takes on one device with one number of threads.

    passes_s: a pass, by the tokens that are held before it and then by its width, 1 among them.
    prefill_s: each token of a prompt.
    spread: how unsure the passes are, as the standard deviation of the log of one over another.
    transfer_s: each further row of logits out of a pass: its product with the head and its way to the host.
    drafters: by drafter_key.
    is_padded: passes of an odd width run one token more, as costs.PassCosts has it.
    """

    passes_s: Annotated[Mapping[_NumHeld, Annotated[Mapping[_Width, _Seconds], _Few]], _Few]
    prefill_s: _Seconds
    transfer_s: _MaybeSeconds = 0.0
    drafters: Annotated[Mapping[str, DrafterProfile], _Few] = field(default_factory=dict)
    spread: Annotated[float, Meta(ge=0.0, le=10.0)] = MEASURED
    is_padded: bool = False

    def __post_init__(self) -> None:
        if not self.passes_s or any(1 not in taken_s for taken_s in self.passes_s.values()):
            raise ValueError("passes without one of a single token")

    def pass_s(self, width: int, past: int) -> float:
        """Seconds of a pass of width tokens after past ones, on the line through the texts that were measured."""
        return self.costs().pass_s(width) + self.context_costs().steps(width, past) * self._near_s[1]

    @property
    def _near_s(self) -> Mapping[int, float]:
        """Seconds by width after the shortest text."""
        return self.passes_s[min(self.passes_s)]

    def costs(self) -> PassCosts:
        """Costs of passes after a short text, from which a draft policy starts."""
        return pass_costs(self._near_s, is_padded=self.is_padded)

    def spreads(self) -> dict[int, float]:
        """How unsure the ratios are, as costs.PassCosts holds it."""
        return {width: self.spread for width in self._near_s if width > 1}

    def context_costs(self) -> ContextCosts:
        """The costs that a longer text adds to passes."""
        near, far = min(self.passes_s), max(self.passes_s)
        if far - near < LEAST_SPAN:
            return ContextCosts(near)
        costs = ContextCosts.between(near, self.passes_s[near], far, self.passes_s[far])
        return costs.padded() if self.is_padded else costs

    def refine(
        self,
        ratios: Mapping[int, float] | None,
        drafter: str | None,
        drafts: tuple[float, float] | None,
        contention: tuple[float, float] | None = None,
    ) -> "Profile":
        """Apply what use has shown since: ratios of passes by width, a drafter's steps, and contention.

        Only ratios are stored, for the machine's speed changes; what a longer text adds stays as it was.
        """
        profile = self._with_ratios(PassCosts(dict(ratios), is_padded=self.is_padded)) if ratios else self
        if drafter is None or drafts is None or drafter not in self.drafters:
            return profile
        step_s = self.pass_s(1, 0)
        known = self.drafters[drafter]
        drafter_now = replace(
            known, step_s=drafts[0] * step_s, row_s=drafts[1] * step_s, slowed=contention or known.slowed
        )
        return replace(profile, drafters={**self.drafters, drafter: drafter_now})

    def _with_ratios(self, used: PassCosts) -> "Profile":
        near_s, known = self._near_s, self.costs()

        def refine_s(width: int, taken_s: float) -> float:
            more_s = used.ratio(width) * near_s[1] - near_s.get(width, known.pass_s(width))
            return max(taken_s + more_s, 1e-9)

        passes_s = {
            past: {width: refine_s(width, s) for width, s in taken_s.items()}
            for past, taken_s in self.passes_s.items()
        }
        return replace(self, passes_s=passes_s)

    def draft_costs(self, drafter: str) -> DraftCosts:
        """A drafter's costs in steps of the target, after a short text."""
        known, step_s = self.drafters[drafter], self.pass_s(1, 0)
        return DraftCosts(known.step_s / step_s, known.row_s / step_s)
