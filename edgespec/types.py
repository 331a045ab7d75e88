"""Arrays and drafts that cross module boundaries, and the protocols of decoders, samplers and drafters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from edgespec.system.cancel import Flag

Report = Callable[[str], None]  # takes a line for the user
TokenIds = npt.NDArray[np.int32]  # [num_tokens]
Logits = npt.NDArray[np.float32]  # [num_rows, vocab_size]
Row = npt.NDArray[np.floating[Any]]  # [vocab_size]


class Range(NamedTuple):
    """The smallest and the largest value that were measured."""

    low: float
    high: float


class Distribution(NamedTuple):
    """Tokens with a chance to be sampled, after all processors; probabilities are weights divided by their sum."""

    ids: npt.NDArray[np.intp]  # [num_ids], rising
    weights: npt.NDArray[np.floating[Any]]  # [num_ids]

    @property
    def probs(self) -> npt.NDArray[np.floating[Any]]:
        """Probability of each of ids, [num_ids]; their sum is 1."""
        probs: npt.NDArray[np.floating[Any]] = self.weights / self.weights.sum()
        return probs

    def probability(self, token: int) -> float:
        place = int(np.searchsorted(self.ids, token))
        is_there = place < len(self.ids) and self.ids[place] == token
        return float(self.weights[place] / self.weights.sum()) if is_there else 0.0


class Draft(NamedTuple):
    """Guessed tokens.

    buckets: for each token the bucket in which its source counts how often such tokens are accepted.
    parents: of a tree, the index of the node before each token, -1 for the last committed token; None for a chain.
    distributions: the distribution that each token was sampled from; None where each was certain.
    """

    tokens: TokenIds  # [num_draft]
    buckets: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    distributions: tuple[Distribution, ...] | None = None
    source: str = "none"

    def cut(self, num_tokens: int) -> "Draft":
        """The first num_tokens tokens; of a tree that is a tree, for parents come before their children."""
        return self._replace(
            tokens=self.tokens[:num_tokens],
            buckets=self.buckets[:num_tokens],
            parents=self.parents and self.parents[:num_tokens],
            distributions=self.distributions and self.distributions[:num_tokens],
        )


NO_DRAFT = Draft(np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True)
class Branching:
    """What branches of a tree of guesses are worth to a drafter, and what they cost it.

    accepted: The chance that a drafted token is accepted if all before it were, by position; the last counts for
        all positions behind it.
    alternatives: Where a guess is wrong, the chance that the next best choice is right, then that the one after
        that is if this one is not either, and so on.
    row_costs: Time of a step of the drafter by its rows, over that of a step of one; as many as a step may have.
    min_used: A step is done where its tokens are used with more than this chance in all, for each time of a step.
    """

    accepted: Sequence[float]
    alternatives: Sequence[float]
    row_costs: Sequence[float]
    min_used: float = 0.0

    def acceptance(self, position: int) -> float:
        return self.accepted[min(position, len(self.accepted) - 1)]

    def reached(self, position: int) -> float:
        """The chance that all tokens before a position are accepted."""
        known = len(self.accepted)
        return prod(self.accepted[:position]) * self.accepted[-1] ** max(0, position - known)


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
    branching: Also draft on from other outcomes of the pass that are worth it; None for the likeliest alone.
    num_others: How many alternatives to name for each token.
    """

    num_tokens: int
    min_probability: float = 0.0
    with_distributions: bool = False
    cancel: Flag = field(default_factory=Flag)
    is_ahead: bool = False
    min_tokens: int = 0
    timeout_s: float | None = None
    branching: Branching | None = None
    num_others: int = 0


class DraftStep(NamedTuple):
    """A step of a drafter that works ahead.

    num_rows: Tokens that it drafts, each behind another branch.
    beside: The share of its time in which the target worked too.
    """

    taken_s: float
    num_rows: int = 1
    beside: float = 1.0


class Missed(NamedTuple):
    """A guess that the text did not follow: how many alternatives were named before the token that came.

    is_named: The token was one of them.
    """

    num_before: int
    is_named: bool


class Foreseen(NamedTuple):
    """A guess for the token that the target put behind a draft all of which it accepted.

    position: Its place behind the text, which is the length of the draft.
    is_right: It was the target's own token.
    """

    position: int
    is_right: bool


class DraftAhead(NamedTuple):
    """The progress of a drafter that works ahead.

    draft: Tokens behind the text that are ready.
    running_s: Time of the running step so far; None while the drafter rests.
    steps: Those that ended since the last call, but for steps that read a text from its start.
    unfinished: The running step so far; None if it reads a text from its start.
    beside: The share of the last pass in which the drafter worked; None where no pass was seen.
    missed: The guess at which the text left the likeliest ones since the last call; None if it did not.
    foreseen: The guess for the token that the target put behind a draft that was accepted whole; None without one.
    """

    draft: Draft
    running_s: float | None = None
    steps: Sequence[DraftStep] = ()
    unfinished: DraftStep | None = None
    beside: float | None = None
    missed: Missed | None = None
    foreseen: Foreseen | None = None


class Decoder(Protocol):
    """A language model as a pure function of its tokens; a KV cache only makes it fast."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    @property
    def num_fed(self) -> int:
        """Tokens run so far, without those that came from the cache."""

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        """Logits that follow each of the last num_last tokens, [num_last, vocab_size].

        The next call from the same thread may overwrite the array: copy what must outlive it.

        Raises:
            ContextOverflow: tokens are more than context_length.
        """


@runtime_checkable
class TreeDecoder(Decoder, Protocol):
    """A decoder that runs a tree of drafts in one pass."""

    def tree_logits(
        self, tokens: TokenIds, nodes: TokenIds, parents: Sequence[int], num_last: int | None = None
    ) -> Logits:
        """Logits behind the last of tokens and behind each node, [num_nodes + 1, vocab_size].

        A node sees tokens, its ancestors and itself. The next call from the same thread may overwrite the array.

        Args:
            tokens: The committed tokens, [num_tokens].
            nodes: The tokens of the tree, [num_nodes].
            parents: For each node the index of the one before it, -1 for the last of tokens.
            num_last: Give the rows of the last nodes alone, [num_last, vocab_size]: nodes that the previous call
                ran behind tokens need not run again.

        Raises:
            ContextOverflow: A branch behind tokens is longer than the context.
        """


@runtime_checkable
class DraftDecoder(Decoder, Protocol):
    """A decoder that is made for drafting: it is told where a draft begins, and behind it only drafts are run."""

    def begin(self, tokens: TokenIds, num_tokens: int | None = None) -> bool:
        """Prepare to draft behind tokens; False where it cannot, as where hidden states of them are not known.

        Args:
            num_tokens: How many tokens are wanted, as far as that is known.
        """


@runtime_checkable
class BlockDraftDecoder(DraftDecoder, Protocol):
    """A decoder that drafts several tokens in one pass."""

    @property
    def tokens_per_pass(self) -> int:
        """How many tokens a pass drafts at most."""


@runtime_checkable
class BoundedDraftDecoder(DraftDecoder, Protocol):
    """A decoder whose drafts cannot be longer than what its graphs give."""

    @property
    def max_draft_tokens(self) -> int:
        """How many tokens it can draft behind the text that was begun last."""


@runtime_checkable
class ConfidentDecoder(DraftDecoder, Protocol):
    """A decoder that knows the chance that a token which it drafts is accepted."""

    @property
    def confidence(self) -> float | None:
        """The chance of the token behind the last row of the last call of logits; None where it is not known."""


class Argmax(NamedTuple):
    """The likeliest token of each row of logits, the lowest id of equal ones.

    is_sound: Whether all logits of a row are finite numbers; otherwise its id means nothing.
    """

    ids: npt.NDArray[np.int64]  # [num_rows]
    is_sound: npt.NDArray[np.bool_]  # [num_rows]


@runtime_checkable
class ArgmaxDecoder(Decoder, Protocol):
    """A decoder that can find the likeliest tokens on its own device, so that logits need not be copied."""

    @property
    def has_argmax(self) -> bool:
        """Whether this model can on this device."""

    def argmax(self, tokens: TokenIds, num_last: int) -> Argmax:
        """The likeliest token behind each of the last num_last tokens, [num_last]; raises what logits raises."""


@runtime_checkable
class ArgmaxTreeDecoder(ArgmaxDecoder, TreeDecoder, Protocol):
    """A decoder that can find the likeliest tokens of a tree's rows on its own device too."""

    def tree_argmax(self, tokens: TokenIds, nodes: TokenIds, parents: Sequence[int]) -> Argmax:
        """The likeliest tokens of the rows of tree_logits, [num_nodes + 1]; raises what tree_logits raises."""


@runtime_checkable
class PaddingDecoder(Decoder, Protocol):
    """A decoder that may run more tokens than it is given."""

    @property
    def pads_to_even(self) -> bool:
        """Whether a pass over an odd number of tokens runs one more, and so takes what that takes."""


def pads_to_even(decoder: Decoder) -> bool:
    return isinstance(decoder, PaddingDecoder) and decoder.pads_to_even


@runtime_checkable
class PretendingDecoder(Decoder, Protocol):
    """A decoder that can pretend to have run tokens.

    The time of a pass depends on how many tokens the cache holds, not on which, so passes behind a long text can
    be timed without reading one.
    """

    def pretend(self, tokens: TokenIds) -> None:
        """Fill the cache with tokens that were not run: later logits take realistic time and mean nothing.

        Raises:
            ContextOverflow: tokens are more than context_length.
            MemoryExhausted: The cache does not fit.
        """

    def forget(self) -> None:
        """Empty the cache and free its memory."""


@runtime_checkable
class Interruptible(Protocol):
    """A decoder whose pass another thread can end."""

    def interrupt(self) -> None:
        """End the running pass, if there is one, with an error; the cache stays usable."""


class ForwardingDecoder:
    """Base of decoders that wrap another one; forwards whatever a subclass does not change."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.vocab_size, self.context_length = decoder.vocab_size, decoder.context_length

    @property
    def num_fed(self) -> int:
        return self._decoder.num_fed

    def interrupt(self) -> None:
        if isinstance(self._decoder, Interruptible):
            self._decoder.interrupt()


class Sampler(Protocol):
    """The rule that chooses a token from one row of logits."""

    def __call__(self, logits: Row, tokens: TokenIds) -> int:
        """The token that follows tokens, [num_tokens], given its logits, [vocab_size]."""

    def distribution(self, logits: Row, tokens: TokenIds) -> Distribution:
        """The distribution that a call samples from, after all processors."""

    def least(self, logits: Row, tokens: TokenIds, token: int) -> float:
        """A lower bound of a token's probability; 0 where a bound takes as long to find as the probability."""

    def pick(self, distribution: Distribution, position: int) -> int:
        """A token sampled from a distribution with the noise of a position."""

    def uniform(self, position: int) -> float:
        """A number from 0 below 1 from the noise of a position."""

    def ranked(self, logits: Row, tokens: TokenIds, num_tokens: int) -> list[int]:
        """The token that a call gives, then the one that it would give without that token, and so on."""

    def apart(self, domain: int) -> "Sampler":
        """This rule with other noise, independent for each domain."""

    def drafting(self, domain: int) -> "Sampler":
        """The rule to draft with for rejection sampling, with the noise of apart(domain)."""


class Drafter(Protocol):
    """A source of drafts. The last four members are for drafters that work while the target works."""

    @property
    def name(self) -> str: ...

    @property
    def is_free(self) -> bool:
        """A draft costs next to nothing, so it is made before the policy decides."""
        return True

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Draft:
        """Guess up to request.num_tokens tokens that follow; fewer when cancelled or without a guess."""

    def learn(self, tokens: TokenIds, draft: Draft, logits: Logits) -> None:
        """Learn from a pass of the target.

        Args:
            tokens: The committed tokens before it.
            draft: The draft that it verified, from any drafter.
            logits: Behind the last committed token and behind each drafted one, [num_draft + 1, vocab_size].
        """
        return

    @property
    def can_run_ahead(self) -> bool:
        """The drafter can go on while the target verifies."""
        return False

    @property
    def num_alternatives(self) -> int:
        """How many alternatives it can draft on from while the target verifies."""
        return 0

    @property
    def tokens_per_step(self) -> int:
        """How many tokens take the time of one."""
        return 1

    def draft_ahead(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> DraftAhead:
        """The tokens that are ready, at most request.num_tokens; the drafter goes on from there."""
        return DraftAhead(NO_DRAFT)

    def pause(self) -> None:
        """Stop drafting until the next draft is asked for."""
        return


Acceptance = Callable[[TokenIds, Draft, Logits, Sampler], TokenIds]
"""Committed tokens, a draft, and target logits, [num_draft + 1, vocab_size] → the tokens that are emitted."""


def append(tokens: TokenIds, more: Sequence[int] | TokenIds) -> TokenIds:
    return np.concatenate([tokens, np.asarray(more, np.int32)])
