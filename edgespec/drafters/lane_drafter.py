"""A model that drafts in a lane of its own, and goes on drafting there while the target verifies.

Its guesses are a tree after a text. As long as the target's tokens follow a path of the tree, the guesses beyond
them serve, and the lane goes on with the step that it is doing; where they leave it the lane starts over. So
speculative_decode overlaps both models without knowing, with this tree carried over from round to round.

Knows nothing of costs: the policy decides how far to draft ahead, how long to wait, and what branches are worth.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from threading import Lock
from typing import NamedTuple

import numpy as np

from edgespec.drafters.branches import Branches, GuessTree, Step
from edgespec.drafters.guess import Guess
from edgespec.drafters.lanes import Job, Lane, StepTime
from edgespec.drafters.model_drafter import ModelDrafter
from edgespec.drafters.timeline import DRAFT, DRAFT_AHEAD, HEDGE
from edgespec.errors import DrafterFault
from edgespec.policy.limits import MAX_AHEAD_TOKENS
from edgespec.policy.overlap import max_ahead
from edgespec.system.cancel import Flag
from edgespec.types import (
    NO_DRAFT,
    DraftAhead,
    Drafter,
    DrafterCan,
    DraftRequest,
    DraftStep,
    Foreseen,
    Logits,
    Missed,
    Sampler,
    TokenIds,
    Tree,
    Worth,
    append,
)

DEADLINE_S = 30.0
_NO_PASS = StepTime(0.0, 0.0)


class _Goal(NamedTuple):
    """What a lane that branches drafts for; it looks at it between two steps."""

    tokens: TokenIds
    worth: Worth
    num_verifying: int | None = None  # tokens after the text that the target verifies; None until it does


@dataclass(slots=True)
class LaneDrafter(Drafter):
    """A drafter whose draft() waits for the lane and whose draft_ahead() does not.

    can_run_ahead: The lane may go on between two drafts; otherwise it drafts only while the target waits.
    max_rows: The most branches that a step drafts on from while the target verifies; 0 for the likeliest alone.
    deadline_s: A draft that takes longer is a fault.
    """

    drafter: ModelDrafter
    lane: Lane
    can_run_ahead: bool = False
    max_rows: int = 0
    deadline_s: float = DEADLINE_S
    _text: TokenIds | None = None  # the text before the lane's tree
    _tree: GuessTree = field(default_factory=GuessTree)
    _advanced: TokenIds | None = None  # the text that the lane was last set on
    _searched: TokenIds | None = None  # the text after which guesses were last looked up in the tree
    _found: Sequence[Guess] | None = None  # and those guesses
    _limit: int = 0  # the most tokens of text and chain together
    _goal: _Goal | None = None  # None for a lane that drafts the likeliest tokens alone
    _num_seen: int = 0  # steps of the job that are in the tree
    _is_cold: bool = True  # the job's first step reads more than the tokens emitted since the last one
    _steps: list[DraftStep] = field(default_factory=list)  # since draft_ahead was last called
    _running_rows: int = 1  # of the step that is being done
    _busy_s: float = 0.0  # in which the lane worked since the pass began
    _missed: Missed | None = None
    _is_last_guessed: bool | None = None  # as the tree says, of the last new token
    _num_verified: int = 0  # tokens that the target was last given to verify
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

        Raises DrafterFault: The lane failed, or took longer than deadline_s.
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
                num_verifying = min(len(path), request.num_tokens)
                if self.lane.is_over:
                    self._start(tokens, path, request, sampler, num_verifying)
                elif self._goal is not None:
                    self._goal = self._goal._replace(num_verifying=num_verifying)
            self._begin_pass()
            draft = self.drafter.chain_draft(path, request)
            self._num_verified = len(draft.tokens)
            return draft

    def draft_ahead(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> DraftAhead:
        """The guesses after tokens that are ready; the lane goes on from there.

        Raises DrafterFault: The lane failed.
        """
        with self._lock:
            beside = self._end_pass()
            self._take_steps()
            unfinished, before = self._unfinished(), self._advanced
            draft = NO_DRAFT
            if request.num_tokens > 0 and self.drafter.can_read(tokens):
                draft = self.drafter.chain_draft(self._advance(tokens, request, sampler), request)
            is_last, self._is_last_guessed = self._is_last_guessed, None
            is_whole = before is not None and len(tokens) == len(before) + self._num_verified + 1
            steps, self._steps = self._steps, []
            missed, self._missed = self._missed, None
            foreseen = None if is_last is None or not is_whole else Foreseen(self._num_verified, is_last)
            return DraftAhead(draft, self._running_s(), steps, unfinished, beside, missed, foreseen)

    def pause(self) -> None:
        with self._lock:
            self._forget()
            self.lane.stop()

    def learn(self, tokens: TokenIds, draft: Tree, logits: Logits) -> None:
        self.drafter.learn(tokens, draft, logits)

    def _forget(self) -> None:
        """Leave the lane without a text to draft after."""
        self._text = self._advanced = self._searched = self._found = None
        self._pass = self._pass._replace(ended_s=min(self._pass.ended_s, self.lane.now()))

    def _can_branch(self, request: DraftRequest) -> bool:
        return self.max_rows > 0 and request.worth is not None

    def _running_s(self) -> float | None:
        return None if self.lane.is_over else self.lane.step_s

    def _begin_pass(self) -> None:
        self._take_steps()
        self._rested_s = self._pass.ended_s
        self._pass, self._busy_s = StepTime(self.lane.now(), inf), 0.0

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

    def _beside(self, time: StepTime) -> float:
        """The share of a step in which the target worked too."""
        begun_s, ended_s = self._pass
        taken_s = time.ended_s - time.begun_s
        alone_s = _common_s(time, StepTime(self._rested_s, begun_s)) + max(0.0, time.ended_s - ended_s)
        return max(0.0, 1 - alone_s / taken_s) if taken_s > 0 else 1.0

    def _draft_once(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        def steps(cancel: Flag) -> Iterator[Tree]:
            yield self.drafter.draft(tokens, replace(request, cancel=cancel), sampler)

        self._forget()
        self.lane.start(Job(steps, DRAFT, self.drafter.interrupt))
        return self.lane.ready()[0] if self._wait(1) else NO_DRAFT

    def _wait_for_tokens(self, tokens: TokenIds, request: DraftRequest) -> Sequence[Guess]:
        """The guesses after tokens, once there are enough, or no more will come, or the time is up."""
        is_over = False
        while True:
            path = self._path(tokens) or []
            if len(path) >= request.min_tokens or is_over:
                return path
            num_steps = self._num_seen
            # Each step adds a token, the first one also earlier tokens. With a timeout every step is waited for.
            num_more = request.min_tokens - len(path) if num_steps and request.timeout_s is None else 1
            # Before the next look at the path: the last step may end in between.
            is_over = self.lane.is_over or self._wait(num_steps + num_more, request.timeout_s) == num_steps

    def _wait(self, num_steps: int, timeout_s: float | None = None) -> int:
        """Wait for steps of the job. Returns how many are finished."""
        num_done = self.lane.wait_for(num_steps, self.deadline_s if timeout_s is None else timeout_s)
        if num_done < num_steps and timeout_s is None and not self.lane.is_over:
            raise DrafterFault(f"it has not answered for {self.deadline_s:.1f} s")
        return num_done

    def _advance(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Sequence[Guess]:
        """The guesses after tokens that are ready; starts the lane where it has no more to do after tokens."""
        path, self._advanced = self._path(tokens), tokens
        limit = min(len(tokens) + max_ahead(request.num_tokens), self.drafter.decoder.context_length)
        self._limit = limit if path is None else max(limit, self._limit)
        is_over = self.lane.is_over
        is_other_kind = not is_over and self._can_branch(request) != (self._goal is not None)
        if path is None or is_other_kind or (is_over and len(tokens) + len(path) < self._limit):
            self._start(tokens, path or [], request, sampler)
        elif not is_over and self._goal is not None and len(tokens) != len(self._goal.tokens):
            assert request.worth is not None
            self._goal = _Goal(tokens, request.worth)
        return path or []

    def _path(self, tokens: TokenIds) -> Sequence[Guess] | None:
        """The guesses after tokens; None where the lane drafts after another text."""
        has_more = self._take_steps()
        if tokens is self._searched and not has_more:
            return self._found
        text, self._searched, self._found = self._text, tokens, None
        if text is not None and np.array_equal(tokens[: len(text)], text):
            self._found = self._tree.path_after(tokens[len(text) :])
            self._missed = self._tree.take_missed() or self._missed
            self._is_last_guessed = self._tree.is_last_guessed
        return self._found

    def _take_steps(self) -> bool:
        """Put the lane's new steps into the tree. Returns whether there were any."""
        if self._text is None:
            return False
        num_before = self._num_seen
        for step, time in self.lane.new_steps(self._num_seen):
            self._num_seen += 1
            if step.text is not None:
                self._text, self._tree = step.text, GuessTree()
            self._tree.add(step.guesses)
            self._busy_s += _common_s(time, self._pass)
            if step.num_rows and step.is_timed:
                self._is_cold = False
                taken_s = time.ended_s - time.begun_s
                self._steps.append(DraftStep(taken_s, step.num_rows, self._beside(time)))
        return self._num_seen > num_before

    def _unfinished(self) -> DraftStep | None:
        running_s = self._running_s()
        if running_s is None or self._is_cold or self._text is None:
            return None
        now = self.lane.now()
        return DraftStep(running_s, self._running_rows, self._beside(StepTime(now - running_s, now)))

    def _start(
        self,
        tokens: TokenIds,
        path: Sequence[Guess],
        request: DraftRequest,
        sampler: Sampler,
        num_verifying: int | None = None,
    ) -> None:
        """Start a job that drafts on from a text and guesses after it."""
        ahead = DraftRequest(self.drafter.decoder.context_length, with_distributions=request.with_distributions)
        is_cold = self._text is None
        self._goal, run = None, self._chain_steps
        if self._can_branch(request):
            assert request.worth is not None
            self._goal, run = _Goal(tokens, request.worth, num_verifying), self._branching_steps
            ahead = replace(ahead, worth=request.worth)
        self._text, self._tree, self._num_seen, self._is_cold = tokens, GuessTree(), 0, is_cold
        self._searched = None
        tree = Branches(tokens, path)

        def steps(cancel: Flag) -> Iterator[Step]:
            num_first = len(path)
            for step in run(tree, replace(ahead, cancel=cancel), sampler):
                # The first pass of a lane that was at rest reads the text.
                num_first -= 0 if step.num_rows == 0 else 1
                yield step._replace(is_timed=not is_cold or num_first < len(path) - 1)
                if cancel.is_set():
                    return

        self.lane.start(Job(steps, HEDGE if self._goal else DRAFT_AHEAD, self.drafter.interrupt))

    def _chain_steps(self, tree: Branches, request: DraftRequest, sampler: Sampler) -> Iterator[Step]:
        """Draft the likeliest tokens up to the limit."""
        yield tree.first
        self._running_rows = 1
        guesses = self.drafter.guesses(_text_of(tree), request, sampler)
        while len(tree.tokens) + len(tree.chain) < self._limit:
            guess = next(guesses, None)
            if guess is None:
                return
            yield tree.extend(guess)

    def _branching_steps(self, tree: Branches, request: DraftRequest, sampler: Sampler) -> Iterator[Step]:
        """Draft the likeliest tokens until the target verifies, then those after the likeliest outcomes too."""
        yield tree.first
        guesses: Iterator[Guess] | None = None
        while goal := self._goal:
            if goal.tokens is not tree.tokens:
                chain = tree.chain_after(goal.tokens)
                if chain is None:
                    return
                tree, guesses = Branches(goal.tokens, chain), None
                yield tree.first
            elif goal.num_verifying is None:
                if len(tree.tokens) + len(tree.chain) >= self._limit:
                    return
                guesses = guesses or self.drafter.guesses(_text_of(tree), request, sampler)
                self._running_rows = 1
                guess = next(guesses, None)
                if guess is None:
                    return
                yield tree.extend(guess)
            else:
                guesses = None
                longest = min(MAX_AHEAD_TOKENS, self.drafter.decoder.context_length - len(tree.tokens))
                step, nodes = tree.choose(goal.num_verifying, goal.worth, self.max_rows, longest)
                if not nodes:
                    return
                if step.guesses:
                    yield step
                self._running_rows = len(nodes)
                found = self.drafter.tree_guesses(tree.tokens, _run_nodes(tree), nodes, request, sampler)
                if not found:
                    return
                yield tree.add(found, nodes, goal.worth)


def _run_nodes(tree: Branches) -> Tree:
    tokens = np.array([guess.token for guess in tree.nodes], np.int32)
    return Tree(tokens, parents=tuple(guess.after for guess in tree.nodes))


def _text_of(tree: Branches) -> TokenIds:
    return append(tree.tokens, [guess.token for guess in tree.chain])


def _common_s(one: StepTime, other: StepTime) -> float:
    """Seconds that two spans have in common."""
    return max(0.0, min(one.ended_s, other.ended_s) - max(one.begun_s, other.begun_s))
