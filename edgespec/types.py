"""What crosses a module boundary: arrays, drafts, and the protocols that the scheduler knows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from edgespec.cancel import Flag

TokenIds = npt.NDArray[np.int32]  # [num_tokens]
Logits = npt.NDArray[np.float32]  # [num_rows, vocab_size]
Row = npt.NDArray[np.floating[Any]]  # [vocab_size]


class Range(NamedTuple):
    """The least and the largest that a value was seen to be."""

    low: float
    high: float


class Distribution(NamedTuple):
    """Tokens that can come, after all processors, each as likely as its share of what they weigh together."""

    ids: npt.NDArray[np.intp]  # [num_ids], rising
    weights: npt.NDArray[np.floating[Any]]  # [num_ids]

    @property
    def probs(self) -> npt.NDArray[np.floating[Any]]:
        """Of each of ids, [num_ids]; their sum is 1."""
        probs: npt.NDArray[np.floating[Any]] = self.weights / self.weights.sum()
        return probs

    def probability(self, token: int) -> float:
        place = int(np.searchsorted(self.ids, token))
        is_there = place < len(self.ids) and self.ids[place] == token
        return float(self.weights[place] / self.weights.sum()) if is_there else 0.0


class Draft(NamedTuple):
    """A guess at what follows, and what it rests on.

    evidence: for each token the class in which its source counts the chance that it is kept.
    parents: of a tree, the index of the node before each token, -1 for the last committed token; None for a chain.
    distributions: what each token was drawn from; None where each was certain.
    """

    tokens: TokenIds  # [num_draft]
    evidence: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    distributions: tuple[Distribution, ...] | None = None
    source: str = "none"

    def cut(self, num_tokens: int) -> "Draft":
        """Its first num_tokens tokens; of a tree a tree, for parents come before their children."""
        return self._replace(
            tokens=self.tokens[:num_tokens],
            evidence=self.evidence[:num_tokens],
            parents=self.parents and self.parents[:num_tokens],
            distributions=self.distributions and self.distributions[:num_tokens],
        )


NOTHING = Draft(np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True)
class Ask:
    """What is wanted of a drafter.

    num_tokens: the most; of a tree in its longest branch.
    floor: a token whose chance of being reached is below this is not worth its draft.
    with_distributions: say what tokens were drawn from, as rejection sampling needs.
    cancel: once set, stop between two steps.
    ahead: go on when this is answered, while others work, if that is what the drafter can.
    least: how many to wait for, of one that is ahead.
    patience_s: how long to wait for them, and then go without; None to have them or a fault.
    hedged: prepare other outcomes too.
    num_others: how many tokens to name that would have been drafted in the place of each.
    """

    num_tokens: int
    floor: float = 0.0
    with_distributions: bool = False
    cancel: Flag = field(default_factory=Flag)
    ahead: bool = False
    least: int = 0
    patience_s: float | None = None
    hedged: bool = False
    num_others: int = 0


class Decoder(Protocol):
    """A language model as a pure function of its tokens; a KV cache only makes it fast."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    @property
    def num_fed(self) -> int:
        """Tokens run so far: what the cache did not hold."""
        ...

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        """Logits that follow each of the last num_last tokens, [num_last, vocab_size].

        The next call from the same thread may overwrite the array: copy what must outlive it.

        Raises:
            ContextOverflow: tokens are more than context_length.
        """
        ...


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
            num_last: Rows of so many nodes at the end alone, [num_last, vocab_size]: those that the call before
                ran behind the same tokens need not run again.

        Raises:
            ContextOverflow: A branch is more than fits behind tokens.
        """
        ...


class Likeliest(NamedTuple):
    """The likeliest token of each row of logits, the lowest id of equal ones.

    is_sound: Whether all logits of a row are finite numbers; of others the id means nothing.
    """

    ids: npt.NDArray[np.int64]  # [num_rows]
    is_sound: npt.NDArray[np.bool_]  # [num_rows]


@runtime_checkable
class ArgmaxDecoder(Decoder, Protocol):
    """A decoder that can choose the likeliest tokens where it runs, so that rows need not come from there."""

    @property
    def has_argmax(self) -> bool:
        """Of this model on this device."""
        ...

    def argmax(self, tokens: TokenIds, num_last: int) -> Likeliest:
        """The likeliest token behind each of the last num_last tokens, [num_last]; errors as of logits."""
        ...


@runtime_checkable
class PretendingDecoder(Decoder, Protocol):
    """A decoder that can take tokens as run that never were.

    What passes take hangs on how many tokens are held, not on which: so what they take behind a long text can be
    measured without reading one.
    """

    def pretend(self, tokens: TokenIds) -> None:
        """Hold tokens, of which nothing was run: what is asked next takes its time and gives nonsense.

        Raises:
            ContextOverflow: tokens are more than context_length.
            MemoryExhausted: The cache does not fit.
        """
        ...

    def forget(self) -> None:
        """Hold nothing, and let go of the memory that held it."""
        ...


@runtime_checkable
class Interruptible(Protocol):
    """A decoder whose pass another thread can end."""

    def interrupt(self) -> None:
        """End the pass that runs, if one does; it raises an error and leaves a cache that serves."""
        ...


class Sampler(Protocol):
    """The rule that picks a token from one row of logits."""

    def __call__(self, logits: Row, tokens: TokenIds) -> int:
        """The token that follows tokens, [num_tokens], given its logits, [vocab_size]."""
        ...

    def distribution(self, logits: Row, tokens: TokenIds) -> Distribution:
        """What a call draws from."""
        ...

    def least(self, logits: Row, tokens: TokenIds, token: int) -> float:
        """A lower bound of a token's probability; 0 where none is found sooner than that itself."""
        ...

    def pick(self, distribution: Distribution, position: int) -> int:
        """A token of a distribution, with the noise of a position."""
        ...

    def uniform(self, position: int) -> float:
        """A number from 0 below 1, by the noise of a position."""
        ...

    def ranked(self, logits: Row, tokens: TokenIds, num_tokens: int) -> list[int]:
        """The token that a call gives, and those that it would give were all before them not there."""
        ...

    def apart(self, domain: int) -> "Sampler":
        """The same rule with other noise, independent of this one's and of every other domain's."""
        ...

    def drafting(self, domain: int) -> "Sampler":
        """What to draft with where drafts are judged by their distributions; its noise as if apart."""
        ...


class Drafter(Protocol):
    """A source of guesses."""

    @property
    def name(self) -> str: ...

    @property
    def is_free(self) -> bool:
        """A guess costs next to nothing, so it is made before it is weighed."""
        ...

    def draft(self, tokens: TokenIds, ask: Ask, sampler: Sampler) -> Draft:
        """Guess up to ask.num_tokens tokens that follow; fewer when cancelled or without a guess."""
        ...

    def learn(self, tokens: TokenIds, draft: Draft, logits: Logits) -> None:
        """See what a pass of the target showed.

        Args:
            tokens: The committed tokens before it.
            draft: What it verified, whoever drafted it.
            logits: Behind the last committed token and behind each drafted one, [num_draft + 1, vocab_size].
        """
        ...


@runtime_checkable
class AheadDrafter(Drafter, Protocol):
    """A drafter that can go on while the target works."""

    @property
    def can_run_ahead(self) -> bool: ...

    @property
    def num_outcomes(self) -> int:
        """How many other outcomes of a pass it can prepare meanwhile, where Ask.hedged has it do so."""
        ...

    def follow(self, tokens: TokenIds, ask: Ask, sampler: Sampler) -> Draft:
        """What is drafted behind tokens by now, at most ask.num_tokens; it goes on from there."""
        ...

    def due_s(self, step_s: float) -> float:
        """Seconds until the next token is to be expected, of steps that take step_s; inf if none is drafted."""
        ...

    def taken_s(self) -> tuple[Sequence[float], float]:
        """Seconds that each step took since this was last asked, and how long the one goes on that is being done.

        A step drafts a token, or one for each outcome; those that read a text anew are left out.
        """
        ...

    def rest(self) -> None:
        """Stop until the next draft."""
        ...


Acceptance = Callable[[TokenIds, Draft, Logits, Sampler], TokenIds]
"""Committed tokens, a draft, and target logits, [num_draft + 1, vocab_size] → the tokens that are emitted."""


def append(tokens: TokenIds, more: Sequence[int] | TokenIds) -> TokenIds:
    return np.concatenate([tokens, np.asarray(more, np.int32)])
