"""The drafting policy of one answer, which follows the drafters that the pool has open."""

from dataclasses import dataclass, field

import numpy as np

from edgespec.decoding.scheduler import Round
from edgespec.drafters.pool import DrafterPool
from edgespec.policy.acceptance_rates import AcceptanceChange
from edgespec.policy.draft_choice import ALL_DRAFTERS, DraftChoice
from edgespec.policy.fixed import FixedLength
from edgespec.policy.measured import MeasuredPolicy
from edgespec.policy.speculation import Speculation
from edgespec.types import Logits, Sampler, TokenIds


@dataclass(slots=True)
class PoolPolicy:
    """Lets the pool open and close drafters before each round, and then starts again from what was learned.

    max_unlearned: As MeasuredPolicy has it.
    choice: Which of the drafters draft for the answer.
    """

    pool: DrafterPool
    speculation: Speculation
    max_unlearned: int = 0
    choice: DraftChoice = ALL_DRAFTERS
    _inner: FixedLength | MeasuredPolicy = field(init=False)
    _version: int = field(init=False)

    def __post_init__(self) -> None:
        self._start(self.pool.version)

    def propose(self, tokens: TokenIds, max_tokens: int, sampler: Sampler) -> Round:
        version = self.pool.begin_round(len(tokens))
        if version != self._version:
            self._end()
            self._start(version)
        return self._inner.propose(tokens, max_tokens, sampler)

    def observe(self, round: Round, logits: Logits, emitted: TokenIds, verify_s: float) -> None:
        if round.num_refused:
            self.pool.report_refused_draft(round.num_refused)
        self._inner.observe(round, logits, emitted, verify_s)
        self.pool.end_round()

    def learn(self) -> None:
        """Learn from rounds that were only noted so far; another thread may call it while a pass runs."""
        inner = self._inner
        if isinstance(inner, MeasuredPolicy):
            inner.learn()

    def close(self) -> None:
        """Save what was learned, and let the drafters pause."""
        self._end()
        self.pool.end_round()

    def acceptance_changes(self) -> dict[str, AcceptanceChange]:
        """By source, how much of what it guessed was accepted in this answer and before."""
        return self._inner.acceptance_changes() if isinstance(self._inner, MeasuredPolicy) else {}

    def _start(self, version: int) -> None:
        self._version = version
        if version != self.pool.answered_version:
            self.pool.answered_version = version
            for stats in self.speculation.models.values():  # a model that was opened again has an empty cache
                stats.read = np.zeros(0, np.int32)
        self._inner = self.speculation.policy(self.max_unlearned, self.choice)

    def _end(self) -> None:
        self._inner.close()
        self.speculation.learn_from(self._inner)
