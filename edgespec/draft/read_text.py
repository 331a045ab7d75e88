"""What a drafter model has read of a text, and how much of it the next draft reads first.

A drafting head may begin anywhere in a text. Of a long one it reads the end alone, until the drafts of the answer
have paid for the rest.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from edgespec.decoding.decoder import reusable_prefix
from edgespec.types import TokenIds

_END = 64  # tokens that a head reads of a long text at first
# Of the first tokens that a head has right behind long prompts it owes so many to what lies before the last 64
# tokens: it has 44 % right without that, and 62 with it (docs/log/training.md).
_SHARE_OF_REST = 0.3


class Reading(NamedTuple):
    """Tokens that a draft reads first, those of them that it has to pay for by itself, and its limit on them."""

    num_tokens: int
    num_due: int
    limit: int | None = None


@dataclass(slots=True)
class ReadText:
    """The text that a drafter model's cache holds.

    held: Its tokens, those that were skipped among them.
    max_unread: The most tokens that it reads before a draft; None for all that it has not read.
    """

    held: TokenIds = field(default_factory=lambda: np.zeros(0, np.int32))
    max_unread: int | None = None
    _num_skipped: int = 0  # to read the end alone
    _has_gap: bool = False  # some states of it are not known, so that it cannot be read from its start

    def hold(self, tokens: TokenIds) -> None:
        """Note that it has read on, up to the end of tokens."""
        self.held = tokens

    def forget(self) -> None:
        """Note that nothing is held."""
        self.held, self._num_skipped, self._has_gap = self.held[:0], 0, False

    def leave_gap(self) -> None:
        """Note that states of the tokens to come are left out."""
        self._has_gap = True

    def begin_behind(self, tokens: TokenIds) -> None:
        """Note that it begins behind tokens whose states were left out."""
        self.held, self._num_skipped, self._has_gap = tokens, 0, True

    def _num_new(self, tokens: TokenIds) -> int:
        num_known = reusable_prefix(self.held, tokens, 1)
        # Of a text that ends in what was skipped, or hardly behind it, nothing is held.
        is_cut = self._num_skipped > 0 and num_known < self._num_skipped + _END // 2
        return len(tokens) - (0 if is_cut else num_known)

    def _is_behind_gap(self, tokens: TokenIds) -> bool:
        """True if some states of a text are not known; one that begins otherwise has none of the gap."""
        return self._has_gap and self._num_new(tokens) + _END <= len(tokens)

    def num_unread(self, tokens: TokenIds) -> int:
        """How many tokens it would read at most."""
        num_new = self._num_new(tokens)
        return num_new if self.max_unread is None else min(num_new, self.max_unread)

    def next(self, tokens: TokenIds, cost: Callable[[int], float], acceptance: float, num_drafts: int) -> Reading:
        """What the next draft reads, in an answer that has had so many of this drafter.

        Args:
            cost: Of reading so many tokens, in steps of the target.
            acceptance: The chance that the first token of a draft is right.
        """
        num_new, num_unread = self._num_new(tokens), self.num_unread(tokens)
        goes_on = not self._num_skipped and num_new < len(tokens) // 2
        if self.max_unread is None or goes_on or self._is_behind_gap(tokens):
            return Reading(num_unread, num_unread)
        whole = min(len(tokens), self.max_unread) if self._num_skipped else num_unread
        if whole <= _END:
            return Reading(whole, whole)
        end = min(num_unread, _END)
        # The rest is paid for by what it adds, as one buys once rent has cost as much.
        if cost(whole) <= _SHARE_OF_REST * acceptance * num_drafts:
            return Reading(whole, end)
        return Reading(end, end, _END)

    def observe(self, tokens: TokenIds, reading: Reading) -> None:
        """Note what a draft behind tokens has read."""
        self._has_gap = self._is_behind_gap(tokens)
        if reading.limit is None:
            self._num_skipped = 0
        elif not self._num_skipped or reading.num_tokens == _END:
            self._num_skipped = max(0, len(tokens) - _END)
