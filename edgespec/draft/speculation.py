"""Drafting from answer to answer: an engine's drafters, what passes cost, what was accepted."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from threading import Lock
from time import perf_counter

from edgespec.decoding.acceptance import Acceptance, equality, rejection
from edgespec.decoding.pass_queue import Caller
from edgespec.decoding.scheduler import DraftPolicy
from edgespec.draft.acceptance_rates import AcceptanceRates, Key
from edgespec.draft.costs import NO_CONTEXT_COSTS, ContextCosts, PassCosts
from edgespec.draft.draft_model import DraftModelStats
from edgespec.draft.drafter import Drafter
from edgespec.draft.measured import FixedLength, MeasuredPolicy
from edgespec.draft.option import TrialBudget, probe_budget
from edgespec.draft.pass_estimate import PassEstimate
from edgespec.system.clock import Clock


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
