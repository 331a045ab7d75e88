"""Drafts of a fixed length, for reproducible runs and comparisons."""

from collections.abc import Sequence
from time import perf_counter

from edgespec.decoding.scheduler import Proposal
from edgespec.policy.draft_model import UNKNOWN_WORTH
from edgespec.policy.reasons import NO_DRAFTER, NO_GUESS, NO_LENGTH
from edgespec.policy.round_log import log_round
from edgespec.types import NO_DRAFT, Drafter, DraftRequest, Logits, Sampler, TokenIds


class FixedLength:
    """Drafts the same number of tokens in each round, from the first drafter that has a guess."""

    def __init__(self, drafters: Sequence[Drafter], num_tokens: int, *, with_distributions: bool = False) -> None:
        self._drafters = drafters
        self._num_tokens = num_tokens
        self._with_distributions = with_distributions
        self._num_rounds = 0

    def propose(self, tokens: TokenIds, max_tokens: int, sampler: Sampler) -> Proposal:
        started = perf_counter()
        num_tokens = min(self._num_tokens, max_tokens)
        request = DraftRequest(
            num_tokens,
            with_distributions=self._with_distributions,
            is_ahead=True,
            min_tokens=num_tokens,
            worth=UNKNOWN_WORTH,
        )
        if self._with_distributions:
            # One noise for all rounds, so that a token is the same whenever it was drafted. A position is judged
            # once, and how far a draft goes is fixed, so that what is drawn says nothing of what is decided.
            sampler = sampler.drafting(0)
        for drafter in self._drafters if num_tokens > 0 else ():
            draft = drafter.draft(tokens, request, sampler)
            if len(draft.tokens):
                is_ahead = any(each.can.run_ahead for each in self._drafters)
                return Proposal(tokens, draft, draft_s=perf_counter() - started, is_ahead=is_ahead)
        reason = NO_DRAFTER if not self._drafters else NO_GUESS if self._num_tokens else NO_LENGTH
        return Proposal(tokens, NO_DRAFT, reason)

    def observe(self, round: Proposal, logits: Logits, emitted: TokenIds, verify_s: float) -> None:
        for drafter in self._drafters:
            drafter.learn(round.tokens, round.draft, logits)
        self._num_rounds += 1
        log_round(self._num_rounds, round, len(emitted) - 1, verify_s)

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.pause()
