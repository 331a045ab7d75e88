"""A recorded target and a real drafter that take the time of given devices, under a virtual clock.

A target's greedy text and its hidden states do not depend on what drafts, so they are recorded once and replayed.
The drafter runs for real: its drafts are its own, and only what they take is stated.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from edgespec.decoding.decoder import Can, Decoder, ForwardingDecoder, Pass, Rows, reusable_prefix
from edgespec.decoding.hidden_states import HiddenStates, States
from edgespec.simulation.machines import Machine
from edgespec.simulation.schedules import VirtualLane
from edgespec.simulation.synthetic import PacedDecoder
from edgespec.system.clock import VirtualClock
from edgespec.types import Logits, TokenIds

# A pass beside a drafter is lengthened until what is missing is less than this share of it.
_NEGLIGIBLE = 1e-4


class RecordedAnswer(NamedTuple):
    """A target's own text.

    text: Prompt and answer.
    states: Hidden states behind its tokens, but for the last, [num_tokens - 1, width]; None where none are read.
    """

    category: str
    text: TokenIds
    num_prompt: int
    states: States | None = None

    @property
    def num_answered(self) -> int:
        return len(self.text) - self.num_prompt


class ReplayedTarget(Decoder):
    """A target that gives recorded answers, and keeps its hidden states of what it was given to read.

    A row is 1 at the token that the target chose for its place, and 0 elsewhere. Behind other tokens than the
    target's own a row means nothing, and no hidden state is kept.
    """

    num_fed = 0

    def __init__(self, vocab_size: int, context_length: int, hidden_states: HiddenStates | None = None) -> None:
        self.vocab_size, self.context_length = vocab_size, context_length
        self._store = hidden_states
        self._text: TokenIds = np.zeros(0, np.int32)

    def replay(self, answer: RecordedAnswer) -> None:
        """Replay this answer from now on, none of which is read yet."""
        self._text = answer.text
        if self._store is not None:
            assert answer.states is not None
            self._store.write(0, answer.states)
        self.hold(0)

    def hold(self, num_tokens: int) -> None:
        """Keep the hidden states of the first tokens alone."""
        if self._store is not None:
            self._store.hold(self._text[: min(num_tokens, len(self._text) - 1)])

    @property
    def can(self) -> Can:
        return Can(trees=True)

    def run(self, given: Pass) -> Rows:
        tokens, num_rows = given.tokens, given.num_rows
        if not given.is_tree:
            self.hold(reusable_prefix(self._text, tokens, 0))
            return Rows(self._rows(range(len(tokens) - num_rows + 1, len(tokens) + 1)))
        text, tree = given.text, given.tree
        path = tree.matching(self._text[len(text) :])
        self.hold(reusable_prefix(self._text, text, 0) + len(path))
        places = [len(text), *(len(text) + depth for depth in tree.depths)]
        return Rows(self._rows(places[-num_rows:]))

    def _rows(self, places: Sequence[int]) -> Logits:
        rows = np.zeros((len(places), self.vocab_size), np.float32)
        for row, place in zip(rows, places, strict=True):
            if place < len(self._text):
                row[self._text[place]] = 1.0
        return rows


@dataclass(slots=True)
class DraftPace:
    """What passes of a drafter take, and when it was at work.

    A pass over more tokens, as one that reads what was accepted, takes more by the machine's draft_ratios. On the
    target's own device each of the two has half of it while both work.

    own: The clock of the drafter's lane.
    """

    machine: Machine
    own: VirtualClock
    is_shared: bool
    is_beside: bool = False  # the target runs
    _spans: list[tuple[float, float]] = field(default_factory=list)

    def __call__(self, num_fed: int, num_rows: int) -> float:
        if not num_fed:  # a block of tokens that an earlier pass has drafted
            return 0.0
        alone_s = self.machine.draft_s * self.machine.draft_ratio(num_fed)
        taken_s = alone_s * (2 if self.is_shared and self.is_beside else 1)
        begun_s = self.own.now
        if self._spans and self._spans[-1][1] > begun_s:  # its pass was given up
            self._spans[-1] = (self._spans[-1][0], begun_s)
        self._spans.append((begun_s, begun_s + taken_s))
        return taken_s

    def lost_s(self, begun_s: float, ended_s: float) -> float:
        """What a pass of the target from begun_s on has lost to the drafter by ended_s."""
        if not self.is_shared:
            return 0.0
        self._spans = [span for span in self._spans if span[1] > begun_s]
        return sum(max(0.0, min(end, ended_s) - max(begin, begun_s)) for begin, end in self._spans) / 2


class PacedDrafter(PacedDecoder):
    """A drafter at the pace of a device; a drafting head stays one."""

    def begin(self, tokens: TokenIds, num_tokens: int, max_unread: int | None = None) -> int:
        return self._decoder.begin(tokens, num_tokens, max_unread)


class PacedTarget(ForwardingDecoder):
    """A target whose passes take what they take on another device, by the rows that they give.

    What a lane does in that time it does before the pass gives its hidden states, which are not known earlier.
    """

    def __init__(
        self, target: ReplayedTarget, pace: DraftPace, clock: VirtualClock, lane: VirtualLane | None = None
    ) -> None:
        super().__init__(target)
        self._target, self._pace, self._clock, self._lane = target, pace, clock, lane

    def run(self, given: Pass) -> Rows:
        self._pass_time(len(given.tree.tokens) + 1 if given.is_tree else given.num_rows)
        return self._target.run(given)

    def _pass_time(self, num_rows: int) -> None:
        begun_s, alone_s = self._clock.now, self._pace.machine.verify_s(num_rows)
        missing_s, self._pace.is_beside = alone_s, True
        while missing_s > _NEGLIGIBLE * alone_s:
            self._clock.sleep(missing_s)
            if self._lane:
                self._lane.steps()
            taken_s = self._clock.now - begun_s
            missing_s = alone_s + self._pace.lost_s(begun_s, self._clock.now) - taken_s
        self._pace.is_beside = False


def drafted_right(
    target: ReplayedTarget, answer: RecordedAnswer, guess: Callable[[TokenIds, int], Iterable[int]], longest: int
) -> list[int]:
    """For each place of an answer but the first and the last, how many tokens a draft there guesses right.

    Args:
        guess: The drafter's tokens behind a text, at most so many; none is asked for behind a wrong one.
        longest: The most tokens of a draft, which never reaches the last token: a pass gives one of its own.
    """
    target.replay(answer)
    found = []
    for place in range(answer.num_prompt + 1, len(answer.text)):
        target.hold(place - 1)  # the newest token is not run yet
        rest = answer.text[place : min(place + longest, len(answer.text) - 1)].tolist()
        num_right = 0
        for token, wanted in zip(guess(answer.text[:place], len(rest)) if rest else (), rest, strict=False):
            if token != wanted:
                break
            num_right += 1
        found.append(num_right)
    return found


def least_steps(num_right: Sequence[int], ratio: Callable[[int], float]) -> float:
    """The time of the fastest passes through an answer, where drafts are free and each has its best length.

    Args:
        num_right: By place, how many tokens a draft there guesses right; a pass over n of them yields n + 1.
        ratio: The time of a pass over so many drafted tokens, in steps.

    Returns:
        Steps from the first place to the end.
    """
    left = [0.0] * (len(num_right) + 1)
    for place in reversed(range(len(num_right))):
        left[place] = min(ratio(n) + left[place + n + 1] for n in range(num_right[place] + 1))
    return left[0]


def acceptance_by_position(answers: Sequence[Sequence[int]], longest: int) -> list[float]:
    """The share of tokens that are right at each position of a draft, where all before them are.

    Args:
        answers: What drafted_right gives of each answer.
    """
    rates = []
    for position in range(longest):
        # Of a place at distance d from the last one, d tokens could be guessed.
        tried = [
            num_right
            for each in answers
            for num_right, room in zip(each, range(len(each) - 1, -1, -1), strict=True)
            if num_right >= position and room > position
        ]
        if not tried:
            break
        rates.append(sum(num_right > position for num_right in tried) / len(tried))
    return rates
