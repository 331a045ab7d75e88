"""Which drafted tokens the target accepts: by equality, or by speculative sampling. Pure.

Speculative sampling accepts drafted tokens by chance, so that the target's distribution comes out. More of a
draft is accepted than under equality. The price: the text for a seed depends on what was drafted, where equality
gives one text with any drafter.
"""

from collections.abc import Callable, Iterator

import numpy as np

from edgespec.decoding.tree import Tree
from edgespec.types import Distribution, Logits, Row, Sampler, TokenIds, append

Rule = Callable[[Row, TokenIds], int]  # a Sampler, as a function

Acceptance = Callable[[TokenIds, Tree, Logits, Sampler], TokenIds]
"""Committed tokens, a draft, and target logits, [num_draft + 1, vocab_size] → the tokens that are emitted."""


def equality(tokens: TokenIds, draft: Tree, logits: Logits, sampler: Rule) -> TokenIds:
    """The agreeing part of the draft, then one token of the target's own.

    A drafted token is accepted if the target, with the same noise, chooses it too, so the result is the same for
    any drafter (Daliri et al., arXiv:2408.07978). In a tree that is the branch that agrees.

    Args:
        tokens: The committed tokens, [num_tokens].
        draft: The guess.
        logits: Target logits after the last committed token and after each drafted one,
            [num_draft + 1, vocab_size].
        sampler: The rule that chooses the target's token, given the prefix of each position.

    Returns:
        Between 1 and num_draft + 1 token ids.
    """
    emitted = _of_chain(tokens, draft, logits, sampler)
    row = row_after(draft, 0, emitted[-1]) if draft.parents is not None else None
    while row is not None:
        emitted.append(sampler(logits[row], append(tokens, emitted)))
        row = row_after(draft, row, emitted[-1])
    return np.array(emitted, np.int32)


def _of_chain(tokens: TokenIds, draft: Tree, logits: Logits, sampler: Rule) -> list[int]:
    """The accepted tokens of a chain and the target's own; of a tree the token after the text alone."""
    emitted = [sampler(logits[0], tokens)]
    if draft.parents is not None or not len(draft.tokens) or emitted[0] != draft.tokens[0]:
        return emitted
    # What is accepted of a chain is its beginning, so one copy of the text serves for all of it.
    text, start = append(tokens, draft.tokens), len(tokens)
    for row, guess in enumerate([*draft.tokens[1:].tolist(), None], 1):
        emitted.append(sampler(logits[row], text[: start + row]))
        if emitted[-1] != guess:
            break
    return emitted


def rows_of(draft: Tree, emitted: TokenIds) -> Iterator[int]:
    """The row of logits from which each emitted token was chosen."""
    row: int | None = 0
    for token in emitted.tolist():
        assert row is not None
        yield row
        row = row_after(draft, row, token)


def row_after(draft: Tree, row: int, token: int) -> int | None:
    """The row of logits after token, if the draft holds token after the token of row."""
    if draft.parents is None:
        return row + 1 if row < len(draft.tokens) and draft.tokens[row] == token else None
    return next((node + 1 for node in draft.children(row - 1) if draft.tokens[node] == token), None)


# Domains of noise; drafts use positions and 0.
_DECISIONS, _CORRECTIONS = 2**63, 2**63 + 1


def rejection(tokens: TokenIds, draft: Tree, logits: Logits, sampler: Sampler) -> TokenIds:
    """The part of the draft that is accepted under the target's distribution p, then one token of its own.

    A token x sampled from q is accepted with probability min(1, p(x)/q(x)); the first that is not is replaced by a
    sample from the part of p that q lacks (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318).
    Where a drafter is certain, that is to sample from p and compare, so a draft without distributions, tree or
    chain, is judged by equality. Greedy distributions have one token each, so nothing is left to chance.

    Arguments and result are those of equality, but for the noise of the draft: it is independent of sampler's own
    and of the two domains here.
    """
    if draft.distributions is None:
        return equality(tokens, draft, logits, sampler)
    decisions, prefix = sampler.apart(_DECISIONS), tokens
    for row, token, q in zip(logits, draft.tokens, draft.distributions, strict=False):
        drafted = q.probability(int(token))
        assert drafted > 0, f"token {token} cannot have been sampled from its distribution"
        wanted = decisions.uniform(len(prefix)) * drafted
        if wanted >= sampler.least(row, prefix, int(token)):  # a lower bound, which mostly decides
            p = sampler.distribution(row, prefix)
            if wanted >= p.probability(int(token)):
                correction = sampler.apart(_CORRECTIONS).pick(residual(p, q), len(prefix))
                return append(prefix, [correction])[len(tokens) :]
        prefix = append(prefix, [token])
    bonus = sampler.pick(sampler.distribution(logits[-1], prefix), len(prefix))
    return append(prefix, [bonus])[len(tokens) :]


def residual(p: Distribution, q: Distribution) -> Distribution:
    """max(0, p − q), from which the target samples once a draft from q was refused; p where nothing is left."""
    places = np.minimum(np.searchsorted(p.ids, q.ids), len(p.ids) - 1)
    is_shared = p.ids[places] == q.ids
    shared = places[is_shared]
    total, left = p.weights.sum(), p.weights.copy()
    left[shared] = total * np.maximum(0.0, left[shared] / total - q.probs[is_shared])
    return Distribution(p.ids, left) if left.any() else p
