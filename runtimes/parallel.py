"""Decoders that draft several tokens in one pass (PARD: An et al., arXiv:2504.18583).

After a text a parallel drafter model runs mask tokens, each in the place of a token that is not known yet, and
gives the row of each. An ordinary cache serves: what mask tokens leave in it is no prefix of any text.
"""

import numpy as np

from edgespec.decoding.decoder import Cache, Can, Decoder, ForwardingDecoder, Pass, Rows
from edgespec.manifest import Parallel
from edgespec.types import Logits, TokenIds, append


class ParallelDecoder(ForwardingDecoder, Cache):
    """A model that drafts parallel.num_tokens tokens in one pass after the text at which a draft begins.

    After that text the row of a position does not depend on the tokens that were drafted before it. A draft that
    is longer goes on with a pass of its own, which reads the tokens of the first. Other rows are the model's own,
    and so are those of trees.
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
        tokens = given.tokens
        place = len(tokens) - len(self._begun)
        is_draft = given.num_rows == 1 and not given.is_tree and place >= 0 and len(self._begun) > 0
        if not is_draft or not np.array_equal(tokens[: len(self._begun)], self._begun):
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
