"""Drafters that may fail: the answer goes on without one that raises, hangs, or drafts nonsense.

A draft is only a guess, so that nothing of the text is lost with its drafter.
"""

from collections.abc import Callable, Sequence
from math import inf
from threading import Lock
from typing import Any

import numpy as np

from edgespec import trees
from edgespec.errors import MemoryExhausted
from edgespec.types import NOTHING, AheadDrafter, Ask, Draft, Drafter, Logits, Sampler, TokenIds

_LONGEST_REASON = 200


class GuardedDrafter:
    """A drafter that is parked at its first fault, and may be taken away and given back.

    Parked or away, it drafts nothing. It is asked by one thread at a time, so that it is not taken away while it
    drafts. A drafter that is out of memory is at no fault.
    """

    def __init__(
        self,
        drafter: Drafter,
        vocab_size: int,
        on_fault: Callable[[str, str], None],
        on_exhausted: Callable[[], None] = lambda: None,
    ) -> None:
        """Guard a drafter.

        Args:
            vocab_size: Of the target; no token of a draft may lie beyond it.
            on_fault: Takes the drafter's name and the reason, once.
            on_exhausted: Is called when the drafter was refused memory.
        """
        self.name = drafter.name
        self.is_free = drafter.is_free
        self._drafter: Drafter | None = None
        self._ahead: AheadDrafter | None = None  # the same, if it is one: to ask takes 35 µs
        self._vocab_size = vocab_size
        self._on_fault = on_fault
        self._on_exhausted = on_exhausted
        self._lock = Lock()
        self._is_parked = False
        self._set(drafter)

    @property
    def is_parked(self) -> bool:
        return self._is_parked

    @property
    def can_run_ahead(self) -> bool:
        return self._ahead is not None and self._ahead.can_run_ahead

    @property
    def num_outcomes(self) -> int:
        return self._ahead.num_outcomes if self._ahead else 0

    def draft(self, tokens: TokenIds, ask: Ask, sampler: Sampler) -> Draft:
        return self._drafted(lambda drafter: drafter.draft(tokens, ask, sampler), ask)

    def follow(self, tokens: TokenIds, ask: Ask, sampler: Sampler) -> Draft:
        return self._drafted(lambda _: self._ahead.follow(tokens, ask, sampler) if self._ahead else NOTHING, ask)

    def due_s(self, step_s: float) -> float:
        return self._ahead.due_s(step_s) if self._ahead else inf

    def taken_s(self) -> tuple[Sequence[float], float]:
        return self._ahead.taken_s() if self._ahead else ((), 0.0)

    def rest(self) -> None:
        with self._lock:
            if self._ahead:
                self._ahead.rest()

    def _drafted(self, draft_of: Callable[[Drafter], Draft], ask: Ask) -> Draft:
        with self._lock:
            if self._drafter is None or self._is_parked:
                return NOTHING
            try:
                draft = draft_of(self._drafter)
                reason = nonsense(draft, ask, self._vocab_size)
            except Exception as error:  # of whatever kind: the answer can do without this drafter
                if _is_exhausted(error):
                    self._on_exhausted()
                    return NOTHING
                reason = in_words(error)
            if reason is None:
                return draft
            self._park(reason)
            return NOTHING

    def learn(self, tokens: TokenIds, draft: Draft, logits: Logits) -> None:
        with self._lock:
            if self._drafter is None or self._is_parked:
                return
            try:
                self._drafter.learn(tokens, draft, logits)
            except Exception as error:  # as above
                if _is_exhausted(error):
                    self._on_exhausted()
                else:
                    self._park(in_words(error))

    def take(self) -> Drafter | None:
        """Take the drafter away, if it is there, once it has ended its draft."""
        with self._lock:
            drafter = self._drafter
            self._set(None)
            return drafter

    def give(self, drafter: Drafter) -> None:
        """Put a drafter in the place of one that was taken away; a parked one stays away."""
        with self._lock:
            assert self._drafter is None
            assert not self._is_parked
            self._set(drafter)

    def _set(self, drafter: Drafter | None) -> None:
        self._drafter = drafter
        self._ahead = drafter if isinstance(drafter, AheadDrafter) else None

    def _park(self, reason: str) -> None:
        self._is_parked = True
        self._on_fault(self.name, reason)


def _is_exhausted(error: BaseException) -> bool:
    """It, or what it came of in a lane, is want of memory."""
    return any(isinstance(each, (MemoryExhausted, MemoryError)) for each in (error, error.__cause__))


def in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:_LONGEST_REASON]


def nonsense(draft: Any, ask: Ask, vocab_size: int) -> str | None:
    """What is wrong with a draft, whoever made it; None if it can be run."""
    if not isinstance(draft, Draft):
        return f"it drafted a {type(draft).__name__}, wanted a Draft"
    tokens, evidence, parents, distributions, _ = draft
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.ndim != 1:
        found = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, np.ndarray) else type(tokens).__name__
        return f"its tokens are {found}, wanted int32 [num_draft]"
    count = len(tokens)
    if not count:
        return None
    for name, part in (("evidence", evidence), ("parents", parents), ("distributions", distributions)):
        if part is not None and len(part) != count:
            return f"its {name} is of {len(part)} tokens, wanted {count}"
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        return f"it drafted the token {low if low < 0 else high}, wanted 0 to {vocab_size - 1}"
    if parents is not None and not all(-1 <= parent < node for node, parent in enumerate(parents)):
        return "the parents of its tree do not come before their children"
    depth = count if parents is None else int(trees.depths(parents).max())
    if depth > ask.num_tokens:
        return f"it drafted {depth} tokens ahead, wanted at most {ask.num_tokens}"
    for distribution in distributions or ():
        if len(distribution.ids) and not 0 <= distribution.ids.min() <= distribution.ids.max() < vocab_size:
            return f"it drew from tokens beyond 0 to {vocab_size - 1}"
    return None
