"""A model that drafts in a lane of its own, and goes on drafting there while the target verifies.

Its guesses are a tree after a text. As long as the target's tokens follow a path of the tree, the guesses beyond
them serve, and the lane goes on with the step that it is doing; where they leave it the lane starts over. So
speculative_decode overlaps both models without knowing, with this tree carried over from round to round.

The policy decides how far to draft ahead, how long to wait, and what branches are worth.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import inf
from threading import Lock
from typing import NamedTuple

import numpy as np

from edgespec.decoding.tree import NO_DRAFT, Tree, Worth
from edgespec.draft.drafter import DraftAhead, Drafter, DrafterCan, DraftRequest, LaneStep
from edgespec.draft.hedging import behind, choose
from edgespec.draft.lanes import Job, Lane, StepTime
from edgespec.draft.limits import MAX_AHEAD_TOKENS
from edgespec.draft.model_drafter import ModelDrafter, step_of
from edgespec.draft.overlap import max_ahead
from edgespec.draft.timeline import DRAFT, DRAFT_AHEAD, HEDGE
from edgespec.errors import DrafterFault
from edgespec.system.cancel import Flag
from edgespec.types import Sampler, TokenIds, append

DEADLINE_S = 30.0
_NO_PASS = StepTime(0.0, 0.0)


class _Goal(NamedTuple):
    """The text that the lane drafts after, looked at between two steps.

    worth: Of other outcomes of the pass; None for the likeliest tokens alone.
    num_verifying: Tokens after the text that the target verifies; None until it does.
    """

    tokens: TokenIds
    worth: Worth | None = None
    num_verifying: int | None = None


class _Step(NamedTuple):
    """The lane's guesses after a text by the end of a step.

    num_rows: Rows of the step; 0 where the guesses are named by an earlier one.
    """

    text: TokenIds
    tree: Tree
    num_rows: int
    is_timed: bool = True


@dataclass(slots=True)
class LaneDrafter(Drafter):
    """A drafter whose draft() waits for the lane and whose draft_ahead() does not.

    can_run_ahead: The lane may go on between two drafts; otherwise it drafts only while the target waits.
    max_rows: The most branches that a step drafts on from while the target verifies; 0 for the likeliest alone.
    deadline_s: A model that reads no token for so long is at fault, where the lane has a thread of its own.
    """

    drafter: ModelDrafter
    lane: Lane
    can_run_ahead: bool = False
    max_rows: int = 0
    deadline_s: float = DEADLINE_S
    _text: TokenIds | None = None  # the text before the lane's tree
    _tree: Tree = NO_DRAFT
    _advanced: TokenIds | None = None  # the text that the lane was last set on
    _limit: int = 0  # the most tokens of text and chain together
    _goal: _Goal | None = None
    _num_seen: int = 0  # steps of the job that are in the tree
    _is_cold: bool = True  # the job's first step reads more than the tokens emitted since the last one
    _steps: list[LaneStep] = field(default_factory=list)  # since draft_ahead was last called
    _running_rows: int = 1  # of the step that is being done
    _busy_s: float = 0.0  # in which the lane worked since the pass began
    _pass: StepTime = _NO_PASS  # the last one, from draft() to draft_ahead()
    _rested_s: float = 0.0  # when the pass before it ended
    _lock: Lock = field(default_factory=Lock)

    @property
    def name(self) -> str:
        return self.drafter.name

    @property
    def can(self) -> DrafterCan:
        num_others = max(0, self.max_rows - 1)
        return self.drafter.can._replace(run_ahead=self.can_run_ahead, num_alternatives=num_others)

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        """Guess up to request.num_tokens tokens; with 0 the target goes on without a draft.

        Raises DrafterFault: The lane failed, or stood still for deadline_s.
        """
        if not self.drafter.can_read(tokens):
            return NO_DRAFT
        with self._lock:
            if not (request.is_ahead and self.can_run_ahead):
                return self._draft_once(tokens, request, sampler) if request.num_tokens > 0 else NO_DRAFT
            if tokens is not self._advanced:
                self._advance(tokens, request, sampler)
            path = self._wait_for_tokens(tokens, request)
            if self._can_branch(request):
                num_verifying = min(len(path.tokens), request.num_tokens)
                if self.lane.is_over:
                    self._start(tokens, path, request, sampler, num_verifying)
                elif self._goal is not None and self._goal.worth is not None:
                    self._goal = self._goal._replace(num_verifying=num_verifying)
            self._take_steps()
            self._rested_s = self._pass.ended_s
            self._pass, self._busy_s = StepTime(self.lane.now(), inf), 0.0
            return self.drafter.chain_draft(path, request)

    def draft_ahead(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> DraftAhead:
        """The guesses after tokens that are ready; the lane goes on from there.

        Raises DrafterFault: The lane failed.
        """
        with self._lock:
            shared = self._end_pass()
            past = NO_DRAFT if self._advanced is None else self._path(self._advanced) or NO_DRAFT
            unfinished = self._unfinished()
            draft = NO_DRAFT
            if request.num_tokens > 0 and self.drafter.can_read(tokens):
                draft = self.drafter.chain_draft(self._advance(tokens, request, sampler), request)
            steps, self._steps = self._steps, []
            return DraftAhead(draft, past, self._running_s(), steps, unfinished, shared)

    def expect_drafts(self, is_expected: bool) -> bool:
        return self.drafter.expect_drafts(is_expected)

    def pause(self) -> None:
        with self._lock:
            self._forget()
            self.lane.stop()

    def _forget(self) -> None:
        """Leave the lane without a text to draft after."""
        self._text = self._advanced = None
        self._pass = self._pass._replace(ended_s=min(self._pass.ended_s, self.lane.now()))

    def _can_branch(self, request: DraftRequest) -> bool:
        return self.max_rows > 0 and request.worth is not None

    def _running_s(self) -> float | None:
        return None if self.lane.is_over else self.lane.step_s

    def _unfinished(self) -> LaneStep | None:
        running_s = self._running_s()
        if running_s is None or self._is_cold or self._text is None:
            return None
        now = self.lane.now()
        return LaneStep(running_s, self._running_rows, self._shared(StepTime(now - running_s, now)))

    def _end_pass(self) -> float | None:
        """The share of the pass in which the lane worked; None where draft() was not called since the last one."""
        begun_s, ended_s = self._pass
        if ended_s < inf:
            return None
        now = self.lane.now()
        self._pass = StepTime(begun_s, now)
        self._take_steps()
        running_s = self._running_s() or 0.0
        return min(1.0, (self._busy_s + min(running_s, now - begun_s)) / max(now - begun_s, 1e-9))

    def _shared(self, time: StepTime) -> float:
        """The share of a step in which the target worked too."""
        begun_s, ended_s = self._pass
        taken_s = time.ended_s - time.begun_s
        alone_s = _common_s(time, StepTime(self._rested_s, begun_s)) + max(0.0, time.ended_s - ended_s)
        return max(0.0, 1 - alone_s / taken_s) if taken_s > 0 else 1.0

    def _draft_once(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        def steps(cancel: Flag) -> Iterator[Tree]:
            yield self.drafter.draft(tokens, replace(request, cancel=cancel), sampler)

        self._forget()
        self.lane.start(Job(steps, DRAFT, self.drafter.decoder.interrupt))
        found = self.lane.steps() if self._wait(1) else []
        return found[0][0] if found else NO_DRAFT  # the lane may be stopped meanwhile

    def _wait_for_tokens(self, tokens: TokenIds, request: DraftRequest) -> Tree:
        """The guesses after tokens, once there are enough, or no more will come, or the time is up."""
        is_over = False
        while True:
            path = self._path(tokens) or NO_DRAFT
            if len(path.tokens) >= request.min_tokens or is_over:
                return path
            num_steps = self._num_seen
            # Each step adds a token, the first one also earlier tokens. With a timeout every step is waited for.
            num_more = request.min_tokens - len(path.tokens) if num_steps and request.timeout_s is None else 1
            # Before the next look at the path: the last step may end in between.
            is_over = self.lane.is_over or self._wait(num_steps + num_more, request.timeout_s) == num_steps

    def _wait(self, num_steps: int, timeout_s: float | None = None) -> int:
        """Wait for steps of the job. Returns how many are finished."""
        if timeout_s is not None:
            return self.lane.wait(num_steps, timeout_s)
        num_fed = self.drafter.decoder.num_fed
        while (num_done := self.lane.wait(num_steps, self.deadline_s)) < num_steps and not self.lane.is_over:
            before, num_fed = num_fed, self.drafter.decoder.num_fed
            if num_fed == before:
                raise DrafterFault(f"it has not answered for {self.deadline_s:.1f} s")
        return num_done

    def _advance(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        """The guesses after tokens that are ready; starts the lane where it has no more to do after tokens."""
        path, self._advanced = self._path(tokens), tokens
        limit = min(len(tokens) + max_ahead(request.num_tokens), self.drafter.decoder.context_length)
        self._limit = limit if path is None else max(limit, self._limit)
        is_over, goal = self.lane.is_over, self._goal
        is_other_kind = goal is not None and self._can_branch(request) != (goal.worth is not None)
        is_at_end = path is not None and len(tokens) + len(path.tokens) >= self._limit
        if path is None or (is_other_kind and not is_over) or (is_over and not is_at_end):
            self._start(tokens, path or NO_DRAFT, request, sampler)
        elif goal is not None and len(tokens) != len(goal.tokens) and not is_over:
            self._goal = _Goal(tokens, request.worth if self._can_branch(request) else None)
        return path or NO_DRAFT

    def _path(self, tokens: TokenIds) -> Tree | None:
        """The guesses after tokens; None where the lane drafts after another text."""
        self._take_steps()
        text = self._text
        if text is None or not np.array_equal(tokens[: len(text)], text):
            return None
        return self._tree.after(tokens[len(text) :])

    def _take_steps(self) -> None:
        """Take what the lane has guessed by now."""
        if self._text is None:
            return
        for step, time in self.lane.steps(self._num_seen):
            self._num_seen += 1
            self._text, self._tree = step.text, step.tree
            self._busy_s += _common_s(time, self._pass)
            if step.num_rows and step.is_timed:
                self._is_cold = False
                taken_s = time.ended_s - time.begun_s
                self._steps.append(LaneStep(taken_s, step.num_rows, self._shared(time)))

    def _start(
        self,
        tokens: TokenIds,
        path: Tree,
        request: DraftRequest,
        sampler: Sampler,
        num_verifying: int | None = None,
    ) -> None:
        """Start a job that drafts on from a text and guesses after it."""
        worth = request.worth if self._can_branch(request) else None
        ahead = DraftRequest(
            self.drafter.decoder.context_length, with_distributions=request.with_distributions, worth=worth
        )
        # The first pass of a lane that was at rest reads the text.
        is_cold = self._text is None
        goal = self._goal = _Goal(tokens, worth, num_verifying)
        self._text, self._tree, self._num_seen, self._is_cold = tokens, path, 0, is_cold

        def steps(cancel: Flag) -> Iterator[_Step]:
            is_timed = not is_cold
            for step in self._grow(goal, path, replace(ahead, cancel=cancel), sampler):
                yield step._replace(is_timed=is_timed)
                is_timed = is_timed or step.num_rows > 0
                if cancel.is_set():
                    return

        self.lane.start(Job(steps, HEDGE if worth else DRAFT_AHEAD, self.drafter.decoder.interrupt))

    def _grow(self, goal: _Goal, tree: Tree, request: DraftRequest, sampler: Sampler) -> Iterator[_Step]:
        """Draft the likeliest tokens up to the limit, and once the target verifies, those after other outcomes."""
        text, worth, guesses = goal.tokens, goal.worth, None
        while True:
            goal = self._goal or goal
            if goal.tokens is not text:
                rest = tree.after(goal.tokens[len(text) :])
                if rest is None:
                    return
                text, worth, tree = goal.tokens, goal.worth, rest
                guesses = guesses if worth is None else None
            if worth is None or goal.num_verifying is None:
                if len(text) + len(tree.tokens) >= self._limit:
                    return
                guesses = guesses or self.drafter.guesses(append(text, tree.tokens), request, sampler)
                self._running_rows = 1
                guess = next(guesses, None)
                if guess is None:
                    return
                tree = tree.grown(step_of([guess], [len(tree.tokens) - 1]))
                yield _Step(text, tree, 1)
                continue
            guesses = None
            longest = min(MAX_AHEAD_TOKENS, self.drafter.decoder.context_length - len(text))
            named, tips = choose(tree, worth, goal.num_verifying, self.max_rows, longest)
            if not tips:
                return
            if named is not tree:
                yield _Step(text, named, 0)
            self._running_rows = len(tips)
            found = self.drafter.guesses_after(text, named, tips, request, sampler)
            if not found:
                return
            tree = named.grown(behind(named, tips, found, worth))
            yield _Step(text, tree, len(tips))


def _common_s(one: StepTime, other: StepTime) -> float:
    """Seconds that two spans have in common."""
    return max(0.0, min(one.ended_s, other.ended_s) - max(one.begun_s, other.begun_s))
