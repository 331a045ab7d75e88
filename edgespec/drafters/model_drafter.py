"""Drafting with a small model."""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from time import perf_counter

import numpy as np

from edgespec.decoders import (
    BlockDraftDecoder,
    BoundedDraftDecoder,
    ConfidentDecoder,
    Decoder,
    DraftDecoder,
    ForwardingDecoder,
    Interruptible,
    RecentDraftDecoder,
    TreeDecoder,
)
from edgespec.decoding import trees
from edgespec.decoding.acceptance import equality
from edgespec.decoding.scheduler import DraftPolicy, Plain, speculative_decode
from edgespec.drafters.draft_tree import DraftTree
from edgespec.drafters.guess import Guess
from edgespec.policy.acceptance_rates import position_bucket
from edgespec.policy.limits import MAX_OTHERS
from edgespec.policy.speculation import Speculation
from edgespec.system.clock import Clock
from edgespec.types import (
    NO_DRAFT,
    Acceptance,
    Distribution,
    Drafter,
    DraftRequest,
    Logits,
    Row,
    Sampler,
    TokenIds,
    Tree,
    TreeWorth,
    append,
)


@dataclass(frozen=True, slots=True)
class ModelDrafter(Drafter):
    """A small model that decodes with the target's own sampler and noise.

    It is decoded by speculative_decode as a target is, so it may have drafters of its own: a cascade. It stops
    after the token at which the product of its probabilities falls below request.min_probability; without that
    token rejection sampling would be biased.

    vocab_size: The target's. A drafter padded to more rows never drafts a token beyond it, and drafts nothing
        where the text holds a token that the drafter does not have.
    speculation: Drafts for this model.
    respell: Turns guesses into other tokens with the text of these; unused where a request wants distributions.
    clock: By which its passes are timed for its own drafts.
    """

    decoder: Decoder
    vocab_size: int
    name: str = "model"
    speculation: Speculation | None = None
    respell: Callable[[list[int]], list[int]] | None = None
    is_free: bool = False
    clock: Clock = perf_counter

    @property
    def tokens_per_step(self) -> int:
        return self.decoder.tokens_per_pass if isinstance(self.decoder, BlockDraftDecoder) else 1

    @property
    def max_unread(self) -> int | None:
        return self.decoder.max_unread if isinstance(self.decoder, RecentDraftDecoder) else None

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        if request.num_tokens < 1 or not self.can_read(tokens) or request.cancel.is_set():
            return NO_DRAFT
        if request.tree is not None:
            if not self.respell and not request.with_distributions:
                return self._draft_tree(tokens, request, request.tree, sampler)
            request = replace(request, num_tokens=min(request.num_tokens, request.tree.chain_length))
        reached, chain = 1.0, []
        with closing(self.guesses(tokens, request, sampler)) as guesses:
            for guess in guesses:
                chain.append(guess)
                reached *= guess.probability
                if reached < request.min_probability or request.cancel.is_set():
                    break
        return self.chain_draft(chain, request)

    def chain_draft(self, chain: Sequence[Guess], request: DraftRequest) -> Tree:
        """A draft of the first request.num_tokens guesses of a chain."""
        chain, distributions = chain[: request.num_tokens], None
        tokens = [guess.token for guess in chain]
        if request.with_distributions:
            distributions = tuple(guess.distribution for guess in chain if guess.distribution is not None)
        elif self.respell:
            tokens = self.respell(tokens)
        buckets = tuple(map(position_bucket, range(len(tokens))))
        return Tree(np.array(tokens, np.int32), buckets, distributions=distributions, source=self.name)

    def _draft_tree(self, tokens: TokenIds, request: DraftRequest, worth: TreeWorth, sampler: Sampler) -> Tree:
        """The nodes of a tree that are worth their rows; of a decoder without trees, of a chain and beside it."""
        has_branches = isinstance(self.decoder, TreeDecoder) and self.tokens_per_step == 1 and not self.speculation
        max_depth = min(request.num_tokens, self.decoder.context_length - len(tokens))
        request = replace(request, num_tokens=max_depth, num_others=MAX_OTHERS)
        tree = DraftTree(worth, max_depth, has_branches=has_branches)
        with closing(self.guesses(tokens, request, sampler)) as chain:
            while (tips := tree.choose()) and not request.cancel.is_set():
                if has_branches:
                    found = self.tree_guesses(tokens, tree.run, tips, request, sampler)
                else:
                    found = list(islice(chain, 1))
                if not found:
                    break
                tree.add(found)
        return tree.draft(self.name)

    def can_read(self, tokens: TokenIds) -> bool:
        """Whether the model has all tokens of a text, and room for one more."""
        has_tokens = not len(tokens) or int(tokens.max()) < self.decoder.vocab_size
        return has_tokens and len(tokens) < self.decoder.context_length

    def guesses(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Generator[Guess, None, None]:
        """Drafted tokens one by one, request.num_tokens at most."""
        num_tokens = min(request.num_tokens, self.decoder.context_length - len(tokens))
        num_tokens = self._begin(tokens, num_tokens)
        if num_tokens < 1:
            return
        own = _TrimmedDecoder(self.decoder, self.vocab_size)
        # Asked once a draft: each name of the protocol is looked up, which takes as long as much of a guess.
        confident = self.decoder if isinstance(self.decoder, ConfidentDecoder) else None
        policy: DraftPolicy = self.speculation.policy(clock=self.clock) if self.speculation else Plain()
        distributions: list[Distribution] = []
        accept = _equality_with(distributions) if request.with_distributions else equality
        text = tokens
        try:
            for block in speculative_decode(tokens, own, sampler, policy, accept, num_tokens, clock=self.clock):
                for token, row in zip(block.tokens, block.logits, strict=False):
                    q = distributions[len(text) - len(tokens)] if distributions else None
                    confidence = None if confident is None else confident.confidence
                    yield _guess(row, int(token), q, text, request, sampler, confidence)
                    text = append(text, [token])
                    if len(text) - len(tokens) >= num_tokens:
                        return
        finally:
            if self.speculation:
                self.speculation.learn_from(policy)

    def tree_guesses(
        self, tokens: TokenIds, tree: Sequence[Guess], tips: Sequence[int], request: DraftRequest, sampler: Sampler
    ) -> list[Guess]:
        """The next token after each of tips, nodes of a tree after tokens, from one pass of a tree decoder.

        Args:
            tips: Indices of nodes; -1 for the text.
        """
        assert isinstance(self.decoder, TreeDecoder)
        if not self._begin(tokens, len(tree) + 1):
            return []
        nodes, parents = np.array([guess.token for guess in tree], np.int32), [guess.after for guess in tree]
        # Tips are mostly the newest nodes, so that a cache has run the others already.
        first = min(tips)
        num_last = len(tree) - first if first >= 0 else None
        rows = self.decoder.tree_logits(tokens, nodes, parents, num_last)[:, : self.vocab_size]
        texts = [append(tokens, nodes[trees.path(parents, tip)]) for tip in tips]
        guesses = []
        for tip, text in zip(tips, texts, strict=True):
            row = rows[tip - max(first, -1)]
            q = sampler.distribution(row, text) if request.with_distributions else None
            token = sampler(row, text) if q is None else sampler.pick(q, len(text))
            guesses.append(_guess(row, token, q, text, request, sampler)._replace(after=tip))
        return guesses

    def _begin(self, tokens: TokenIds, num_tokens: int) -> int:
        """How many of num_tokens tokens the decoder can draft after a text."""
        if isinstance(self.decoder, DraftDecoder) and not self.decoder.begin(tokens, num_tokens):
            return 0
        if isinstance(self.decoder, BoundedDraftDecoder):
            return min(num_tokens, self.decoder.max_draft_tokens)
        return num_tokens

    def interrupt(self) -> None:
        """End the running pass with an error, if the decoder can."""
        if isinstance(self.decoder, Interruptible):
            self.decoder.interrupt()


def _equality_with(distributions: list[Distribution]) -> Acceptance:
    """Acceptance by equality that appends the distribution of each token."""

    def accept(tokens: TokenIds, draft: Tree, logits: Logits, sampler: Sampler) -> TokenIds:
        def sample(row: Row, text: TokenIds) -> int:
            distributions.append(sampler.distribution(row, text))
            return sampler.pick(distributions[-1], len(text))

        return equality(tokens, draft, logits, sample)

    return accept


def _guess(
    row: Row,
    token: int,
    q: Distribution | None,
    text: TokenIds,
    request: DraftRequest,
    sampler: Sampler,
    confidence: float | None = None,
) -> Guess:
    ranked = sampler.ranked(row, text, request.num_others + 1) if request.num_others else []
    others = tuple(other for other in ranked if other != token)[: request.num_others]
    if not request.min_probability and request.tree is None:
        return Guess(token, 1.0, q, others)
    first, *rest = _chances(row, [token, *others] if request.tree else [token], confidence)
    return Guess(token, first, q, others, other_probabilities=tuple(rest))


class _TrimmedDecoder(ForwardingDecoder):
    """A decoder without the rows that pad its vocabulary."""

    def __init__(self, decoder: Decoder, vocab_size: int) -> None:
        super().__init__(decoder)
        self.vocab_size = vocab_size

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        return self._decoder.logits(tokens, num_last)[:, : self.vocab_size]


def _chances(row: Row, tokens: list[int], confidence: float | None) -> list[float]:
    """The chances that tokens are accepted: of the first by the drafter's own estimate, if it has one."""
    # At temperature 1: about the acceptance rate (docs/log/draft-policy.md).
    best = row.max()
    found: list[float] = (np.exp(row[tokens] - best) / np.exp(row - best).sum()).tolist()
    if confidence is not None:
        found[0] = min(1.0, max(0.0, confidence))
    return found
