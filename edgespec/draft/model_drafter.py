"""Drafting with a small model."""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import islice
from time import perf_counter
from typing import NamedTuple

import numpy as np

from edgespec.decoding.acceptance import Acceptance, equality
from edgespec.decoding.decoder import Decoder, ForwardingDecoder, Pass, Rows
from edgespec.decoding.scheduler import speculative_decode
from edgespec.decoding.tree import NO_DRAFT, Tree, Worth
from edgespec.draft.acceptance_rates import position_bucket
from edgespec.draft.drafter import Drafter, DrafterCan, DraftRequest
from edgespec.draft.limits import MAX_OTHERS
from edgespec.draft.model_rates import confidence_class
from edgespec.draft.speculation import Speculation
from edgespec.errors import UsageError
from edgespec.system.clock import Clock
from edgespec.types import Distribution, Logits, Row, Sampler, TokenIds, append


class Guess(NamedTuple):
    """A token that a step drafts.

    probability: The drafter's own, where the request has a min_probability or wants a tree.
    distribution: The distribution that the token was sampled from, where the request wants it.
    others: The next best choices in its place, the best first, where the request has a worth.
    other_probabilities: The drafter's own of these, where the request wants a tree.
    """

    token: int
    probability: float = 1.0
    distribution: Distribution | None = None
    others: tuple[int, ...] = ()
    other_probabilities: tuple[float, ...] = ()


def step_of(guesses: Sequence[Guess], tips: Sequence[int], chances: Sequence[float] | None = None) -> Tree:
    """Guesses as the tree by which a tree grows, each after one of its nodes."""
    distributions = tuple(guess.distribution for guess in guesses if guess.distribution is not None)
    return Tree(
        np.array([guess.token for guess in guesses], np.int32),
        parents=tuple(tips),
        distributions=distributions or None,
        chances=tuple(chances or [1.0] * len(guesses)),
        others=tuple(guess.others for guess in guesses),
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
    clock: Clock = perf_counter

    @property
    def can(self) -> DrafterCan:
        able = self.decoder.can
        return DrafterCan(
            is_free=False,
            trees=self.respell is None,
            tokens_per_step=able.tokens_per_pass,
            max_unread=able.max_unread,
        )

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        if request.num_tokens < 1 or not self.can_read(tokens) or request.cancel.is_set():
            return NO_DRAFT
        worth = request.worth
        if worth is not None and worth.is_of_trees and self.can.trees and not request.with_distributions:
            return self._draft_tree(tokens, request, worth, sampler)
        # Of a draft of one token the probability decides nothing: the draft ends behind it.
        min_probability = request.min_probability if request.num_tokens > 1 else 0.0
        request = replace(request, worth=None, min_probability=min_probability)
        reached, chain = 1.0, NO_DRAFT
        with closing(self.guesses(tokens, request, sampler)) as guesses:
            for guess in guesses:
                reached *= guess.probability
                chain = chain.grown(step_of([guess], [len(chain.tokens) - 1], [reached]))
                if reached < min_probability or request.cancel.is_set():
                    break
        draft = self.chain_draft(chain, request)
        if not min_probability or request.with_distributions or self.respell:
            return draft
        return draft._replace(chances=chain.chances)

    def chain_draft(self, chain: Tree, request: DraftRequest) -> Tree:
        """A draft of the first request.num_tokens guesses of a chain."""
        chain = chain.cut(request.num_tokens)
        if self.respell and not request.with_distributions:
            respelled = self.respell(chain.tokens.tolist())
            chain = chain._replace(tokens=np.array(respelled, np.int32))
        buckets = tuple(map(position_bucket, range(len(chain.tokens))))
        distributions = chain.distributions if request.with_distributions else None
        return Tree(chain.tokens, buckets, distributions=distributions, source=self.name)

    def _draft_tree(self, tokens: TokenIds, request: DraftRequest, worth: Worth, sampler: Sampler) -> Tree:
        """All guesses of the steps that are worth their time; of a decoder without trees, of a chain's steps."""
        has_branches = self.decoder.can.trees and self.can.tokens_per_step == 1 and not self.speculation
        deepest = min(request.num_tokens, self.decoder.context_length - len(tokens))
        tree = NO_DRAFT._replace(source=self.name)
        with closing(self.guesses(tokens, replace(request, num_tokens=deepest), sampler)) as chain:
            while (tips := tree.tips(worth, deepest, has_branches=has_branches)) and not request.cancel.is_set():
                if has_branches:
                    found = self.guesses_after(tokens, tree, tips, request, sampler)
                else:
                    found = list(islice(chain, 1))
                if not found:
                    break
                tree = tree.grown(next_choices(tree, tips, found, worth))
        return tree

    def expect_drafts(self, is_expected: bool) -> bool:
        return self.decoder.expect_drafts(is_expected)

    def can_read(self, tokens: TokenIds) -> bool:
        """True if the model has all tokens of a text, and room for one more."""
        has_tokens = not len(tokens) or int(tokens.max()) < self.decoder.vocab_size
        return has_tokens and len(tokens) < self.decoder.context_length

    def guesses(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Generator[Guess, None, None]:
        """Drafted tokens one by one, request.num_tokens at most, while one of the drafter's may follow."""
        num_tokens = min(request.num_tokens, self.decoder.context_length - len(tokens))
        num_tokens = self.decoder.begin(tokens, num_tokens, request.max_unread)
        if num_tokens < 1:
            return
        with suppress(UsageError):
            if self.speculation:
                yield from self._speculated(tokens, num_tokens, request, sampler, self.speculation)
                return
            text = tokens
            for _ in range(num_tokens):
                rows = self.decoder.run(Pass(text, num_prompt=len(tokens)))
                row = rows.logits[0, : self.vocab_size]
                q = sampler.distribution(row, text) if request.with_distributions else None
                token = sampler(row, text) if q is None else sampler.pick(q, len(text))
                yield _guess(row, token, q, text, request, sampler, rows.confidence)
                text = append(text, [token])

    def _speculated(
        self, tokens: TokenIds, num_tokens: int, request: DraftRequest, sampler: Sampler, speculation: Speculation
    ) -> Generator[Guess, None, None]:
        """num_tokens drafted tokens one by one, for which others draft in turn."""
        own, policy = _TrimmedDecoder(self.decoder, self.vocab_size), speculation.policy(clock=self.clock)
        distributions: list[Distribution] = []
        accept = _equality_with(distributions) if request.with_distributions else equality
        text = tokens
        try:
            for block in speculative_decode(tokens, own, sampler, policy, accept, num_tokens, clock=self.clock):
                for place, (token, row) in enumerate(zip(block.tokens, block.logits, strict=False)):
                    q = distributions[len(text) - len(tokens)] if distributions else None
                    confidence = block.confidence if place == block.num_draft else None
                    yield _guess(row, int(token), q, text, request, sampler, confidence)
                    text = append(text, [token])
                    if len(text) - len(tokens) >= num_tokens:
                        return
        finally:
            speculation.learn_from(policy)

    def guesses_after(
        self, tokens: TokenIds, tree: Tree, tips: Sequence[int], request: DraftRequest, sampler: Sampler
    ) -> list[Guess]:
        """The next token after each of tips, from one pass of a tree decoder over what it has run, and tips.

        None where after one of them no token of the drafter's may follow.

        tips: Nodes of a tree after tokens that nothing was drafted after; -1 for the text.
        """
        run = [*tree.nodes_run, *(tip for tip in tips if tip >= 0)]
        places, tree = [run.index(tip) if tip >= 0 else -1 for tip in tips], tree.select(run)
        if not self.decoder.begin(tokens, len(run) + 1, request.max_unread):
            return []
        # Tips are mostly the newest nodes, so that a cache has run the others already.
        first = min(places)
        rows = self.decoder.run(Pass(tokens, tree, len(run) - first)).logits[:, : self.vocab_size]
        guesses = []
        with suppress(UsageError):
            for place in places:
                row, text = rows[place - first], append(tokens, tree.tokens[tree.path(place)])
                q = sampler.distribution(row, text) if request.with_distributions else None
                token = sampler(row, text) if q is None else sampler.pick(q, len(text))
                guesses.append(_guess(row, token, q, text, request, sampler))
            return guesses
        return []


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
    worth = request.worth
    ranked = sampler.ranked(row, text, MAX_OTHERS + 1) if worth else []
    others = tuple(other for other in ranked if other != token)[:MAX_OTHERS]
    is_sure_of_all = worth is not None and worth.is_of_trees
    if not request.min_probability and not is_sure_of_all:
        return Guess(token, 1.0, q, others)
    first, *rest = _chances(row, [token, *others] if is_sure_of_all else [token], confidence)
    return Guess(token, first, q, others, other_probabilities=tuple(rest))


class _TrimmedDecoder(ForwardingDecoder):
    """A decoder without the rows that pad its vocabulary."""

    def __init__(self, decoder: Decoder, vocab_size: int) -> None:
        super().__init__(decoder)
        self.vocab_size = vocab_size

    def run(self, given: Pass) -> Rows:
        rows = self._decoder.run(given)
        return rows._replace(logits=rows.logits[:, : self.vocab_size])


def _chances(row: Row, tokens: list[int], confidence: float | None) -> list[float]:
    """The chances that tokens are accepted: of the first by the drafter's own estimate, if it has one."""
    # At temperature 1: about the acceptance rate (docs/log/draft-policy.md).
    best = row.max()
    found: list[float] = (np.exp(row[tokens] - best) / np.exp(row - best).sum()).tolist()
    if confidence is not None:
        found[0] = min(1.0, max(0.0, confidence))
    return found


def next_choices(tree: Tree, tips: Sequence[int], guesses: Sequence[Guess], worth: Worth) -> Tree:
    """The guesses of a step after tips, each with its next best choices, in classes of confidence."""
    tokens, classes, parents, chances = list[int](), list[int](), list[int](), list[float]()
    for tip, guess in zip(tips, guesses, strict=True):
        reached, chance = 1.0 if tip < 0 else tree.chances[tip], 1.0
        probabilities = (guess.probability, *guess.other_probabilities)
        for rank, probability in enumerate(probabilities):
            classes.append(confidence_class(probability, is_first=rank == 0))
            # A next best choice never counts as likelier than a better one.
            chance = min(chance, worth.chances[classes[-1]])
            chances.append(reached * chance)
        tokens += (guess.token, *guess.others)
        parents += [tip] * len(probabilities)
    ids = np.array(tokens, np.int32)
    return Tree(ids, tuple(classes), tuple(parents), chances=tuple(chances), steps=(len(tips),))
