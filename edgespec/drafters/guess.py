"""A token that a drafter model guesses."""

from typing import NamedTuple

from edgespec.types import Distribution


class Guess(NamedTuple):
    """A drafted token.

    probability: The drafter's own, where the request has a min_probability or wants a tree.
    distribution: The distribution that the token was sampled from, where the request wants it.
    others: The next best choices for its position, the best first, as many as the request wants.
    after: Index of the guess that it follows; -1 for the text.
    other_probabilities: The drafter's own of the others, where the request wants a tree.
    """

    token: int
    probability: float = 1.0
    distribution: Distribution | None = None
    others: tuple[int, ...] = ()
    after: int = -1
    other_probabilities: tuple[float, ...] = ()
