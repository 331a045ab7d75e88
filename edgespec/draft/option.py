"""The speed that drafting from one source promises for the next pass."""

from typing import NamedTuple, Protocol

from edgespec.decoding.scheduler import Proposal
from edgespec.decoding.tree import NO_DRAFT, Tree
from edgespec.draft.drafter import Drafter, DraftRequest
from edgespec.draft.limits import MIN_GAIN
from edgespec.types import Sampler, TokenIds


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
