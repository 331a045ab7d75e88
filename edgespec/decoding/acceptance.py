"""Which drafted tokens the target accepts. Pure."""

from collections.abc import Callable, Iterator

import numpy as np

from edgespec.types import Logits, Row, TokenIds, Tree, append

Rule = Callable[[Row, TokenIds], int]  # a Sampler, as a function


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
    for node, parent in enumerate(draft.parents):
        if parent == row - 1 and draft.tokens[node] == token:
            return node + 1
    return None
