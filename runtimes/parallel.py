"""Drafter models and drafting heads that draft several tokens in one pass.

After a text mask tokens are run, each in the place of a token that is not known yet, and each gives the row of its
place. An ordinary cache serves: what mask tokens leave in it is no prefix of any text.
"""

from typing import Unpack

import numpy as np

from edgespec.decoding.decoder import Cache, Can, Decoder, ForwardingDecoder, Pass, Rows
from edgespec.decoding.hidden_states import States
from edgespec.manifest import Parallel
from edgespec.runtimes.attention_bias import TreeLayout
from edgespec.runtimes.head_parts import HeadFolder, place_in_draft
from edgespec.runtimes.recurrent_head import MAX_UNREAD, RecurrentHead
from edgespec.runtimes.session import SessionOptions
from edgespec.types import Logits, TokenIds, append


class ParallelDecoder(ForwardingDecoder, Cache):
    """A model that drafts parallel.num_tokens tokens in a pass (PARD: An et al., arXiv:2504.18583).

    After the text at which a draft begins the row of a position does not depend on the tokens that were drafted
    before it. A draft that is longer goes on with a pass of its own, which reads the tokens of the first. Other
    rows are the model's own, and so are those of trees.
    """

    def __init__(self, decoder: Decoder, parallel: Parallel) -> None:
        super().__init__(decoder)
        self._parallel = parallel
        self._begun = np.zeros(0, np.int32)  # the text that the running pass drafts after; empty for none
        self._rows: Logits = np.zeros((0, decoder.vocab_size), np.float32)  # after it, [num_rows, vocab_size]
        self._num_wanted = parallel.num_tokens

    @property
    def can(self) -> Can:
        return self._decoder.can._replace(tokens_per_pass=self._parallel.num_tokens, best=False)

    def begin(self, tokens: TokenIds, num_tokens: int, max_unread: int | None = None) -> int:
        self._begun, self._rows = tokens, self._rows[:0]
        self._num_wanted = num_tokens
        return num_tokens

    def run(self, given: Pass) -> Rows:
        tokens, has_one_row = given.tokens, given.num_rows == 1 and not given.is_tree
        place = place_in_draft(self._begun, tokens, self.context_length) if has_one_row else None
        if place is None:
            return self._decoder.run(given)
        if place >= self._parallel.num_tokens:
            num_whole = place - place % self._parallel.num_tokens
            self.begin(tokens[: len(self._begun) + num_whole], self._num_wanted - num_whole)
            place -= num_whole
        if place >= len(self._rows):
            self._rows = self._draft(self._begun, max(self._num_wanted, place + 1))
        return Rows(self._rows[place : place + 1])

    @property
    def cache(self) -> Cache | None:
        return self if self._decoder.cache else None

    def pretend(self, tokens: TokenIds) -> None:
        if cache := self._decoder.cache:
            cache.pretend(tokens)

    def forget(self) -> None:
        self._begun = self._begun[:0]
        if cache := self._decoder.cache:
            cache.forget()

    def _draft(self, tokens: TokenIds, num_tokens: int) -> Logits:
        """Rows after a text, as many as wanted, as a pass gives, and as the context has room for."""
        num_rows = min(num_tokens, self._parallel.num_tokens, self.context_length - len(tokens) + 1)
        masks = np.full(num_rows - 1, self._parallel.mask_token_id, np.int32)
        # The decoder may overwrite its rows in another call of this thread.
        return self._decoder.logits(append(tokens, masks), num_rows).copy()


class ParallelHead(RecurrentHead):
    """A recurrent head that drafts several tokens in a pass, and has no trees (P-EAGLE: arXiv:2602.01469).

    The graph has a state for tokens that are given none. A draft begins after a text all of whose hidden states
    are known but for the newest token's, and ends with the pass. After that text a row does not depend on the
    tokens that were drafted before it.
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
        return place_in_draft(self._begun, tokens, len(self._masks) + 1)

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
