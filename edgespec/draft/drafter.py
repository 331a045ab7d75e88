"""The protocol of drafters, what a policy asks of one, and what one tells of its lane."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from edgespec.decoding.tree import NO_DRAFT, Tree, Worth
from edgespec.system.cancel import Flag
from edgespec.types import Logits, Sampler, TokenIds


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A policy's request for a draft.

    num_tokens: The most tokens; of a tree in its longest branch.
    min_probability: Stop where the chance that a token is reached falls below this.
    with_distributions: Give the distributions that tokens were sampled from, as rejection sampling needs.
    cancel: Once set, stop between two steps.
    is_ahead: Go on drafting while the target works, if the drafter can.
    min_tokens: How many tokens to wait for, from a drafter that works ahead.
    timeout_s: How long to wait for min_tokens; None to wait until a fault.
    max_unread: Read no more than so many of the last tokens of the text; None for as many as it can.
    worth: For a tree, or None for a chain. A draft ahead also goes on from other outcomes of the pass that are
        worth it; another one has all guesses of the steps that are, of which the best can be chosen.
    """

    num_tokens: int
    min_probability: float = 0.0
    with_distributions: bool = False
    cancel: Flag = field(default_factory=Flag)
    is_ahead: bool = False
    min_tokens: int = 0
    timeout_s: float | None = None
    max_unread: int | None = None
    worth: Worth | None = None


class LaneStep(NamedTuple):
    """A step of a drafter that works ahead.

    num_rows: Tokens that it drafts, each after another branch.
    shared: The share of its time in which the target worked too.
    """

    taken_s: float
    num_rows: int = 1
    shared: float = 1.0


class DraftAhead(NamedTuple):
    """The progress of a drafter that works ahead.

    draft: Tokens after the text that are ready.
    past: What it had guessed after the text that it was last asked about, as far as it was ready by now.
    running_s: Time of the running step so far; None while the drafter rests.
    steps: Those that ended since the last call, but for steps that read a text from its start.
    unfinished: The step that was running, so far; None if it reads a text from its start.
    shared: The share of the last pass in which the drafter worked; None where no pass was seen.
    """

    draft: Tree
    past: Tree = NO_DRAFT
    running_s: float | None = None
    steps: Sequence[LaneStep] = ()
    unfinished: LaneStep | None = None
    shared: float | None = None


class DrafterCan(NamedTuple):
    """A drafter's abilities.

    is_free: A draft costs next to nothing, so that it is made before the policy decides.
    trees: It names its next best choices, of which a tree can be grown.
    run_ahead: It can go on while the target verifies.
    num_alternatives: How many alternatives it can draft on from meanwhile.
    tokens_per_step: How many tokens take the time of one.
    max_unread: The most tokens that it reads before it drafts; None where it reads whatever it has not read.
    """

    is_free: bool = True
    trees: bool = False
    run_ahead: bool = False
    num_alternatives: int = 0
    tokens_per_step: int = 1
    max_unread: int | None = None


class Drafter(Protocol):
    """A source of drafts. One that drafts from the text needs a name, and draft; the rest is for others."""

    @property
    def name(self) -> str: ...

    @property
    def can(self) -> DrafterCan:
        return DrafterCan()

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        """Guess up to request.num_tokens tokens that follow; fewer when cancelled or without a guess."""

    def learn(self, tokens: TokenIds, draft: Tree, logits: Logits) -> None:
        """Learn from a pass of the target.

        Args:
            tokens: The committed tokens before it.
            draft: The draft that it verified, from any drafter.
            logits: After the last committed token and after each drafted one, [num_draft + 1, vocab_size].
        """
        return

    def draft_ahead(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> DraftAhead:
        """The tokens that are ready, at most request.num_tokens; one that can run ahead goes on from there."""
        return DraftAhead(NO_DRAFT)

    def expect_drafts(self, is_expected: bool) -> bool:
        """Be told whether drafts will be asked for soon; False where a pass has to run before the first one."""
        return True

    def pause(self) -> None:
        """Stop drafting until the next draft is asked for."""
        return
