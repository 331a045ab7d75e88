"""Recurrent heads that draft several tokens in one pass (P-EAGLE: arXiv:2602.01469).

After a text mask tokens are run in the place of those that are not known yet; the graph has a state for those that
are given none.
What they leave in the cache is no prefix of any text.
"""

from typing import Unpack

import numpy as np

from edgespec.decoding.decoder import Can
from edgespec.decoding.hidden_states import States
from edgespec.runtimes.attention_bias import TreeLayout
from edgespec.runtimes.head_parts import HeadFolder
from edgespec.runtimes.recurrent_head import MAX_UNREAD, RecurrentHead
from edgespec.runtimes.session import SessionOptions
from edgespec.types import Logits, TokenIds, append


class ParallelHead(RecurrentHead):
    """A recurrent head that drafts as many tokens in a pass as its manifest says, and has no trees.

    A draft begins after a text all of whose hidden states are known but for the newest token's, and ends with the
    pass. After that text a row does not depend on the tokens that were drafted before it.
    """

    def __init__(self, folder: HeadFolder, **options: Unpack[SessionOptions]) -> None:
        """Load the graphs; raises as open_session does."""
        head = folder.head
        self._masks = np.full(head.block_tokens - 1, head.mask_token_id, np.int32)
        self._begun = np.zeros(0, np.int32)  # the text that the draft follows; empty for none
        self._draft: Logits = np.zeros((0, 0), np.float32)  # after it, [num_rows, num_columns]
        self._end: int | None = None  # the slot at which masks follow in the pass that runs there
        super().__init__(folder, **options)

    @property
    def can(self) -> Can:
        return Can(tokens_per_pass=len(self._masks) + 1, max_unread=MAX_UNREAD)

    def begin(self, tokens: TokenIds, num_tokens: int, max_unread: int | None = None) -> int:
        place, num_skipped = self._place(tokens), len(self._features.skipped)
        if super().begin(tokens, num_tokens, max_unread) and self._is_known(tokens):
            if place != 0 or len(self._features.skipped) != num_skipped:
                self._begun, self._draft, place = tokens, self._draft[:0], 0
        elif place is None:
            return 0
        return min(num_tokens, len(self._masks) + 1 - place)

    def _is_known(self, tokens: TokenIds) -> bool:
        num_skipped = len(self._features.skipped)
        return self._features.num_known(tokens[num_skipped:]) >= len(tokens) - num_skipped - 1

    def _place(self, tokens: TokenIds) -> int | None:
        """Which token of the draft follows tokens; None where it does not reach there."""
        place = len(tokens) - len(self._begun)
        is_in = len(self._begun) > 0 and 0 <= place <= len(self._masks)
        return place if is_in and np.array_equal(self._begun, tokens[: len(self._begun)]) else None

    def _rows_after(self, tokens: TokenIds, num_last: int) -> Logits:
        place = self._place(tokens) if num_last == 1 else None
        if place is None:
            return super()._rows_after(tokens, num_last)
        if place >= len(self._draft):
            self._run_draft()
        return self._draft[place : place + 1]

    def _run_draft(self) -> None:
        part = self._read_part(self._begun, 1)
        self._passes.begin()
        self._settle(part)
        self._end = len(part) - 1
        try:
            self._rows(part, 1)
        finally:
            self._end = None

    def _run(
        self, tokens: TokenIds, start: int, states: States, num_rows: int, layout: TreeLayout | None = None
    ) -> Logits:
        if self._end is None or start + len(tokens) != self._end:
            return super()._run(tokens, start, states, num_rows, layout)
        masks = self._masks[: self.context_length - self._end]
        none = np.zeros((len(masks), states.shape[1]), np.float32)
        if self._is_deterministic and len(masks):  # a pass of masks alone is the same however the text was cut
            rows = super()._run(tokens, start, states, num_rows).copy()
            ahead = super()._run(masks, self._end, none, len(masks))
        else:
            run = append(tokens, masks), start, np.concatenate([states, none])
            rows, ahead = np.split(super()._run(*run, num_rows + len(masks)), [num_rows])
        self._draft = np.concatenate([rows[-1:], ahead])
        self._own.put(self._end, none[:0])  # nothing goes on from the state of a mask
        return rows
