"""Arrays that cross modules, closed sets of words, and the protocols of samplers and of what bounds an answer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

# Closed sets of words, which an editor completes.
Role = Literal["system", "user", "assistant"]
FinishReason = Literal["stop", "tool_calls", "length", "context", "cancelled", "timeout", "loop"]
Overflow = Literal["error", "drop-oldest"]
Precision = Literal["auto", "source", "fp32", "fp16", "int8", "int4", "w8a16"]
Schedule = Literal["serial", "pipelined", "hedged"]
ScheduleChoice = Literal["auto", "serial", "pipelined", "hedged"]
ToolChoice = Literal["auto", "none", "required"] | str | Mapping[str, Any]  # a text else names a tool

Report = Callable[[str], None]  # takes a line for the user
Array = npt.NDArray[Any]  # of whatever kind and shape
TokenIds = npt.NDArray[np.int32]  # [num_tokens]
Logits = npt.NDArray[np.float32]  # [num_rows, vocab_size]
Row = npt.NDArray[np.floating[Any]]  # [vocab_size]


class Range(NamedTuple):
    """The smallest and the largest value that were measured."""

    low: float
    high: float


class Distribution(NamedTuple):
    """Tokens with a chance to be sampled, after all processors; probabilities are weights divided by their sum."""

    ids: npt.NDArray[np.intp]  # [num_ids], rising
    weights: npt.NDArray[np.floating[Any]]  # [num_ids]

    @property
    def probs(self) -> npt.NDArray[np.floating[Any]]:
        """Probability of each of ids, [num_ids]; their sum is 1."""
        probs: npt.NDArray[np.floating[Any]] = self.weights / self.weights.sum()
        return probs

    def probability(self, token: int) -> float:
        place = int(np.searchsorted(self.ids, token))
        is_there = place < len(self.ids) and self.ids[place] == token
        return float(self.weights[place] / self.weights.sum()) if is_there else 0.0


class TokenMask(Protocol):
    """Which tokens may follow, as a pure function of the answer: each row of a pass is after another prefix.

    The rows of the target and of drafter models are masked alike, in several threads at once.
    """

    def __call__(self, answer: TokenIds) -> npt.NDArray[np.bool_] | None:
        """True for each token that may follow the answer so far, [vocab_size]; None where all may."""


class TokenConstraint(Protocol):
    """A form that an answer has to match, such as a JSON schema, and where it has to end.

    All is a pure function of the answer so far, which includes a beginning that was given. It is called in several
    threads at once.
    """

    def bias(self, answer: TokenIds) -> npt.NDArray[np.float32] | None:
        """0 for each token that may follow the answer and −∞ for any other, [vocab_size]; None where all may."""

    def forced(self, answer: TokenIds, max_tokens: int) -> TokenIds:
        """The tokens that follow the answer whatever a model says, at most max_tokens of them."""

    def num_allowed(self, answer: TokenIds, tokens: TokenIds) -> int:
        """How many of tokens may follow the answer, one after the other."""

    def has_ample_room(self, answer: TokenIds) -> bool:
        """True if any token that may follow leaves enough tokens to end the answer."""

    def leaves_room(self, answer: TokenIds, token: int) -> bool:
        """True if the answer can still end within its limit after a token that may follow; way_out's can."""

    def bounds_loop(self, answer: TokenIds, span_length: int) -> bool:
        """True if an answer that repeats its last tokens, so many, has to go on, or cannot do so for ever."""

    def way_out(self, answer: TokenIds) -> int:
        """The next token on the shortest known way to the end of the answer."""


class Sampler(Protocol):
    """The rule that chooses a token from one row of logits."""

    def __call__(self, logits: Row, tokens: TokenIds) -> int:
        """The token that follows tokens, [num_tokens], given its logits, [vocab_size]."""

    def distribution(self, logits: Row, tokens: TokenIds) -> Distribution:
        """The distribution that a call samples from, after all processors."""

    def least(self, logits: Row, tokens: TokenIds, token: int) -> float:
        """A lower bound of a token's probability; 0 where a bound takes as long to find as the probability."""

    def pick(self, distribution: Distribution, position: int) -> int:
        """A token sampled from a distribution with the noise of a position."""

    def uniform(self, position: int) -> float:
        """A number from 0 below 1 from the noise of a position."""

    def ranked(self, logits: Row, tokens: TokenIds, num_tokens: int) -> list[int]:
        """The token that a call gives, then the one that it would give without that token, and so on."""

    def apart(self, domain: int) -> "Sampler":
        """This rule with other noise, independent for each domain."""

    def drafting(self, domain: int) -> "Sampler":
        """The rule to draft with for rejection sampling, with the noise of apart(domain)."""


def append(tokens: Sequence[int] | TokenIds, more: Sequence[int] | TokenIds) -> TokenIds:
    """Tokens and more tokens, as one array."""
    return np.concatenate([np.asarray(tokens, np.int32), np.asarray(more, np.int32)])


def num_shared(one: TokenIds, other: TokenIds) -> int:
    """How many tokens two texts begin with alike."""
    num = min(len(one), len(other))
    differs = one[:num] != other[:num]
    return int(differs.argmax()) if differs.any() else num
