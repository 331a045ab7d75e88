"""Which of the open drafters may draft for one answer, and how much."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgespec.types import Drafter


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
