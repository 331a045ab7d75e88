"""What a target and its drafters take on this machine, as data: passes, reading, draft steps, and both at once.

Times are in seconds. Knows nothing of decoders.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from edgespec.costs import DraftCosts, HeldCosts, PassCosts, measured

_MOST = 64  # widths, contexts and drafters in a file that somebody may have written by hand
_LONGEST_S = 1e5
# What two texts tell of the tokens between them is believed where they lie so far apart, in tokens.
LEAST_SPAN = 400


class Took(NamedTuple):
    """Seconds that were spent to learn a profile; none where it was known."""

    opening_s: float = 0.0
    measuring_s: float = 0.0

    def plus(self, more: "Took") -> "Took":
        return Took(self.opening_s + more.opening_s, self.measuring_s + more.measuring_s)


class Place(NamedTuple):
    """Where a model runs, and with how many threads of the host.

    drivers: versions of what drives the device.
    """

    device: str
    num_threads: int
    drivers: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.device}, {self.num_threads} thread{'s' * (self.num_threads > 1)}"


def beside(drafter: str, place: Place) -> str:
    """What a profile calls a drafter that runs there."""
    return ", ".join([f"{drafter} on {place}", *place.drivers])


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterProfile:
    """What a drafter takes beside its target.

    step_s: for each token that it drafts.
    row_s: for each token of the text that it has not read.
    branches: a step of several tokens over a step of one, by their number; 1 has 1.
    slowed: factors on a pass of the target and on a step of the drafter while both run.
    """

    step_s: float
    row_s: float
    branches: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})
    slowed: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a target takes on one device with one number of threads.

    passes_s: of a pass, by the tokens that are held before it and then by its width, 1 among them.
    prefill_s: for each token of a prompt.
    transfer_s: for each further row of logits out of a pass: its product with the head and its way to the host.
    drafters: by what beside() calls them.
    """

    passes_s: Mapping[int, Mapping[int, float]]
    prefill_s: float
    transfer_s: float = 0.0
    drafters: Mapping[str, DrafterProfile] = field(default_factory=dict)

    def pass_s(self, width: int, past: int) -> float:
        """Of width tokens behind past tokens: on the line through the shortest and the longest that were held."""
        near_s = self.passes_s[min(self.passes_s)]
        return measured(near_s).of(width) + self.held_costs().of(width, past) * near_s[1]

    def costs(self) -> PassCosts:
        """Of passes behind a short text, as a gate starts from them."""
        return measured(self.passes_s[min(self.passes_s)])

    def held_costs(self) -> HeldCosts:
        """What a longer text adds to these."""
        near, far = min(self.passes_s), max(self.passes_s)
        if far - near < LEAST_SPAN:
            return HeldCosts(near)
        return HeldCosts.between(near, self.passes_s[near], far, self.passes_s[far])

    def refined(
        self, ratios: Mapping[int, float] | None, drafter: str | None, drafts: tuple[float, float] | None
    ) -> "Profile":
        """With what use has shown since: ratios of passes by width, and the steps that a drafter takes.

        Only ratios are kept in use, for the machine's mood changes; what a longer text adds stays as it was.
        """
        profile = self._with_ratios(PassCosts(dict(ratios))) if ratios else self
        if drafter is None or drafts is None or drafter not in self.drafters:
            return profile
        step_s = self.pass_s(1, 0)
        drafter_now = replace(self.drafters[drafter], step_s=drafts[0] * step_s, row_s=drafts[1] * step_s)
        return replace(profile, drafters={**self.drafters, drafter: drafter_now})

    def _with_ratios(self, used: PassCosts) -> "Profile":
        near_s, known = self.passes_s[min(self.passes_s)], self.costs()

        def refined_s(width: int, taken_s: float) -> float:
            more_s = used.ratio(width) * near_s[1] - near_s.get(width, known.of(width))
            return max(taken_s + more_s, 1e-9)

        passes_s = {
            past: {width: refined_s(width, s) for width, s in taken_s.items()}
            for past, taken_s in self.passes_s.items()
        }
        return replace(self, passes_s=passes_s)

    def draft_costs(self, drafter: str) -> DraftCosts:
        """In steps of the target, behind a short text."""
        known, step_s = self.drafters[drafter], self.pass_s(1, 0)
        return DraftCosts(known.step_s / step_s, known.row_s / step_s)


def document_of(profile: Profile) -> dict[str, Any]:
    """As JSON holds it."""
    return {
        "passes_s": {past: dict(taken) for past, taken in profile.passes_s.items()},
        "prefill_s": profile.prefill_s,
        "transfer_s": profile.transfer_s,
        "drafters": {
            name: {
                "step_s": drafter.step_s,
                "row_s": drafter.row_s,
                "branches": dict(drafter.branches),
                "slowed": list(drafter.slowed),
            }
            for name, drafter in profile.drafters.items()
        },
    }


def profile_from(stated: Any) -> Profile:
    """Out of a document, which may have been edited by hand or by an enemy.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: What it states cannot be meant.
    """
    passes_s = {
        _count(past, 0): _by_width(taken, 1e-9, _LONGEST_S) for past, taken in _few(stated["passes_s"]).items()
    }
    if not passes_s or any(1 not in taken for taken in passes_s.values()):
        raise ValueError("passes without a step")
    return Profile(
        passes_s=passes_s,
        prefill_s=number(stated["prefill_s"], 1e-9, _LONGEST_S),
        transfer_s=number(stated["transfer_s"], 0.0, _LONGEST_S),
        drafters={str(name): _drafter_from(drafter) for name, drafter in _few(stated["drafters"]).items()},
    )


def _drafter_from(stated: Any) -> DrafterProfile:
    branches = _by_width(stated["branches"], 1.0, 1e3)
    if branches.get(1) != 1.0:
        raise ValueError("branches without a step")
    verify, draft = stated["slowed"]
    return DrafterProfile(
        step_s=number(stated["step_s"], 1e-9, _LONGEST_S),
        row_s=number(stated["row_s"], 0.0, _LONGEST_S),
        branches=branches,
        slowed=(number(verify, 1.0, 1e3), number(draft, 1.0, 1e3)),
    )


def _by_width(stated: Any, low: float, high: float) -> dict[int, float]:
    return {_count(width, 1): number(value, low, high) for width, value in _few(stated).items()}


def _few(stated: Mapping[str, Any]) -> Mapping[str, Any]:
    if len(stated) > _MOST:
        raise ValueError(f"{len(stated)} entries, more than {_MOST}")
    return stated


def _count(value: str, low: int) -> int:
    return int(number(value, low, 1 << 24))


def number(value: Any, low: float, high: float) -> float:
    """Raises ValueError, TypeError: It is none, or not from low to high."""
    found = float(value)
    if not low <= found <= high:
        raise ValueError(f"{found} is not from {low} to {high}")
    return found
