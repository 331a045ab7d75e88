"""What an answer's text is worth next to that of plain decoding: equal, near-tied, different, or nonsense."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from edgespec.decoders import Decoder
from edgespec.evaluation.document import Text
from edgespec.evaluation.exactness import width_difference
from edgespec.types import TokenIds, append

# Widths of passes whose logits are compared where two texts part.
# A token is plausible if the model finds it at most e times less likely than its best one. A runtime that rounds
# otherwise than we do writes such tokens alone; one that computes wrongly soon repeats itself, which any model
# finds likely, so only the beginning of its text is judged.
_PLAUSIBLE = 1.0
_NUM_JUDGED = 32
_LEAST_PLAUSIBLE = 0.8


class Plausible(NamedTuple):
    """How many tokens of an answer were judged, and how many of them the target finds plausible."""

    judged: int
    plausible: int

    @property
    def is_nonsense(self) -> bool:
        return self.plausible < _LEAST_PLAUSIBLE * self.judged


def compare_texts(target: Decoder, prompt: TokenIds, plain: Sequence[int], other: Sequence[int]) -> Text:
    """Whether two greedy answers are equal, part at a near-tie, or are different.

    A near-tie is a place where the width of a pass changes the distance between two likely tokens' logits by at
    least the distance of the two tokens at which the answers part.
    """
    if tuple(plain) == tuple(other):
        return "equal"
    first = next((i for i, (one, two) in enumerate(zip(plain, other, strict=False)) if one != two), None)
    if first is None:  # one goes on where the other has ended, and both were asked for as many tokens
        return "different"
    prefix = append(prompt, np.array(plain[:first], np.int32))
    row = target.logits(prefix, 1)[-1]
    margin = abs(float(row[plain[first]]) - float(row[other[first]]))
    return (
        "near_tie" if margin <= width_difference(target, prefix, (plain[first], other[first]), 2) else "different"
    )


def judge_tokens(target: Decoder, prompt: TokenIds, answer: Sequence[int]) -> Plausible:
    """How many of an answer's first tokens the target finds plausible, each after those before it."""
    tokens = np.array(answer[:_NUM_JUDGED], np.int32)
    if not len(tokens):
        return Plausible(0, 0)
    rows = target.logits(append(prompt, tokens[:-1]), len(tokens))
    chosen = rows[np.arange(len(tokens)), tokens]
    return Plausible(len(tokens), int((chosen >= rows.max(axis=1) - _PLAUSIBLE).sum()))
