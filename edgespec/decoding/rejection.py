"""Speculative sampling: drafted tokens are accepted by chance, so that the target's distribution comes out. Pure.

More of a draft is accepted than under equality. The price: the text for a seed depends on what was drafted, where
equality gives one text with any drafter.
"""

import numpy as np

from edgespec.decoding.acceptance import equality
from edgespec.types import Distribution, Logits, Sampler, TokenIds, Tree, append

# Domains of noise; drafts use positions and 0.
_DECISIONS, _CORRECTIONS = 2**63, 2**63 + 1


def rejection(tokens: TokenIds, draft: Tree, logits: Logits, sampler: Sampler) -> TokenIds:
    """The part of the draft that is accepted under the target's distribution p, then one token of its own.

    A token x sampled from q is accepted with probability min(1, p(x)/q(x)); the first that is not is replaced by a
    sample from the part of p that q lacks (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318).
    Where a drafter is certain, that is to sample from p and compare, so a draft without distributions, tree or
    chain, is judged by equality. Greedy distributions have one token each, so nothing is left to chance.

    Args:
        tokens: The committed tokens, [num_tokens].
        draft: The guess, sampled with noise independent of sampler's own and of the two domains here.
        logits: Target logits after the last committed token and after each drafted one,
            [num_draft + 1, vocab_size].
        sampler: The target's rule, given the prefix of each position.

    Returns:
        Between 1 and num_draft + 1 token ids.
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
