"""Why nothing was drafted, as users read it."""

from collections.abc import Mapping

NO_DRAFTER = "no drafter is in use"
NO_LENGTH = "drafts have no tokens (draft-length 0)"
NO_GUESS = "no drafter had a guess"
NO_GAIN = "no guess was likely to save time"
ENDING = "the answer or the context ends here"


def main_reason(counts: Mapping[str, int]) -> str | None:
    """Why most passes had no draft; that an answer ended counts only where there is no other reason."""
    others = {reason: count for reason, count in counts.items() if reason != ENDING} or counts
    return max(others, key=lambda reason: others[reason], default=None)
