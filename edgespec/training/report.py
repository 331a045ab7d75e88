"""The report of a training: how far the head agrees, and what it is expected to gain on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec import Profile, best_length, expected_tokens

INT8_BYTES = 1.125  # of a weight, with the scales of blocks of 32
_AROUND_DRAFT_S = 1e-3  # of a draft outside the head's products (docs/log/training.md)


@dataclass(frozen=True, kw_only=True)
class ExpectedGain:
    """The gain on greedy text like the held-out texts, if the head alone drafts serially.

    draft_length: That gains the most; 0 where plain decoding is fastest.
    draft_cost: Time of a drafted token over that of a pass of one token, as estimate_draft_cost gives it.
    times: Speed over that of plain decoding.
    """

    draft_length: int
    draft_cost: float
    tokens_per_pass: float
    times: float


@dataclass(frozen=True, kw_only=True)
class TrainingReport:
    """The result of a training.

    agreement: Chance that a drafted token is the target's own if all before it were, by position, on texts that
        were not trained on.
    coverage: Share of the tokens of these texts that can be drafted at all.
    """

    texts: int
    answer_tokens: int
    held_out_texts: int
    trained_drafts: int
    training_s: float
    precision: str
    agreement: tuple[float, ...]
    coverage: float
    gain: ExpectedGain


def estimate_draft_cost(num_weights: int, target_bytes: float, profile: Profile) -> float:
    """Time of a drafted token over that of a pass of one token: of reading the weights, and of all around it.

    Args:
        num_weights: Of the head, which is exported in int8.
        target_bytes: That a pass of the target reads.
    """
    return num_weights * INT8_BYTES / target_bytes + _AROUND_DRAFT_S / profile.costs().pass_s(1)


def expected_gain(rates: Sequence[float], draft_cost: float, profile: Profile) -> ExpectedGain:
    """The best draft length and its gain.

    Args:
        rates: Chance that a drafted token is right if all before it were, by position.
        draft_cost: Time of a drafted token over that of a pass of one token.
    """
    totals, costs = expected_tokens(rates), profile.costs()
    step_s = costs.pass_s(1)
    rate, length = best_length(totals, lambda length: costs.pass_s(length + 1) / step_s + length * draft_cost)
    return ExpectedGain(draft_length=length, draft_cost=draft_cost, tokens_per_pass=totals[length], times=rate)
