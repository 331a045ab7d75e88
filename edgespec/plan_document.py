"""A plan as one JSON document; docs/devices.md says what its keys mean, and scripts rely on them. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.chances import Key
from edgespec.planner import Layout, Option, Plan, chances_of, is_counted
from edgespec.profile import Took, beside
from edgespec.profile import document_of as document_of_profile


def document_of(
    plan: Plan,
    layouts: Sequence[Layout],
    past: Mapping[Key, tuple[float, float]],
    took: Took,
    *,
    model: str,
    drafters: Sequence[str],
    command: str,
) -> dict[str, Any]:
    """What is to be done, what was refused and why, and what both rest on.

    Args:
        past: How often drafts were kept, as chances.Chances holds it.
        drafters: Names of the models that were weighed.
        command: What does it.
    """
    return {
        "model": model,
        **_option(plan.chosen),
        "drafters": list(plan.drafters),
        "downgrades": list(plan.downgrades),
        "command": command,
        "plain_tokens_per_second": plan.plain_tokens_per_second,
        "refused": [_option(option) for option in plan.refused],
        "chances": {
            name: {"kept_by_position": chances_of(past, name).kept, "is_counted": is_counted(past, name)}
            for name in drafters
        },
        "measured": [_layout(layout) for layout in layouts],
        "took": took._asdict(),
    }


def _option(option: Option) -> dict[str, Any]:
    place = option.drafter_place
    return {
        "schedule": option.schedule,
        "target_device": option.target.device,
        "target_threads": option.target.num_threads,
        "drafter": option.drafter,
        "drafter_device": place.device if place else None,
        "drafter_threads": place.num_threads if place else None,
        "draft_length": option.draft_length,
        "wait": option.wait,
        "context_length": option.context_length,
        "memory_bytes": option.memory_bytes,
        "tokens_per_second": option.tokens_per_second,
        "reason": option.reason,
    }


def _layout(layout: Layout) -> dict[str, Any]:
    """What the placement was judged by, in seconds."""
    stated, shown = document_of_profile(layout.profile), []
    if layout.drafter is not None and layout.drafter_place is not None:
        shown = [beside(layout.drafter, layout.drafter_place)]
    return {
        "target_device": layout.target.device,
        "target_threads": layout.target.num_threads,
        **stated,
        "drafters": {name: stated["drafters"][name] for name in shown},
    }
