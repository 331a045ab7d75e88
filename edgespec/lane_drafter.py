"""A model that drafts in a lane of its own, and goes on drafting there while the target verifies.

What it has drafted is a tree that hangs on a text: where the target's tokens run through it, what lies beyond them
still serves, and where they leave it the lane starts anew. So the schedule that works in both lanes at once is the
loop of one lane over such a drafter, with this tree carried over from round to round.

Knows nothing of what drafting costs: how far ahead, and how long to wait, is the gate's affair.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from threading import Lock
from typing import Any

import numpy as np

from edgespec.cancel import Flag
from edgespec.drafters import Guess, ModelDrafter, drafted
from edgespec.errors import DrafterFault
from edgespec.hedges import Hedges, Step
from edgespec.lanes import Job, Lane
from edgespec.pipeline import ahead_of
from edgespec.timeline import DRAFT, DRAFT_AHEAD, HEDGE
from edgespec.types import NOTHING, Ask, Draft, Logits, Sampler, TokenIds, append

DEADLINE_S = 30.0


@dataclass(slots=True)
class LaneDrafter:
    """A Drafter; draft() has the lane work and waits, follow() does not wait.

    can_run_ahead: The lane may go on between two drafts; otherwise it drafts only while the target waits.
    hedges: What it prepares beside the likeliest continuation while the target verifies.
    deadline_s: An answer that takes longer is a fault.
    """

    drafter: ModelDrafter
    lane: Lane
    can_run_ahead: bool = False
    hedges: Hedges | None = None
    deadline_s: float = DEADLINE_S
    is_free: bool = False
    _text: TokenIds | None = None  # what the lane's tree hangs on
    _tree: "_Tree" = field(default_factory=lambda: _Tree())
    _limit: int = 0  # how long text and tree may become together
    _verified: int | None = None  # tokens that the target now verifies, once it does
    _taken_s: tuple[list[float], float] = field(default_factory=lambda: ([], 0.0))  # as taken_s() is to tell
    _num_timed: int = 0  # steps of the job that are in there
    _is_cold: bool = True  # the first step of the job reads more than what was told since the last one
    _lock: Lock = field(default_factory=Lock)

    @property
    def name(self) -> str:
        return self.drafter.name

    @property
    def num_outcomes(self) -> int:
        return self.hedges.budget if self.hedges else 0

    def draft(self, tokens: TokenIds, ask: Ask, sampler: Sampler) -> Draft:
        """A draft of no token at most says that the target now works without one.

        Raises:
            DrafterFault: The lane failed, or has not answered in time.
        """
        if not self.drafter.knows(tokens):
            return NOTHING
        with self._lock:
            if not (ask.ahead and self.can_run_ahead):
                return self._at_once(tokens, ask, sampler) if ask.num_tokens > 0 else NOTHING
            self._follow(tokens, ask, sampler)
            path = self._awaited(tokens, ask)
            if self.hedges and ask.hedged and self.lane.is_over:
                self._start(tokens, path, ask, sampler)
            self._verified = min(len(path), ask.num_tokens)
            return drafted(path, ask, self.name)

    def follow(self, tokens: TokenIds, ask: Ask, sampler: Sampler) -> Draft:
        """What is drafted behind tokens by now; the lane goes on from there.

        Raises:
            DrafterFault: The lane failed.
        """
        if ask.num_tokens < 1 or not self.drafter.knows(tokens):
            return NOTHING
        with self._lock:
            return drafted(self._follow(tokens, ask, sampler), ask, self.name)

    def due_s(self, step_s: float) -> float:
        """Seconds until the next token is to be expected, of steps that take step_s; inf if none is drafted."""
        return inf if self.lane.is_over else max(0.0, step_s - self.lane.step_s)

    def taken_s(self) -> tuple[Sequence[float], float]:
        with self._lock:
            seen, self._taken_s = self._taken_s, ([], 0.0)
            return seen

    def rest(self) -> None:
        """Stop the lane until the next draft."""
        with self._lock:
            self._text = None
            self.lane.stop()

    def learn(self, tokens: TokenIds, draft: Draft, logits: Logits) -> None:
        self.drafter.learn(tokens, draft, logits)

    def _at_once(self, tokens: TokenIds, ask: Ask, sampler: Sampler) -> Draft:
        def steps(cancel: Flag) -> Iterator[Draft]:
            yield self.drafter.draft(tokens, replace(ask, cancel=cancel), sampler)

        self._text = None
        self.lane.start(Job(steps, DRAFT, self.drafter.interrupt))
        found: list[Draft] = self._wait(1)
        return found[0] if found else NOTHING

    def _awaited(self, tokens: TokenIds, ask: Ask) -> Sequence[Guess]:
        """What is drafted behind tokens once there is enough, or no more is to come, or patience is at its end."""
        is_over = False
        while True:
            path, num_steps = self._path(tokens) or [], len(self.lane.ready())
            if len(path) >= ask.least or is_over:
                return path
            # A step gives one token more; what was kept comes with the first, and whoever is impatient asks each.
            num_more = ask.least - len(path) if num_steps and ask.patience_s is None else 1
            # Asked before what is drafted is looked at again: the last of it may come in between.
            is_over = self.lane.is_over or len(self._wait(num_steps + num_more, ask.patience_s)) == num_steps

    def _wait(self, num_steps: int, patience_s: float | None = None) -> list[Any]:
        found = self.lane.wait(num_steps, self.deadline_s if patience_s is None else patience_s)
        if len(found) < num_steps and patience_s is None and not self.lane.is_over:
            raise DrafterFault(f"it has not answered for {self.deadline_s:.1f} s")
        return found

    def _follow(self, tokens: TokenIds, ask: Ask, sampler: Sampler) -> Sequence[Guess]:
        is_new = ask.hedged and self.hedges and self._text is not None and self._num_before(tokens)
        if is_new and ask.patience_s and self._path(tokens) is not None:
            self.lane.wait(len(self.lane.ready()) + 1, ask.patience_s)
        path = self._path(tokens)
        self._see_times()
        # What is now verified, and as much again, and the token by which that is told to serve.
        limit = min(len(tokens) + ahead_of(ask.num_tokens), self.drafter.decoder.context_length)
        self._limit = limit if path is None else max(limit, self._limit)
        is_old = path is None or (len(tokens) + len(path) < self._limit and self.lane.is_over)
        if is_old or is_new:
            self._start(tokens, path or [], ask, sampler)
        return path or []

    def _path(self, tokens: TokenIds) -> list[Guess] | None:
        """What is drafted behind tokens; None where they are not what the lane drafts on."""
        text = self._text
        if text is None or not np.array_equal(tokens[: len(text)], text):
            return None
        self._tree.grow(self.lane.ready())
        return self._tree.behind(tokens[len(text) :])

    def _see_times(self) -> None:
        if self._text is None:
            return
        is_timed, taken_s = self._tree.is_timed, self.lane.taken_s()
        self._taken_s[0].extend(taken_s[i] for i in range(self._num_timed, len(is_timed)) if is_timed[i])
        self._num_timed = len(is_timed)
        is_going = not self.lane.is_over and (not self._is_cold or any(is_timed))
        self._taken_s = self._taken_s[0], self.lane.step_s if is_going else 0.0

    def _num_before(self, tokens: TokenIds) -> int:
        assert self._text is not None
        return len(tokens) - len(self._text)

    def _start(self, tokens: TokenIds, kept: Sequence[Guess], ask: Ask, sampler: Sampler) -> None:
        """Draft on from a text and what is kept of its tree."""
        kept = [guess._replace(after=i - 1) for i, guess in enumerate(kept)]
        ahead = Ask(self.drafter.decoder.context_length, with_distributions=ask.with_distributions)
        hedges = self.hedges if ask.hedged else None
        if hedges:
            ahead = replace(ahead, num_others=hedges.num_others)

        is_cold = self._text is None

        def steps(cancel: Flag) -> Iterator[Step]:
            yield Step(kept, is_timed=False)
            made = list(kept)
            now = replace(ahead, cancel=cancel)
            text = append(tokens, [guess.token for guess in kept])
            guesses = self.drafter.guesses(text, now, sampler)
            while len(tokens) + len(made) < self._limit and not (hedges and self._verified is not None):
                guess = next(guesses, None)
                if guess is None or cancel.is_set():
                    return
                made.append(guess._replace(after=len(made) - 1))
                yield Step(made[-1:], is_timed=not is_cold or len(made) > len(kept) + 1)
            if hedges and self._verified is not None:
                yield from hedges.grown(self.drafter, tokens, made, self._verified, now, sampler)

        self._text, self._tree, self._verified = tokens, _Tree(), None
        self._num_timed, self._is_cold = 0, is_cold
        self.lane.start(Job(steps, HEDGE if hedges else DRAFT_AHEAD, self.drafter.interrupt))


@dataclass(slots=True)
class _Tree:
    """What a job has drafted behind its text.

    A long text may run through it from end to end, so each guess is taken in once, and a text walked on from where
    it last ended.
    """

    _guesses: list[Guess] = field(default_factory=list)
    _children: dict[int, list[int]] = field(default_factory=dict)
    is_timed: list[bool] = field(default_factory=list)  # by step
    _walked: TokenIds = field(default_factory=lambda: np.zeros(0, np.int32))
    _node: int = -1  # where that ended

    def grow(self, steps: Sequence[Step]) -> None:
        """By those of the steps, all so far, that are new."""
        for step in steps[len(self.is_timed) :]:
            for guess in step.guesses:
                self._children.setdefault(guess.after, []).append(len(self._guesses))
                self._guesses.append(guess)
            self.is_timed.append(step.is_timed)

    def behind(self, tokens: TokenIds) -> list[Guess] | None:
        """The first that was drafted behind tokens, and behind that; None where the tokens leave the tree."""
        num_walked, node = len(self._walked), self._node
        if not np.array_equal(tokens[:num_walked], self._walked):
            num_walked, node = 0, -1
        for token in tokens[num_walked:]:
            children = self._children.get(node, ())
            node = next((i for i in children if self._guesses[i].token == token), -2)
            if node == -2:
                return None
        self._walked, self._node = tokens, node
        path = []
        while node in self._children:
            node = self._children[node][0]
            path.append(self._guesses[node])
        return path
