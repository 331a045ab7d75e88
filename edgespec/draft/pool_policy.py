"""The policy of one answer, which follows the drafters that are open."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from edgespec.decoding.pass_queue import Caller
from edgespec.decoding.scheduler import Proposal
from edgespec.draft.acceptance_rates import AcceptanceChange
from edgespec.draft.measured import NO_DRAFTER, NO_LENGTH, FixedLength, MeasuredPolicy
from edgespec.draft.pool import DrafterPool
from edgespec.draft.speculation import ALL_DRAFTERS, DraftChoice, Speculation
from edgespec.system.clock import Clock
from edgespec.types import Logits, Sampler, TokenIds


@dataclass(slots=True)
class PoolPolicy:
    """Lets the pool open and close drafters before each round, and then starts again from what was learned.

    Drafter models draft for the answer that has the target's first cache, whose hidden states drafting heads read:
    what they hold is one text. Others draft from their texts.

    max_unlearned: As MeasuredPolicy has it.
    choice: Which of the drafters draft for the answer.
    cache: The number of the target's cache that the answer has.
    caller: The answer, as the queue of passes sees it.
    """

    pool: DrafterPool
    speculation: Speculation
    max_unlearned: int = 0
    choice: DraftChoice = ALL_DRAFTERS
    cache: Callable[[], int] = lambda: 0
    caller: Caller = field(default_factory=Caller)
    clock: Clock = perf_counter
    _inner: FixedLength | MeasuredPolicy = field(init=False)
    _version: int = field(init=False)
    _cache: int = field(init=False, default=0)  # of the last round
    is_plain: bool = field(init=False, default=False)  # the last round had nobody to draft, or no tokens to

    def __post_init__(self) -> None:
        self._cache = self.cache()
        self._start(self.pool.version)

    @property
    def has_models(self) -> bool:
        """True if drafter models draft for this answer, if there are any."""
        return self._cache == 0

    def propose(self, tokens: TokenIds, max_tokens: int, sampler: Sampler) -> Proposal:
        had_models, before = self.has_models, self._cache
        if (cache := self.cache()) != before:
            self.pool.end_round(before)
            self._cache = cache
        version = self.pool.begin_round(len(tokens), cache)
        if version != self._version or self.has_models != had_models:
            self._end()
            self._start(version)
        proposal = self._inner.propose(tokens, max_tokens, sampler)
        self.is_plain = proposal.reason in (NO_DRAFTER, NO_LENGTH)
        return proposal

    def observe(self, round: Proposal, logits: Logits, emitted: TokenIds, verify_s: float) -> None:
        if round.num_refused:
            self.pool.report_refused_draft(round.num_refused)
        self._inner.observe(round, logits, emitted, verify_s)
        self.pool.end_round(self._cache)

    def learn(self) -> None:
        """Learn from rounds that were only noted so far; another thread may call it while a pass runs."""
        inner = self._inner
        if isinstance(inner, MeasuredPolicy):
            inner.learn()

    def close(self) -> None:
        """Save what was learned, and let the drafters pause."""
        self._end()
        self.pool.end_round(self._cache)

    def acceptance_changes(self) -> dict[str, AcceptanceChange]:
        """By source, how much of what it guessed was accepted in this answer and before."""
        return self._inner.acceptance_changes() if isinstance(self._inner, MeasuredPolicy) else {}

    def _start(self, version: int) -> None:
        self._version = version
        if self.has_models and version != self.pool.answered_version:
            self.pool.answered_version = version
            for stats in self.speculation.models.values():  # a model that was opened again has an empty cache
                stats.text.forget()
        self._inner = self.speculation.policy(
            self.max_unlearned, self.choice, has_models=self.has_models, caller=self.caller, clock=self.clock
        )

    def _end(self) -> None:
        self._inner.close()
        self.speculation.learn_from(self._inner)
