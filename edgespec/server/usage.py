"""What an answer took, in OpenAI's shape, and what drafting did for it."""

from collections.abc import Sequence
from typing import Any

from edgespec.drafters.prediction import PredictionDrafter
from edgespec.engine.stats import Stats
from edgespec.policy.reasons import ENDING


def usage_of(
    prompt_tokens: int, cached_tokens: int, reasoning_tokens: int, answers: Sequence[Stats]
) -> dict[str, Any]:
    """The `usage` of a request, over all answers to it.

    Args:
        prompt_tokens: Of all its prompts.
        cached_tokens: Those of them that were not read, as a cache held them.
        reasoning_tokens: Those of the answers that are reasoning.
    """
    completion_tokens = sum(stats.num_emitted for stats in answers)
    predicted = [stats.sources.get(PredictionDrafter.name, {}) for stats in answers]
    accepted = sum(counts.get("accepted", 0) for counts in predicted)
    drafted = sum(counts.get("drafted", 0) for counts in predicted)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "speculation": speculation_of(answers),
    }


def speculation_of(answers: Sequence[Stats]) -> dict[str, Any]:
    """What drafting did for the answers: by whom, how much was accepted, and what it gained or why there was none.

    gain is the speed over plain decoding, with an interval that holds in 95 of 100 cases; both are null where they
    could not be measured, as over several answers.
    """
    drafted = sum(stats.num_drafted for stats in answers)
    accepted = sum(stats.num_accepted for stats in answers)
    passes = sum(stats.passes for stats in answers)
    emitted = sum(stats.num_emitted for stats in answers)
    gain = answers[0].gain if len(answers) == 1 else None
    first = answers[0] if answers else None
    return {
        "drafter": first.drafter if first else "none",
        "draft_length": first.draft_length if first else "auto",
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
        "tokens_per_pass": round(emitted / passes, 4) if passes else None,
        "by_drafter": _by_drafter(answers),
        "gain": round(gain.value, 4) if gain else None,
        "gain_interval": [round(gain.value + side * gain.error, 4) for side in (-1, 1)] if gain else None,
        "reason_off": None if drafted else _reason(answers),
        "schedule": first.schedule if first else "serial",
        "device": first.target_device if first else None,
        "drafter_device": first.drafter_device if first else None,
        "waited_passes": sum(stats.waited_passes for stats in answers),
        "downgrades": [line for stats in answers for line in stats.downgrades],
    }


def notes_of(speculation: dict[str, Any]) -> list[str]:
    """Accepted drafts and the gain, as pieces of the request's line in the log; none where nothing was drafted."""
    if not speculation["drafted_tokens"]:
        return []
    notes = [f"{speculation['accepted_tokens']}/{speculation['drafted_tokens']} drafts accepted"]
    return [*notes, f"gain {speculation['gain']:.2f}"] if speculation["gain"] else notes


def _by_drafter(answers: Sequence[Stats]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for stats in answers:
        for name, counts in stats.sources.items():
            if counts["drafted"]:
                sums = found.setdefault(name, {"drafted": 0, "accepted": 0})
                sums["drafted"] += counts["drafted"]
                sums["accepted"] += counts["accepted"]
    return found


def _reason(answers: Sequence[Stats]) -> str | None:
    """Why most passes had no draft."""
    counts: dict[str, int] = {}
    for stats in answers:
        for reason, count in stats.undrafted.items():
            counts[reason] = counts.get(reason, 0) + count
    others = {reason: count for reason, count in counts.items() if reason != ENDING} or counts
    return max(others, key=lambda reason: others[reason], default=None)
