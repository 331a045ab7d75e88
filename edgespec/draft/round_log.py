"""Reports on rounds: why nothing was drafted, as users read it, and a log.

The log is a JSON document for each round, at level DEBUG of the logger edgespec.rounds.
"""

import json
import logging
from collections.abc import Mapping

from edgespec.decoding.scheduler import Proposal

NO_DRAFTER = "no drafter is in use"
NO_LENGTH = "drafts have no tokens (draft-length 0)"
NO_GUESS = "no drafter had a guess"
NO_GAIN = "no guess was likely to save time"
ENDING = "the answer or the context ends here"
_LOG = logging.getLogger("edgespec.rounds")


def main_reason(counts: Mapping[str, int]) -> str | None:
    """Why most passes had no draft; that an answer ended counts only where there is no other reason."""
    others = {reason: count for reason, count in counts.items() if reason != ENDING} or counts
    return max(others, key=lambda reason: others[reason], default=None)


def logs_rounds() -> bool:
    """True if rounds are logged, so that documents for them are worth making."""
    return _LOG.isEnabledFor(logging.DEBUG)


def log_round(number: int, round: Proposal, num_accepted: int, verify_s: float) -> None:
    """Log what was run, what came of it, and what was expected of each source."""
    if not logs_rounds():
        return
    document = {
        "round": number,
        "source": round.draft.source,
        "num_draft": len(round.draft.tokens),
        "num_accepted": num_accepted,
        "draft_ms": rounded(1e3 * round.draft_s),
        "verify_ms": rounded(1e3 * verify_s),
        "ahead": round.is_ahead,
        "expected": round.expected,
    }
    _LOG.debug("%s", json.dumps(document))


def rounded(value: float) -> float:
    """A number as it stands in the log."""
    return round(value, 3)
