"""A plan as one JSON document; docs/planning.md says what its keys mean, and scripts rely on them. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from edgespec.planning.drafter_ranking import PossibleDrafter
from edgespec.planning.plan_option import Layout, Option, Plan
from edgespec.planning.planner import draft_rates, is_counted
from edgespec.planning.ranking_words import drafter_document
from edgespec.policy.acceptance_rates import Key
from edgespec.profiling.profile import MeasuringTime, Place, drafter_key


def document_of(
    plan: Plan,
    layouts: Sequence[Layout],
    past: Mapping[Key, tuple[float, float]],
    took: MeasuringTime,
    *,
    model: str,
    drafters: Sequence[str],
    command: str,
    ranked_drafters: Sequence[PossibleDrafter] = (),
) -> dict[str, Any]:
    """The chosen option, the refused ones with the reasons, and the measurements.

    past: Acceptance counts, as acceptance_rates.AcceptanceRates holds them.
    drafters: Names of the models that were weighed. ranked_drafters: All that could draft for the target.
    """
    return {
        "model": model,
        **_option(plan.chosen),
        "drafters": list(plan.drafters),
        "downgrades": list(plan.downgrades),
        "command": command,
        "plain_tokens_per_second": plan.plain_tokens_per_second,
        "options": [_option(option) for option in plan.options],
        "refused": [_option(option) for option in plan.refused],
        "chances": {
            name: {"kept_by_position": draft_rates(past, name).accepted, "is_counted": is_counted(past, name)}
            for name in drafters
        },
        "measured": [_layout(layout) for layout in layouts],
        "took": took._asdict(),
        "ranked_drafters": [drafter_document(each) for each in ranked_drafters],
    }


def _option(option: Option) -> dict[str, Any]:
    return {
        "schedule": option.schedule,
        **_place("target", option.target),
        "drafter": option.drafter,
        **_place("drafter", option.drafter_place),
        "draft_length": option.draft_length,
        "wait": option.wait,
        "context_length": option.context_length,
        "memory_bytes": option.memory_bytes,
        "tokens_per_second": option.tokens_per_second,
        "reason": option.reason,
        "basis": "measured" if option.is_measured else "foreseen",
    }


def _layout(layout: Layout) -> dict[str, Any]:
    stated, shown = asdict(layout.profile), []
    if layout.drafter is not None and layout.drafter_place is not None:
        shown = [drafter_key(layout.drafter, layout.drafter_place)]
    return {
        **_place("target", layout.target),
        **stated,
        "drafters": {name: stated["drafters"][name] for name in shown},
    }


def _place(model: str, place: Place | None) -> dict[str, Any]:
    return {f"{model}_device": place and place.device, f"{model}_threads": place and place.num_threads}
