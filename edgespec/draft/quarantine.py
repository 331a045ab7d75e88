"""Drafters that may fail: the answer goes on without one that raises, hangs, or drafts nonsense.

A draft is only a guess, so no text is lost with its drafter.
"""

from collections.abc import Callable
from threading import Lock
from typing import Any, TypeVar

import numpy as np

from edgespec.decoding.tree import NO_DRAFT, Tree
from edgespec.draft.drafter import DraftAhead, Drafter, DrafterCan, DraftRequest
from edgespec.errors import MemoryExhausted
from edgespec.types import Logits, Sampler, TokenIds

_MAX_REASON = 200

T = TypeVar("T")


class GuardedDrafter(Drafter):
    """A drafter that is quarantined at its first fault, and may be taken away and put back.

    While it is quarantined or away it drafts nothing. One thread at a time drafts with it, so that it is not taken
    away meanwhile. Being out of memory is no fault.
    """

    def __init__(
        self,
        drafter: Drafter,
        vocab_size: int,
        on_fault: Callable[[str, str], None],
        on_exhausted: Callable[[], None] = lambda: None,
    ) -> None:
        """Guard a drafter for a target of so many tokens.

        on_fault: Takes the drafter's name and the reason, once.
        on_exhausted: Is called when the drafter was refused memory.
        """
        self._name, self._can = drafter.name, drafter.can
        self._drafter: Drafter | None = drafter
        self._vocab_size = vocab_size
        self._on_fault = on_fault
        self._on_exhausted = on_exhausted
        self._lock = Lock()
        self.is_quarantined = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def can(self) -> DrafterCan:
        return self._drafter.can if self._drafter else DrafterCan(is_free=self._can.is_free)

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        drafted = self._guarded(
            lambda drafter: self._require_sense(drafter.draft(tokens, request, sampler), request)
        )
        return drafted or NO_DRAFT

    def draft_ahead(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> DraftAhead:
        def draft(drafter: Drafter) -> DraftAhead:
            ahead = drafter.draft_ahead(tokens, request, sampler)
            self._require_sense(ahead.draft, request)
            return ahead

        return self._guarded(draft) or DraftAhead(NO_DRAFT)

    def learn(self, tokens: TokenIds, draft: Tree, logits: Logits) -> None:
        self._guarded(lambda drafter: drafter.learn(tokens, draft, logits))

    def expect_drafts(self, is_expected: bool) -> bool:
        return self._guarded(lambda drafter: drafter.expect_drafts(is_expected)) or False

    def pause(self) -> None:
        with self._lock:
            if self._drafter:
                self._drafter.pause()

    def take(self) -> None:
        """Take the drafter away, once it has ended its draft."""
        with self._lock:
            self._drafter = None

    def put_back(self, drafter: Drafter) -> None:
        """Put a drafter in the place of one that was taken away; a quarantined one stays away."""
        with self._lock:
            assert self._drafter is None
            assert not self.is_quarantined
            self._drafter = drafter

    def _guarded(self, work: Callable[[Drafter], T]) -> T | None:
        """Let the drafter work; None where it is away, quarantined, out of memory, or at fault."""
        with self._lock:
            if self._drafter is None or self.is_quarantined:
                return None
            try:
                return work(self._drafter)
            except Exception as error:  # of any kind: the answer can do without this drafter
                # The cause of an error in a lane tells it too.
                if any(isinstance(each, (MemoryExhausted, MemoryError)) for each in (error, error.__cause__)):
                    self._on_exhausted()
                else:
                    self.is_quarantined = True
                    reason = str(error) if isinstance(error, _Nonsense) else describe_error(error)
                    self._on_fault(self._name, reason)
                return None

    def _require_sense(self, draft: Tree, request: DraftRequest) -> Tree:
        if (reason := nonsense(draft, request, self._vocab_size)) is not None:
            raise _Nonsense(reason)
        return draft


class _Nonsense(Exception):
    """A draft that cannot be verified."""


def describe_error(error: Exception) -> str:
    """A line with the kind and the message of an error."""
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:_MAX_REASON]


def nonsense(draft: Any, request: DraftRequest, vocab_size: int) -> str | None:
    """The fault of a draft; None if it can be verified."""
    if not isinstance(draft, Tree):
        return f"it drafted a {type(draft).__name__}, wanted a Tree"
    tokens, buckets, parents, distributions, *_ = draft
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.ndim != 1:
        found = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, np.ndarray) else type(tokens).__name__
        return f"its tokens are {found}, wanted int32 [num_draft]"
    count = len(tokens)
    if not count:
        return None
    for name, part in (("buckets", buckets), ("parents", parents), ("distributions", distributions)):
        if part is not None and len(part) != count:
            return f"its {name} is of {len(part)} tokens, wanted {count}"
    ids = tokens.tolist()  # 1 µs for 24 tokens, the array's own min and max 4
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        return f"it drafted the token {low if low < 0 else high}, wanted 0 to {vocab_size - 1}"
    if parents is not None and not all(-1 <= parent < node for node, parent in enumerate(parents)):
        return "the parents of its tree do not come before their children"
    if (depth := draft.depth) > request.num_tokens:
        return f"it drafted {depth} tokens ahead, wanted at most {request.num_tokens}"
    for distribution in distributions or ():
        if len(distribution.ids) and not 0 <= distribution.ids.min() <= distribution.ids.max() < vocab_size:
            return f"it drew from tokens beyond 0 to {vocab_size - 1}"
    return None
