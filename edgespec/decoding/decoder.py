"""One call of a decoder as a value, what it gives, what of it a cache holds, and what a decoder can do.

All decoders run chains. What else one does it says in `can` and by its optional parts: nobody asks for its type.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from edgespec.decoding.tree import NO_DRAFT, Tree
from edgespec.system.cancel import Cancel
from edgespec.types import Logits, Row, TokenIds, append, num_shared


class Wants(Enum):
    """The purpose of a pass: rows of logits, or the likeliest token of each row alone."""

    LOGITS = 0
    BEST = 1


LOGITS, BEST = Wants.LOGITS, Wants.BEST


class Pass(NamedTuple):
    """One call of a decoder: rows after a text and after tokens that were guessed to follow it.

    num_last: Give the rows of the last tokens of text and tree alone, so that tokens that an earlier call ran need
        not run again; None for the rows after the last token of text and after each of tree.
    wants: BEST saves the copy of logits from a decoder that can.best; others mostly give logits all the same.
    num_prompt: How many tokens of text are the prompt, which a decoder may read in wider passes than the rest.
        Rows may depend on it in their last bits, so all passes of an answer have the same.
    """

    text: TokenIds  # committed tokens, [num_tokens]
    tree: Tree = NO_DRAFT  # a node sees text, its ancestors and itself; a chain may follow any text
    num_last: int | None = None
    wants: Wants = LOGITS
    num_prompt: int = 0

    @property
    def is_tree(self) -> bool:
        """True if the guesses are more than a chain: only a decoder that can.trees runs them."""
        return self.tree.parents is not None and len(self.tree.tokens) > 0

    @property
    def tokens(self) -> TokenIds:
        """Text and guesses, which are a text only if they are a chain."""
        return append(self.text, self.tree.tokens) if len(self.tree.tokens) else self.text

    @property
    def num_rows(self) -> int:
        return len(self.tree.tokens) + 1 if self.num_last is None else self.num_last

    def num_held(self, held: TokenIds, behind: Tree) -> int:
        """How many nodes of its tree, from the first on, a cache holds in their places and no row is wanted of.

        Args:
            held: The tokens in the cache's first places; those after the text of the pass are a chain.
            behind: The tree in the places after held.
        """
        num_text, nodes = len(self.text), self.tree.tokens
        if self.num_last is None or len(held) < num_text or not np.array_equal(held[:num_text], self.text):
            return 0
        chain = held[num_text:]
        placed = [*zip(chain.tolist(), range(-1, len(chain) - 1), strict=True)]
        above = behind.above if not len(chain) else [len(chain) + parent for parent in behind.above]
        placed += zip(behind.tokens.tolist(), above, strict=True)
        wanted = [*zip(nodes.tolist(), self.tree.above, strict=True)][: max(0, len(nodes) - self.num_last)]
        shared = min(len(placed), len(wanted))
        if placed[:shared] == wanted[:shared]:  # a tree that grows: at once, as it may have a thousand nodes
            return shared
        is_held = (one == other for one, other in zip(placed, wanted, strict=False))
        return sum(takewhile(bool, is_held))


def rows_by_branch(run: Callable[[TokenIds, int], Logits], given: Pass) -> Logits:
    """The rows of a tree, [num_rows, vocab_size], from one call of Decoder.logits for each branch."""
    tree, found = given.tree, dict[int, Row]()
    nodes, inner = tree.tokens, set(tree.above)
    for leaf in [node for node in range(len(nodes)) if node not in inner] or [-1]:
        branch = tree.path(leaf)
        new = [node for node in (-1, *branch) if node not in found]
        rows = run(append(given.text, nodes[branch]), len(new))
        found.update(zip(new, rows.copy(), strict=True))
    return np.stack([found[node] for node in range(len(nodes) - given.num_rows, len(nodes))])


def reusable_prefix(held: TokenIds, tokens: TokenIds, num_last: int) -> int:
    """How many cached positions a call for the logits of the last num_last tokens can reuse.

    The common prefix without the last num_last tokens, which are fed again even when held.
    """
    return num_shared(held, tokens[: max(0, len(tokens) - num_last)])


class Argmax(NamedTuple):
    """The likeliest token of each row of logits, the lowest id of equal ones.

    is_sound: True for a row of finite numbers alone; otherwise its id means nothing.
    """

    ids: npt.NDArray[np.int64]  # [num_rows]
    is_sound: npt.NDArray[np.bool_]  # [num_rows]


NO_LOGITS: Logits = np.zeros((0, 0), np.float32)


class Rows(NamedTuple):
    """The rows of a pass. The next call from the same thread may overwrite the arrays: copy what must outlive it.

    best: Given instead of logits to a pass that wants BEST, as a decoder that can.best does where it pays.
    confidence: A head's own estimate of the chance of the token after the last row; None where it makes none.
    """

    logits: Logits = NO_LOGITS  # [num_rows, vocab_size]
    best: Argmax | None = None
    confidence: float | None = None

    def last(self, num_rows: int) -> "Rows":
        """The last of these rows."""
        best = self.best and Argmax(self.best.ids[-num_rows:], self.best.is_sound[-num_rows:])
        return Rows(self.logits[-num_rows:], best, self.confidence)


class Can(NamedTuple):
    """The abilities of a decoder; each default is what all can.

    trees: Its passes run guesses that branch.
    best: It finds the likeliest tokens on its own device, so that logits need not be copied.
    widths: How many tokens its passes have, ascending: others are padded to the next, and take as long. Wider
        passes than the last have any width, and with none all have.
    read_width: How many tokens the passes have that only read a prompt, where their keys and values may differ in
        the last bits from those of other passes; 0 where they do not, or nothing is promised.
    tokens_per_pass: How many tokens of a draft take the time of one, since one pass gives them all.
    max_unread: The most tokens of a text that it reads before it drafts; None if it reads all of them.
    rewind: How many positions it can go back, which bounds the length of a draft; None for any.
    """

    trees: bool = False
    best: bool = False
    widths: tuple[int, ...] = ()
    read_width: int = 0
    tokens_per_pass: int = 1
    max_unread: int | None = None
    rewind: int | None = None


CHAINS = Can()
EVEN_WIDTHS = tuple(range(2, 66, 2))


class Cache(Protocol):
    """The KV cache of a decoder, as far as others deal with it beside passes."""

    @property
    def held_tokens(self) -> TokenIds:
        """The tokens whose keys and values fill the first slots, [num_held]; none of a cache that does not say."""
        return NO_DRAFT.tokens

    def pretend(self, tokens: TokenIds) -> None:
        """Fill the cache with tokens that were not run: later logits take realistic time and mean nothing.

        So passes after a long text can be timed without reading one.

        Raises:
            ContextOverflow: tokens are more than context_length.
            MemoryExhausted: The cache does not fit.
        """

    def imitate(self, tokens: TokenIds, num_run: int, seed: int) -> bool:
        """Hold tokens of which only the first num_run were run; the others get keys and values like theirs.

        Returns False, and holds what it held, where the cache is no memory of the host that can be filled.
        """
        return False

    def reserve(self, num_tokens: int) -> None:
        """Take the host's memory for a text of so many tokens now, and not while it is run; what is held stays.

        Raises MemoryExhausted: It does not fit.
        """
        return

    def forget(self) -> None:
        """Empty the cache and free its memory."""

    @property
    def prefix_key(self) -> str | None:
        """Equal where keys and values of the same tokens are; None where they cannot be taken out and put back."""
        return None

    def read_prefix(self) -> tuple[TokenIds, npt.NDArray[Any]]:
        """The tokens that are held, [num_tokens], and their keys and values; the third axis counts positions."""
        return self.held_tokens, np.zeros((0, 0, 0), np.float32)

    def fill_prefix(self, tokens: TokenIds, values: npt.NDArray[Any]) -> None:
        """Hold what read_prefix has given under the same key. Raises MemoryExhausted: it does not fit."""
        return


Room = Callable[[], AbstractContextManager[bool]]
"""Keeps memory for what its block opens; gives False where there is not enough."""


class Forks(Protocol):
    """The caches that a decoder can have over its weights, each of which serves one text at a time."""

    def share(self, max_callers: int, may_join: Room) -> None:
        """Let passes for max_callers texts take turns, or run as one if there is memory for that: may_join."""

    def let_go(self, *, is_whole: bool) -> bool:
        """Free what passes of several texts as one hold: caches, and with is_whole all, so that they take turns.

        Waits for the pass that is running. Returns whether anything was held.
        """
        return False

    def fork(self) -> "Decoder":
        """A decoder over the same weights with an empty cache of its own."""

    def serve(self, caller: Any) -> None:
        """Run passes for a text, a Caller of the queue of passes, from now on, which is told as each begins."""

    def copy_prefix(self, other: Any, tokens: TokenIds) -> bool:
        """Copy keys and values of tokens from another fork, whose cache begins with them; False if it cannot.

        The other one may run passes meanwhile, as long as its text goes on beginning with tokens.
        """

    @property
    def can_exchange(self) -> bool:
        """True if this decoder and a fork can exchange their caches."""

    def exchange(self, other: Any) -> None:
        """Exchange caches with a fork, while neither runs passes."""


Correct = Callable[[Logits, npt.NDArray[np.int64]], Logits]  # rows and their contexts → corrected rows


class CorrectableHead(Protocol):
    """A drafting head whose logits may have a correction; another thread may replace it at any time."""

    correction: Correct | None

    @property
    def columns(self) -> TokenIds | None:
        """The token of each column of its rows, ascending; None where each token has one."""

    @property
    def num_columns(self) -> int: ...

    def known_rows(self, tokens: TokenIds, num_last: int) -> Logits | None:
        """Rows after the last num_last tokens, over its own columns and not corrected, [num_last, num_columns].

        None where not all of the target's hidden states that they are made of are known.
        """

    def interrupt(self) -> None:
        """End the running pass, if there is one, with an error."""


class Decoder(Protocol):
    """A language model as a pure function of its passes; a KV cache only makes it fast."""

    vocab_size: int
    context_length: int

    @property
    def num_fed(self) -> int:
        """Tokens run so far, without those that came from the cache."""

    @property
    def can(self) -> Can:
        return CHAINS

    def run(self, given: Pass) -> Rows:
        """The rows of a pass, [given.num_rows, vocab_size].

        Raises:
            ContextOverflow: The text and its longest branch are more than context_length.
            MemoryExhausted: The pass does not fit.
        """

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        """Logits after each of the last num_last tokens, [num_last, vocab_size]: run, where no more is wanted."""
        return self.run(Pass(tokens, num_last=num_last)).logits

    def begin(self, tokens: TokenIds, num_tokens: int, max_unread: int | None = None) -> int:
        """How many of num_tokens tokens it can draft after a text, which a head is told before it drafts.

        0 where it cannot, for example without the target's hidden states. A head runs nothing but drafts after it.

        max_unread: Read no more of the text for that than its last tokens, where this is less than can.max_unread.
        """
        return num_tokens

    def expect_drafts(self, is_expected: bool) -> bool:
        """Be told whether it is to draft soon, so that a head's states are asked for or not.

        Returns False where the target has to run a pass before it can draft.
        """
        return True

    def interrupt(self) -> None:
        """Let the pass that another thread runs end with an error, if that can be; the cache stays usable."""
        return

    def cancelled_by(self, cancel: Cancel) -> AbstractContextManager[None]:
        """Within the block passes end, and no other begins, once cancel is set; raises Cancelled then."""
        return nullcontext()

    @property
    def cache(self) -> Cache | None:
        return None

    @property
    def hidden_states(self) -> Any | None:
        """The store of HiddenStates of the tokens whose keys and values are held; None where none are kept."""
        return None

    @property
    def forks(self) -> Forks | None:
        """None for a decoder with one cache."""
        return None

    @property
    def correctable(self) -> CorrectableHead | None:
        """The head whose rows may be corrected; None for all other decoders."""
        return None


class ForwardingDecoder(Decoder):
    """Base of decoders that wrap another one and change what its passes give or take."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.vocab_size, self.context_length = decoder.vocab_size, decoder.context_length

    @property
    def num_fed(self) -> int:
        return self._decoder.num_fed

    @property
    def can(self) -> Can:
        return self._decoder.can

    def expect_drafts(self, is_expected: bool) -> bool:
        return self._decoder.expect_drafts(is_expected)

    def interrupt(self) -> None:
        self._decoder.interrupt()


def empty_cache(decoder: Decoder, tokens: Sequence[int] | TokenIds) -> None:
    """Run one token with which tokens do not begin, so that no prefix of tokens stays cached."""
    decoder.logits((np.asarray(tokens[:1], np.int32) + 1) % decoder.vocab_size, 1)
