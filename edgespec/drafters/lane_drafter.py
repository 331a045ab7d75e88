"""A model that drafts in a lane of its own, and goes on drafting there while the target verifies.

Its guesses are a tree behind a text. As long as the target's tokens follow a path of the tree, the guesses beyond
them serve; where they leave it the lane starts over. So speculative_decode overlaps both models without knowing,
with this tree carried over from round to round.

Knows nothing of costs: the policy decides how far to draft ahead and how long to wait.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import numpy as np

from edgespec.drafters.branches import BranchPlan, Step
from edgespec.drafters.lanes import Job, Lane
from edgespec.drafters.model_drafter import Guess, ModelDrafter
from edgespec.drafters.timeline import DRAFT, DRAFT_AHEAD, HEDGE
from edgespec.errors import DrafterFault
from edgespec.policy.overlap import max_ahead, wait_for_step_s
from edgespec.system.cancel import Flag
from edgespec.types import NO_DRAFT, Draft, DraftAhead, Drafter, DraftRequest, Logits, Sampler, TokenIds, append

DEADLINE_S = 30.0


@dataclass(slots=True)
class LaneDrafter(Drafter):
    """A drafter whose draft() waits for the lane and whose draft_ahead() does not.

    can_run_ahead: The lane may go on between two drafts; otherwise it drafts only while the target waits.
    branch_plan: How alternatives are drafted while the target verifies; None for no alternatives.
    deadline_s: A draft that takes longer is a fault.
    """

    drafter: ModelDrafter
    lane: Lane
    can_run_ahead: bool = False
    branch_plan: BranchPlan | None = None
    deadline_s: float = DEADLINE_S
    is_free: bool = False
    _text: TokenIds | None = None  # the text before the lane's tree
    _tree: "_Tree" = field(default_factory=lambda: _Tree())
    _limit: int = 0  # the most tokens of text and chain together
    _num_verifying: int | None = None  # tokens that the target verifies; None until it does
    _step_times_s: list[float] = field(default_factory=list)  # since draft_ahead was last called
    _unfinished_s: float = 0.0
    _num_timed: int = 0  # steps of the job that were looked at for _step_times_s
    _is_cold: bool = True  # the job's first step reads more than the tokens emitted since the last one
    _lock: Lock = field(default_factory=Lock)

    @property
    def name(self) -> str:
        return self.drafter.name

    @property
    def num_alternatives(self) -> int:
        return self.branch_plan.num_alternatives if self.branch_plan else 0

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Draft:
        """Guess up to request.num_tokens tokens; with 0 the target goes on without a draft.

        Raises DrafterFault: The lane failed, or took longer than deadline_s.
        """
        if not self.drafter.can_read(tokens):
            return NO_DRAFT
        with self._lock:
            if not (request.is_ahead and self.can_run_ahead):
                return self._draft_once(tokens, request, sampler) if request.num_tokens > 0 else NO_DRAFT
            self._advance(tokens, request, sampler)
            path = self._wait_for_tokens(tokens, request)
            if self.branch_plan and request.prefetches_alternatives and self.lane.is_over:
                self._start(tokens, path, request, sampler)
            self._num_verifying = min(len(path), request.num_tokens)
            return self.drafter.chain_draft(path, request)

    def draft_ahead(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> DraftAhead:
        """The guesses behind tokens that are ready; the lane goes on from there.

        Raises DrafterFault: The lane failed.
        """
        with self._lock:
            draft = NO_DRAFT
            if request.num_tokens > 0 and self.drafter.can_read(tokens):
                draft = self.drafter.chain_draft(self._advance(tokens, request, sampler), request)
            times_s, self._step_times_s = self._step_times_s, []
            unfinished_s, self._unfinished_s = self._unfinished_s, 0.0
            return DraftAhead(draft, self._running_s(), times_s, unfinished_s)

    def pause(self) -> None:
        with self._lock:
            self._text = None
            self.lane.stop()

    def learn(self, tokens: TokenIds, draft: Draft, logits: Logits) -> None:
        self.drafter.learn(tokens, draft, logits)

    def _running_s(self) -> float | None:
        return None if self.lane.is_over else self.lane.step_s

    def _draft_once(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Draft:
        def steps(cancel: Flag) -> Iterator[Draft]:
            yield self.drafter.draft(tokens, replace(request, cancel=cancel), sampler)

        self._text = None
        self.lane.start(Job(steps, DRAFT, self.drafter.interrupt))
        found: list[Draft] = self._wait(1)
        return found[0] if found else NO_DRAFT

    def _wait_for_tokens(self, tokens: TokenIds, request: DraftRequest) -> Sequence[Guess]:
        """The guesses behind tokens, once there are enough, or no more will come, or the time is up."""
        is_over = False
        while True:
            path, num_steps = self._path(tokens) or [], len(self.lane.ready())
            if len(path) >= request.min_tokens or is_over:
                return path
            # Each step adds a token, the first one also earlier tokens. With a timeout every step is waited for.
            num_more = request.min_tokens - len(path) if num_steps and request.timeout_s is None else 1
            # Before the next look at the path: the last step may end in between.
            is_over = self.lane.is_over or len(self._wait(num_steps + num_more, request.timeout_s)) == num_steps

    def _wait(self, num_steps: int, timeout_s: float | None = None) -> list[Any]:
        found = self.lane.wait(num_steps, self.deadline_s if timeout_s is None else timeout_s)
        if len(found) < num_steps and timeout_s is None and not self.lane.is_over:
            raise DrafterFault(f"it has not answered for {self.deadline_s:.1f} s")
        return found

    def _advance(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Sequence[Guess]:
        """The guesses behind tokens that are ready; starts the lane where it has no more to do behind tokens."""
        is_other_text = self._text is not None and len(tokens) != len(self._text)
        is_new = request.prefetches_alternatives and self.branch_plan and is_other_text
        wait_s = wait_for_step_s(request.step_s, self._running_s()) if request.step_s else None
        if is_new and wait_s and self._path(tokens) is not None:
            self.lane.wait(len(self.lane.ready()) + 1, wait_s)
        path = self._path(tokens)
        self._collect_times()
        limit = min(len(tokens) + max_ahead(request.num_tokens), self.drafter.decoder.context_length)
        self._limit = limit if path is None else max(limit, self._limit)
        is_old = path is None or (len(tokens) + len(path) < self._limit and self.lane.is_over)
        if is_old or is_new:
            self._start(tokens, path or [], request, sampler)
        return path or []

    def _path(self, tokens: TokenIds) -> list[Guess] | None:
        """The guesses behind tokens; None where the lane drafts behind another text."""
        text = self._text
        if text is None or not np.array_equal(tokens[: len(text)], text):
            return None
        self._tree.add(self.lane.ready())
        return self._tree.path_behind(tokens[len(text) :])

    def _collect_times(self) -> None:
        if self._text is None:
            return
        is_timed, times_s = self._tree.is_timed, self.lane.step_times_s()
        self._step_times_s.extend(times_s[i] for i in range(self._num_timed, len(is_timed)) if is_timed[i])
        self._num_timed = len(is_timed)
        is_known = not self.lane.is_over and (not self._is_cold or any(is_timed))
        self._unfinished_s = self.lane.step_s if is_known else 0.0

    def _start(self, tokens: TokenIds, path: Sequence[Guess], request: DraftRequest, sampler: Sampler) -> None:
        """Start a job that drafts on from a text and guesses behind it."""
        path = [guess._replace(after=i - 1) for i, guess in enumerate(path)]
        ahead = DraftRequest(self.drafter.decoder.context_length, with_distributions=request.with_distributions)
        branch_plan = self.branch_plan if request.prefetches_alternatives else None
        if branch_plan:
            ahead = replace(ahead, num_others=branch_plan.num_others)

        is_cold = self._text is None

        def steps(cancel: Flag) -> Iterator[Step]:
            yield Step(path, is_timed=False)
            chain = list(path)
            now = replace(ahead, cancel=cancel)
            text = append(tokens, [guess.token for guess in path])
            guesses = self.drafter.guesses(text, now, sampler)
            while len(tokens) + len(chain) < self._limit and not (branch_plan and self._num_verifying is not None):
                guess = next(guesses, None)
                if guess is None or cancel.is_set():
                    return
                chain.append(guess._replace(after=len(chain) - 1))
                yield Step(chain[-1:], is_timed=not is_cold or len(chain) > len(path) + 1)
            if branch_plan and self._num_verifying is not None:
                yield from branch_plan.draft_branches(
                    self.drafter, tokens, chain, self._num_verifying, now, sampler
                )

        self._text, self._tree, self._num_verifying = tokens, _Tree(), None
        self._num_timed, self._is_cold = 0, is_cold
        self.lane.start(Job(steps, HEDGE if branch_plan else DRAFT_AHEAD, self.drafter.interrupt))


@dataclass(slots=True)
class _Tree:
    """The guesses of a job behind its text.

    A long text may follow it from end to end, so each guess is added once, and a search continues where the last
    one ended.
    """

    _guesses: list[Guess] = field(default_factory=list)
    _children: dict[int, list[int]] = field(default_factory=dict)
    is_timed: list[bool] = field(default_factory=list)  # by step
    _last: TokenIds = field(default_factory=lambda: np.zeros(0, np.int32))  # tokens of the last search
    _node: int = -1  # where it ended

    def add(self, steps: Sequence[Step]) -> None:
        """Add the new ones of all steps so far."""
        for step in steps[len(self.is_timed) :]:
            for guess in step.guesses:
                self._children.setdefault(guess.after, []).append(len(self._guesses))
                self._guesses.append(guess)
            self.is_timed.append(step.is_timed)

    def path_behind(self, tokens: TokenIds) -> list[Guess] | None:
        """The first guess behind tokens, the first behind that, and so on; None where tokens leave the tree."""
        start, node = len(self._last), self._node
        if not np.array_equal(tokens[:start], self._last):
            start, node = 0, -1
        for token in tokens[start:]:
            children = self._children.get(node, ())
            node = next((i for i in children if self._guesses[i].token == token), -2)
            if node == -2:
                return None
        self._last, self._node = tokens, node
        path = []
        while node in self._children:
            node = self._children[node][0]
            path.append(self._guesses[node])
        return path
