"""What a drafter is known to gain for a target: by use, by the check of its pair, or by what others report."""

from collections.abc import Mapping
from typing import NamedTuple

from edgespec.draft.acceptance_rates import AcceptanceRates, Key
from edgespec.runtimes.devices import device_key
from edgespec.setup.device_choice import Placement
from edgespec.setup.drafter_ranking import Basis
from edgespec.setup.drafting_target import (
    DraftingCosts,
    DraftingTarget,
    break_even_rate,
    expected_gain,
    rate_of,
)
from edgespec.setup.known_drafters import Reported
from edgespec.setup.measured_placements import known_layout
from edgespec.setup.open_model import ModelFolder, known_stats
from edgespec.setup.pair import Pair
from edgespec.setup.plan_models import without_trees
from edgespec.setup.planner import plan_on

# With fewer drafted tokens that were judged, an acceptance rate is an estimate.
_ENOUGH_JUDGED = 50


class Evidence(NamedTuple):
    """Fields of a PossibleDrafter that say what it gains."""

    basis: Basis
    gain: float | None
    num_draft: int | None
    evidence: str


def evidence_of_use(target: ModelFolder, drafter: ModelFolder, placement: Placement) -> Evidence | None:
    """By what its drafts cost here and how many were accepted in answers; None where one of them is not known."""
    known = known_stats(target)
    layout, accepted = (
        known_layout(drafter.manifest, placement, known),
        _count(known.chances, drafter.manifest.name),
    )
    if layout is None or accepted is None:
        return None
    runnable = without_trees(drafter.manifest, placement.drafter_device)
    plan = plan_on([layout], target.manifest, runnable, known.chances)
    drafting = (option for option in plan.options if option.drafter and option.can_be_chosen)
    best = max(drafting, key=lambda option: option.tokens_per_second)
    return Evidence(
        "measured" if accepted.num_judged >= _ENOUGH_JUDGED else "estimated",
        best.tokens_per_second / plan.plain_tokens_per_second,
        best.draft_length,
        f"by its costs and its drafts in answers here: {accepted}",
    )


def evidence_of_check(pair: Pair, parts: tuple[ModelFolder, ModelFolder], placement: Placement) -> Evidence | None:
    """By the check of a pair of target and drafter on the devices; None where there is none of these models."""
    devices = device_key(placement.device), device_key(placement.drafter_device)
    check = pair.current_check(*devices, (parts[0].folder, parts[1].folder))
    if check is None:
        return None
    why = f"by the check of the pair here: {check.reason}"
    return Evidence("measured", check.expected_gain, check.num_draft, why)


def evidence_of_report(reported: Reported | None, costs: DraftingCosts | None) -> Evidence | None:
    """By acceptance as it was reported, and costs here; None where one of them is not known."""
    if costs is None or reported is None or reported.tokens_per_pass is None or reported.num_draft is None:
        return None
    rate = rate_of(reported.tokens_per_pass, reported.num_draft)
    gain, num_draft = expected_gain(rate, costs)
    why = f"if {rate:.0%} of its tokens are accepted, which follows from the report, at what passes take here"
    return Evidence("estimated", gain, num_draft, why)


def no_evidence(target: DraftingTarget, costs: DraftingCosts | None) -> Evidence:
    """Nothing but the acceptance rate from which on a drafter pays, where costs are known."""
    return Evidence("unknown", None, None, "; ".join(["it was not measured here", *_break_even(target, costs)]))


def evidence_of_text(target: DraftingTarget, drafter: str) -> str:
    """The share of its tokens that was accepted here; how often a text gives a draft is not recorded."""
    accepted = _count(known_stats(target.folder).chances, drafter) if target.folder else None
    seen = [f"here {accepted}"] if accepted else []
    least = _break_even(target, target.costs_of(0))
    return "; ".join(["it depends on how much of an answer repeats earlier text", *seen, *least])


def _break_even(target: DraftingTarget, costs: DraftingCosts | None) -> list[str]:
    """From which acceptance on a drafter pays; nothing where it is not known what passes of the target take."""
    if target.profile is None:
        return []
    if costs is None:
        return ["what a pass of it takes is known once it is here"]
    if (rate := break_even_rate(costs)) is None:
        return [f"a pass of it takes {costs.draft:.0%} of a step of the target, at which no acceptance pays"]
    return [f"it pays here if more than {rate:.0%} of its tokens are accepted"]


class _Accepted(NamedTuple):
    share: float
    num_judged: float

    def __str__(self) -> str:
        return f"{self.share:.0%} of the last {self.num_judged:.0f} drafted tokens accepted"


def _count(past: Mapping[Key, tuple[float, float]], drafter: str) -> _Accepted | None:
    accepted, judged = AcceptanceRates(dict(past)).counts(drafter)
    return _Accepted(accepted / judged, judged) if judged else None
