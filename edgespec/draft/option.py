"""The speed that drafts of a length and a source promise for the next pass, and passes that are run to learn.

While every pass has a draft of much the same length, nothing says what plain decoding would take; while none has
one, nothing says whether drafts have become cheap. A probe is a pass of the other kind, and what it loses is paid
from a share of the time. So are trials: drafts made to learn whether drafting from their source pays by now.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from math import exp
from operator import mul
from typing import NamedTuple, Protocol

from edgespec.decoding.scheduler import Proposal
from edgespec.decoding.tree import NO_DRAFT, Tree
from edgespec.draft.costs import PassCosts
from edgespec.draft.drafter import Drafter, DraftRequest
from edgespec.draft.limits import MIN_GAIN, OPTIMISM, TRIAL_SHARE
from edgespec.types import Sampler, TokenIds


def expected_tokens(rates: Iterable[float]) -> list[float]:
    """Tokens that a pass yields by the number that is drafted: 1, 1 + a₁, 1 + a₁ + a₁a₂, …

    rates: The chance aᵢ that drafted token i is accepted if all before it were.
    """
    return list(accumulate(accumulate(rates, mul), initial=1.0))


def expected_of_tree(parents: Sequence[int], chances: Sequence[float]) -> float:
    """Tokens that a pass over a tree yields: one, and the chance that each node is reached and accepted."""
    reached: list[float] = []
    for parent, chance in zip(parents, chances, strict=True):
        reached.append(chance * (reached[parent] if parent >= 0 else 1.0))
    return 1.0 + sum(reached)


def best_chain(rates: Sequence[float], pass_times_s: Sequence[float]) -> tuple[float, int]:
    """best_length of a chain that costs nothing to draft, by rates of its tokens and times of passes by width.

    Takes 3 µs for 24 tokens, between two passes, where expected_tokens and best_length take 9.
    """
    best, length = 1.0 / pass_times_s[0], 0
    total = reached = 1.0
    for i in range(len(rates)):
        reached *= rates[i]
        total += reached
        rate = total / pass_times_s[i + 1]
        if rate > best:
            best, length = rate, i + 1
    return best, length


def best_length(totals: Sequence[float], cost: Callable[[int], float]) -> tuple[float, int]:
    """The best rate, in tokens per unit of cost, and the draft length that has it; 0 is plain decoding.

    Args:
        totals: Expected tokens by draft length, from 0 on.
        cost: Time of drafting and verifying that many tokens.
    """
    rates = [total / cost(length) for length, total in enumerate(totals)]
    length = max(range(len(rates)), key=rates.__getitem__)
    return rates[length], length


def most_hopeful(
    totals: Sequence[float], pass_times_s: Sequence[float], spread: Callable[[int], float], step_s: float = 0.0
) -> tuple[float, int]:
    """The draft length, at least 1, that would be best if each pass took as little as is still likely.

    Args:
        totals: Expected tokens by draft length, from 0 on.
        pass_times_s: Times of passes by width, from 1 on.
        spread: The standard deviation of the log of such a time, by width.
        step_s: Time of drafting a token.

    Returns:
        The rate that the length would have then, and the length.
    """
    hopes = [
        total / (pass_s * exp(-OPTIMISM * spread(i + 1)) + i * step_s)
        for i, (total, pass_s) in enumerate(zip(totals, pass_times_s, strict=False))
    ]
    length = max(range(1, len(hopes)), key=hopes.__getitem__)
    return hopes[length], length


class Promise(NamedTuple):
    """A source, a draft length, and the speed that they promise."""

    rate: float  # expected tokens a second, or in the time of a plain pass until that is known
    num_tokens: int = 0  # tokens to draft
    source: "DraftSource | None" = None  # None for plain decoding
    offer: Tree = NO_DRAFT  # what the source has drafted already
    timeout_s: float | None = None  # how long to wait for tokens that are nearly ready; None: as long as they take
    contention: float = 1.0  # how much longer the pass takes because the source works beside it
    min_gain: float = MIN_GAIN  # what it has to promise over plain decoding
    draft_s: float = 0.0  # seconds that its draft takes before the pass, where it is a probe
    hope: float = 0.0  # rate, if a pass took less by as much as is unsure of it
    is_ahead: bool = False  # the source drafts while the target verifies
    is_tree: bool = False  # to draft whatever nodes of a tree are worth it


class Drafted(NamedTuple):
    """A draft to verify, and all that its source guessed: of a draft that was cut, the whole."""

    draft: Tree
    guessed: tuple[Tree, ...]


NOTHING = Drafted(NO_DRAFT, ())


class DraftSource(Protocol):
    """A drafter in one answer, as a policy weighs it."""

    @property
    def drafter(self) -> Drafter: ...

    def weigh(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Promise | None:
        """Weigh a draft in this round; None where the source has no guess."""

    def trial(self, option: Promise, best: Promise, tokens: TokenIds) -> Promise | None:
        """An option to take in place of the best one, to learn whether drafting from the source pays by now."""

    def hopeful(self, option: Promise) -> Promise | None:
        """The draft that may turn out best if passes take less than is believed; None without one."""

    def draft(self, option: Promise, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Drafted:
        """The draft of an option that was chosen."""

    def observe(self, round: Proposal, emitted: TokenIds, verify_s: float) -> bool:
        """Learn from a round, whoever drafted in it; returns whether the source learned what the pass took too."""


@dataclass(slots=True)
class TrialBudget:
    """Saves a share of the time that passes, and spends all of it on one trial."""

    saved: float = 0.0

    def save(self, elapsed: float) -> None:
        self.saved += TRIAL_SHARE * elapsed

    def spend(self, cost: float) -> bool:
        """True if the budget allows a trial that is expected to lose so much time; the trial then uses it up."""
        if self.saved < cost:
            return False
        self.saved = 0.0
        return True


# A ratio that is surer than this (as a standard deviation of its log) needs no probe: one that is in use, and so
# in the gain that is reported, and another one.
_SURE_IN_USE, _SURE = 0.015, 0.03
# In steps of the target: what a probe costs at least, and what the first ones may.
_LEAST_LOSS, _FIRST_BUDGET = 0.05, 0.5
# An answer goes on for about as long as it has gone on; in one that ends sooner than this nothing is left to gain.
_LEAST_ROUNDS = 16
_LOOK_ROUNDS = 16  # between two looks for a draft of another length, 0.03 ms each


probe_budget = partial(TrialBudget, _FIRST_BUDGET)
"""Makes the budget for the probes of all answers of a session, in steps of the target."""


@dataclass(slots=True)
class Probes:
    """Chooses the probes of one answer."""

    costs: PassCosts
    budget: TrialBudget = field(default_factory=probe_budget)
    _num_rounds: int = 0

    def choose(self, plain: Promise, best: Promise, options: Sequence[Promise]) -> Promise | None:
        """An option to take in place of the best one; None where enough is known or time is short."""
        if self._num_rounds < _LEAST_ROUNDS or self.budget.saved < _LEAST_LOSS or best.is_ahead:
            return None
        if self.costs.step_s is None:
            return None
        if best.num_tokens and self.costs.spread(best.num_tokens + 1) > _SURE_IN_USE and self._spend(plain, best):
            return plain
        if self._num_rounds % _LOOK_ROUNDS:
            return None
        hopeful = (each.source.hopeful(each) for each in options if each.source)
        for option in hopeful:
            is_new = option is not None and option.num_tokens != best.num_tokens
            if option and is_new and option.hope > best.rate and self.costs.spread(option.num_tokens + 1) > _SURE:
                return option if self._spend(option, best) else None
        return None

    def observe_round(self) -> None:
        self._num_rounds += 1
        self.budget.save(1.0)

    def _spend(self, option: Promise, best: Promise) -> bool:
        taken_s = self.costs.pass_s(option.num_tokens + 1) + option.draft_s
        lost_s = taken_s * (1 - option.rate / best.rate)
        return self.budget.spend(max(lost_s / self.costs.pass_s(1), _LEAST_LOSS))
