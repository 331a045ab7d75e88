"""How often the tokens of one drafter model are accepted, by position and by how sure it was of them.

Also what comes true where they are not.
"""

from dataclasses import dataclass
from math import exp, floor, log

from edgespec.decoding.decoder import reusable_prefix
from edgespec.decoding.tree import Tree
from edgespec.draft.acceptance_rates import AcceptanceRates, position_bucket
from edgespec.draft.draft_model import HOPE
from edgespec.draft.limits import MAX_OTHERS
from edgespec.types import TokenIds

_LEAST = 1e-6
_PER_RANK = 8  # classes of first choices, and as many of the next best ones
NUM_CLASSES = 2 * _PER_RANK


def confidence_class(probability: float, *, is_first: bool) -> int:
    """The class of a guess, by the log-odds of its probability in steps of 1.

    Args:
        probability: The drafter's own.
        is_first: It was the drafter's choice, which noise may have made; else one of the next best.
    """
    bounded = min(max(probability, _LEAST), 1 - _LEAST)
    step = floor(log(bounded / (1 - bounded))) + _PER_RANK // 2
    return min(max(step, 0), _PER_RANK - 1) + (0 if is_first else _PER_RANK)


def typical_probability(confidence: int) -> float:
    """The probability in the middle of a class."""
    return 1 / (1 + exp(_PER_RANK // 2 - confidence % _PER_RANK - 0.5))


# Tokens that a class of confidence starts with, of which the drafter's own probability is believed.
_BELIEVED = 6.0


# By the name of a drafter, sources that are counted beside its drafts; part of the file format of learned stats.
alternatives_key = "{}, prepared".format  # whether an alternative was prefetched where a guess was wrong
others_key = "{}, others".format  # its next best choices, by rank
nodes_key = "{}, nodes".format  # the nodes of its trees, by confidence


@dataclass(frozen=True, slots=True)
class ModelRates:
    """The part of all acceptance rates that is about one drafter model."""

    rates: AcceptanceRates
    drafter: str

    def assume_hope(self) -> None:
        """Start from hopeful rates, as the user chose this model, until tokens of it were judged."""
        for source in (self.drafter, alternatives_key(self.drafter), others_key(self.drafter)):
            self.rates.assume(source, HOPE)
        for confidence in range(NUM_CLASSES):
            accepted = _BELIEVED * typical_probability(confidence)
            self.rates.assume(nodes_key(self.drafter), (accepted, _BELIEVED), confidence)

    @property
    def num_judged(self) -> float:
        return self.rates.counts(self.drafter)[1]

    @property
    def prefetched(self) -> float:
        """The chance that an alternative was prefetched where a guess is wrong."""
        return self.rates.rate(alternatives_key(self.drafter), 0)

    def chain(self, num_tokens: int) -> list[float]:
        """By position, the chance that a token is accepted if all before it are."""
        return self.rates.rates(self.drafter, [*map(position_bucket, range(num_tokens))])

    def others(self) -> list[float]:
        """By rank, the chance that a next best choice is right where the better ones are wrong."""
        return [self.rates.rate(others_key(self.drafter), rank) for rank in range(MAX_OTHERS)]

    def nodes(self) -> list[float]:
        """By class of confidence, the chance that a guess is right if those before it are."""
        return self.rates.rates(nodes_key(self.drafter), range(NUM_CLASSES))

    def observe_prefetched(self, is_ready: bool) -> None:
        self.rates.observe(alternatives_key(self.drafter), 0, is_ready)

    def observe_next(self, past: Tree, emitted: TokenIds) -> None:
        """Judge the guess for the token that the target put after a draft, all of which it accepted."""
        position = len(emitted) - 1
        self.rates.observe(
            self.drafter, position_bucket(position), bool(past.tokens[position] == emitted[position])
        )

    def observe_miss(self, past: Tree, emitted: TokenIds) -> None:
        """Learn how often the next best choices come true where a guess does not."""
        num_right = reusable_prefix(past.tokens, emitted, 0)
        if num_right == min(len(past.tokens), len(emitted)) or not past.others:
            return
        others, token = past.others[num_right], int(emitted[num_right])
        for rank in range(others.index(token) if token in others else len(others)):
            self.rates.observe(others_key(self.drafter), rank, False)
        if token in others:
            self.rates.observe(others_key(self.drafter), others.index(token), True)
