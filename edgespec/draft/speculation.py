"""Drafting from answer to answer: an engine's drafters, what passes cost, what was accepted.

And the policy of an answer, which follows the drafters that are open.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from threading import Lock
from time import perf_counter

import numpy as np

from edgespec.decoding.acceptance import Acceptance, equality, rejection
from edgespec.decoding.pass_queue import Caller
from edgespec.decoding.scheduler import DraftPolicy, Proposal
from edgespec.draft.acceptance_rates import AcceptanceChange, AcceptanceRates, Key
from edgespec.draft.costs import NO_CONTEXT_COSTS, ContextCosts, PassCosts
from edgespec.draft.draft_model import DraftModelStats
from edgespec.draft.drafter import Drafter
from edgespec.draft.measured import NO_DRAFTER, NO_LENGTH, FixedLength, MeasuredPolicy
from edgespec.draft.option import TrialBudget, probe_budget
from edgespec.draft.pass_estimate import PassEstimate
from edgespec.draft.pool import DrafterPool
from edgespec.system.clock import Clock
from edgespec.types import Logits, Sampler, TokenIds


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The drafters of one answer, chosen from those that are open.

    names: Drafters that may draft; None for all of them. Without a name decoding is plain.
    draft_length: Tokens a draft; None for what the engine was loaded with.
    further: Drafters of this answer alone, before the open ones.
    adapt: Makes of all these what drafts for this answer.
    """

    names: frozenset[str] | None = None
    draft_length: int | None = None
    further: tuple[Drafter, ...] = ()
    adapt: Callable[[Sequence[Drafter]], list[Drafter]] = list

    def select(self, open_drafters: Sequence[Drafter]) -> list[Drafter]:
        named = (each for each in open_drafters if self.names is None or each.name in self.names)
        return self.adapt([*self.further, *named])


ALL_DRAFTERS = DraftChoice()


@dataclass(slots=True)
class Speculation:
    """Makes the policies of answers, and gives each what the earlier ones learned."""

    drafters: Callable[[], Sequence[Drafter]] = tuple  # makes those of one answer; some may outlive it
    draft_length: int | None = None  # tokens a draft; None to weigh who drafts and how much
    ratios: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})  # as costs.PassCosts holds them
    context_costs: Callable[[], ContextCosts] = lambda: NO_CONTEXT_COSTS  # what a long text adds to passes
    models: dict[str, DraftModelStats] = field(default_factory=dict)  # what is known of drafter models, by name
    rates: Mapping[Key, tuple[float, float]] = field(default_factory=dict)  # as AcceptanceRates holds them
    save: Callable[["Speculation"], None] = lambda learned: None  # called at the end if answers were weighed
    accept: Acceptance = equality
    warm: set[int] | None = None  # as costs.PassCosts holds it, for all answers
    spreads: Mapping[int, float] = field(default_factory=dict)  # of the ratios, as costs.PassCosts holds them
    has_trees: bool = False  # the target verifies trees in one pass
    widths: Sequence[int] = ()  # to which passes are padded, as costs.PassCosts holds them
    probe_budget: TrialBudget = field(default_factory=probe_budget)  # of all answers
    hold: Callable[[], AbstractContextManager[None]] = nullcontext  # within it drafters stay as they are
    _estimate: PassEstimate | None = None  # what passes of earlier answers have shown
    _lock: Lock = field(default_factory=Lock)
    _has_news: bool = False

    @property
    def with_distributions(self) -> bool:
        """True if drafters must say what they drew tokens from."""
        return self.accept is rejection

    @property
    def name(self) -> str:
        return "+".join(drafter.name for drafter in self.drafters()) or "none"

    def fixed(self, length: int) -> FixedLength:
        """A policy whose drafts have a length, whatever they gain."""
        return FixedLength(self.drafters(), length)

    def policy(
        self,
        max_unlearned: int = 0,
        choice: DraftChoice = ALL_DRAFTERS,
        *,
        has_models: bool = True,
        caller: Caller | None = None,
        clock: Clock = perf_counter,
    ) -> FixedLength | MeasuredPolicy:
        """The policy of one answer; max_unlearned, caller and clock as MeasuredPolicy has them.

        Args:
            choice: Which drafters draft for it.
            has_models: Drafter models are among them, and not its text alone.
        """
        drafters = [each for each in choice.select(self.drafters()) if has_models or each.can.is_free]
        length = self.draft_length if choice.draft_length is None else choice.draft_length
        costs = self.costs()
        with self._lock:
            rates = AcceptanceRates(dict(self.rates))
        if length is not None:
            return FixedLength(
                drafters,
                length,
                with_distributions=self.with_distributions,
                costs=costs,
                rates=rates,
                models=self.models,
            )
        return MeasuredPolicy(
            drafters,
            costs,
            rates,
            self.models,
            with_distributions=self.with_distributions,
            probe_budget=self.probe_budget,
            clock=clock,
            max_unlearned=max_unlearned,
            has_trees=self.has_trees,
            caller=caller or Caller(),
        )

    def costs(self) -> PassCosts:
        """The times of passes, as far as they are known."""
        with self._lock:
            return PassCosts(
                dict(self.ratios),
                context_costs=self.context_costs(),
                warm=self.warm,
                spreads=self.spreads,
                estimate=self._estimate and self._estimate.copy(),
                widths=self.widths,
            )

    def learn_from(self, policy: DraftPolicy) -> None:
        """Let the next answer start from what a policy has learned."""
        if isinstance(policy, MeasuredPolicy):
            with self._lock:
                self.ratios, self.rates = policy.costs.known_ratios(), policy.rates.snapshot()
                self._estimate = policy.costs.estimate
                self.spreads = policy.costs.known_spreads()
                self._has_news = True

    def close(self) -> None:
        """Save what was learned."""
        if self._has_news:
            self.save(self)
            self._has_news = False


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
                stats.read = np.zeros(0, np.int32)
        self._inner = self.speculation.policy(
            self.max_unlearned, self.choice, has_models=self.has_models, caller=self.caller, clock=self.clock
        )

    def _end(self) -> None:
        self._inner.close()
        self.speculation.learn_from(self._inner)
