"""Which drafted tokens the target keeps. Pure."""

import numpy as np

from edgespec.types import Logits, Sampler, TokenIds


def accept(sequence: TokenIds, num_draft: int, logits: Logits, sampler: Sampler) -> TokenIds:
    """The agreeing prefix of the draft, then one token of the target's own.

    Equality acceptance: a drafted token stays if the target, with the same noise, picks it too. The result
    is the same for any drafter (Daliri et al., arXiv:2408.07978).

    Args:
        sequence: The committed tokens, then the draft, [num_tokens + num_draft].
        num_draft: How many tokens at the end are guesses.
        logits: Target logits at each drafted position and one past them, [num_draft + 1, vocab_size].
        sampler: The rule that picks the target's token; it sees the prefix of each position.

    Returns:
        Between 1 and num_draft + 1 token ids.
    """
    committed = len(sequence) - num_draft
    emitted: list[int] = []
    for i in range(num_draft + 1):
        emitted.append(sampler(logits[i], sequence[: committed + i]))
        if i == num_draft or emitted[-1] != sequence[committed + i]:
            break
    return np.array(emitted, np.int32)
