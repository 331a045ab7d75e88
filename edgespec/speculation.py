"""What an engine knows of drafting, from answer to answer: its sources, what passes cost, what was kept.

A gate is made for each answer and what it has learned goes to the next one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock

from edgespec.acceptance import equality
from edgespec.chances import Chances, Key
from edgespec.costs import NOTHING_HELD, HeldCosts, PassCosts
from edgespec.gate import FixedGate, MeasuredGate
from edgespec.paid import PaidSource
from edgespec.rejection import rejection
from edgespec.scheduler import Gate
from edgespec.types import Acceptance, Drafter


def no_drafters() -> Sequence[Drafter]:
    """Plain decoding."""
    return ()


@dataclass(slots=True)
class Speculation:
    """Makes gates.

    drafters: those of one answer; which of them outlive it is for their maker to know.
    draft_length: tokens a draft, or None to weigh who drafts and how much.
    ratios: of a pass to a step by width, as costs.PassCosts holds them.
    held: what a long text adds to passes.
    paid: what is known of drafters whose drafts take time.
    past: what was kept before, as chances.Chances holds it.
    save: takes this when the engine is closed after answers that were weighed.
    accept: which drafted tokens stay.
    """

    drafters: Callable[[], Sequence[Drafter]] = no_drafters
    draft_length: int | None = None
    ratios: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})
    held: HeldCosts = NOTHING_HELD
    paid: dict[str, PaidSource] = field(default_factory=dict)
    past: Mapping[Key, tuple[float, float]] = field(default_factory=dict)
    save: Callable[["Speculation"], None] = lambda learned: None
    accept: Acceptance = equality
    _lock: Lock = field(default_factory=Lock)
    _has_news: bool = False

    @property
    def with_distributions(self) -> bool:
        """Drafters must say what they drew from."""
        return self.accept is rejection

    @property
    def name(self) -> str:
        return "+".join(drafter.name for drafter in self.drafters()) or "none"

    def gate(self) -> FixedGate | MeasuredGate:
        drafters = self.drafters()
        if self.draft_length is not None:
            return FixedGate(drafters, self.draft_length, with_distributions=self.with_distributions)
        with self._lock:
            costs, chances = PassCosts(dict(self.ratios), held=self.held), Chances(dict(self.past))
        return MeasuredGate(drafters, costs, chances, self.paid, with_distributions=self.with_distributions)

    def keep(self, gate: Gate) -> None:
        """Let the next answer start from what this one has learned."""
        if isinstance(gate, MeasuredGate):
            with self._lock:
                self.ratios, self.past = dict(gate.costs.ratios), gate.chances.learned()
                self._has_news = True

    def close(self) -> None:
        """Save what was learned."""
        if self._has_news:
            self.save(self)
            self._has_news = False
