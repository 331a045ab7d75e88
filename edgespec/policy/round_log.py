"""A JSON document for each round of a policy, at level DEBUG of the logger edgespec.rounds."""

import json
import logging

from edgespec.decoding.scheduler import Proposal

_LOG = logging.getLogger("edgespec.rounds")


def logs_rounds() -> bool:
    """Whether rounds are logged, so that documents for them are worth making."""
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
        "draft_ms": _rounded(1e3 * round.draft_s),
        "verify_ms": _rounded(1e3 * verify_s),
        "ahead": round.is_ahead,
        "expected": {
            each.source: {"num_draft": each.num_tokens, "speed_over_plain": _rounded(each.speed_over_plain)}
            for each in round.expectations
        },
    }
    _LOG.debug("%s", json.dumps(document))


def _rounded(value: float) -> float:
    return round(value, 3)
