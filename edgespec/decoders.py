"""The protocols of decoders: what every one can do, and what only some can."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from edgespec.types import Logits, TokenIds


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
        """Logits after the last of tokens and after each node, [num_nodes + 1, vocab_size].

        A node sees tokens, its ancestors and itself. The next call from the same thread may overwrite the array.

        Args:
            tokens: The committed tokens, [num_tokens].
            nodes: The tokens of the tree, [num_nodes].
            parents: For each node the index of the one before it, -1 for the last of tokens.
            num_last: Give the rows of the last nodes alone, [num_last, vocab_size]: nodes that the previous call
                ran after tokens need not run again.

        Raises:
            ContextOverflow: A branch after tokens is longer than the context.
        """


@runtime_checkable
class DraftDecoder(Decoder, Protocol):
    """A decoder made for drafting. It is told where a draft begins, and runs nothing but drafts from there on."""

    def begin(self, tokens: TokenIds, num_tokens: int | None = None) -> bool:
        """Prepare to draft after tokens; False where it cannot, for example without their hidden states.

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
    """A decoder whose graphs bound the length of its drafts."""

    @property
    def max_draft_tokens(self) -> int:
        """How many tokens it can draft after the text that was begun last."""


@runtime_checkable
class RecentDraftDecoder(DraftDecoder, Protocol):
    """A decoder that reads the end of a text alone before it drafts."""

    @property
    def max_unread(self) -> int:
        """The most tokens that it reads before those whose rows are wanted."""


@runtime_checkable
class ConfidentDecoder(DraftDecoder, Protocol):
    """A decoder that estimates the chance that a token it drafts is accepted."""

    @property
    def confidence(self) -> float | None:
        """The chance of the token after the last row of the last call of logits; None where it is not known."""


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
        """The likeliest token after each of the last num_last tokens, [num_last]; raises what logits raises."""


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
        """Whether a pass over an odd number of tokens runs one more, and takes as long as that wider pass."""


def pads_to_even(decoder: Decoder) -> bool:
    """Whether passes of a decoder run an even number of tokens; False for one that does not say."""
    return isinstance(decoder, PaddingDecoder) and decoder.pads_to_even


@runtime_checkable
class PretendingDecoder(Decoder, Protocol):
    """A decoder that can pretend to have run tokens.

    The time of a pass depends on how many tokens the cache holds, not on which, so passes after a long text can
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
class StorableDecoder(Decoder, Protocol):
    """A decoder whose keys and values can be taken out, and put into another one of the same key."""

    @property
    def prefix_key(self) -> str | None:
        """What keys and values depend on beside their tokens; None where they cannot be taken out."""

    def read_prefix(self) -> tuple[TokenIds, npt.NDArray[Any]]:
        """The tokens that are held, [num_tokens], and their keys and values; the third axis counts positions."""

    def fill_prefix(self, tokens: TokenIds, values: npt.NDArray[Any]) -> None:
        """Hold what read_prefix has given. Raises MemoryExhausted: it does not fit."""


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
