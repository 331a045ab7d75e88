"""Records what a policy asks of a drafter in each round, and asks it again, to find the least time that it takes.

A run on real threads decides by what it measures, so its decisions are not those of a run in virtual time.
Repeated in virtual time they show what threads and the language cost, apart from what other decisions would gain.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from edgespec.decoding.scheduler import Plain, Proposal
from edgespec.decoding.tree import NO_DRAFT, Tree
from edgespec.draft.drafter import DraftAhead, Drafter, DrafterCan, DraftRequest
from edgespec.types import Logits, Sampler, TokenIds


class Call(NamedTuple):
    """A call of draft_ahead, of draft with the number of tokens that it gave, or of pause, without a request."""

    request: DraftRequest | None = None
    num_drafted: int | None = None


Calls = list[Call]  # of one round


class RecordedDrafter(Drafter):
    """A drafter whose calls are recorded, by round."""

    def __init__(self, drafter: Drafter, rounds: list[Calls]) -> None:
        self._drafter = drafter
        self._rounds = rounds
        self._calls: Calls = []

    @property
    def name(self) -> str:
        return self._drafter.name

    @property
    def can(self) -> DrafterCan:
        return self._drafter.can

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        draft = self._drafter.draft(tokens, request, sampler)
        self._calls.append(Call(request, len(draft.tokens)))
        return draft

    def draft_ahead(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> DraftAhead:
        self._calls.append(Call(request))
        return self._drafter.draft_ahead(tokens, request, sampler)

    def pause(self) -> None:
        self._calls.append(Call())
        self._drafter.pause()

    def learn(self, tokens: TokenIds, draft: Tree, logits: Logits) -> None:
        """End the record of a round: the drafter learns once a round, at its end."""
        self._rounds.append(self._calls)
        self._calls = []
        self._drafter.learn(tokens, draft, logits)


class ReplayPolicy(Plain):
    """Asks a drafter in each round for what was asked of another one, and waits until it has as many tokens."""

    def __init__(self, drafter: Drafter, rounds: Sequence[Calls]) -> None:
        self._drafter = drafter
        self._rounds = iter(rounds)

    def propose(self, tokens: TokenIds, max_tokens: int, sampler: Sampler) -> Proposal:
        draft, is_ahead = NO_DRAFT, False
        for request, num_drafted in next(self._rounds, []):
            if request is None:
                self._drafter.pause()
            elif num_drafted is None:
                self._drafter.draft_ahead(tokens, request, sampler)
            else:
                asked = replace(request, num_tokens=num_drafted, min_tokens=num_drafted, timeout_s=None)
                draft, is_ahead = self._drafter.draft(tokens, asked, sampler), request.is_ahead
        return Proposal(tokens, draft, is_ahead=is_ahead)

    def close(self) -> None:
        self._drafter.pause()
