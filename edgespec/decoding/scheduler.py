"""The loop of drafting and verifying, as a generator of blocks; a caller stops it by closing it.

Knows protocols, not models: no tokenizer, no stop rules, no runtime.
"""

from collections.abc import Callable, Generator, Mapping
from time import perf_counter
from typing import NamedTuple, Protocol

from edgespec.decoding.acceptance import Acceptance, equality, rows_of
from edgespec.decoding.decoder import NO_LOGITS, Decoder, Pass, Rows
from edgespec.decoding.tree import NO_DRAFT, Tree
from edgespec.errors import Cancelled, EdgeSpecError, MemoryExhausted
from edgespec.system.cancel import Flag
from edgespec.system.clock import Clock
from edgespec.types import Logits, Sampler, TokenIds, append


class Proposal(NamedTuple):
    """One pass of the target, as its policy proposed it; carried from the proposal to what came of it."""

    tokens: TokenIds  # the committed tokens before the pass, [num_tokens]
    draft: Tree = NO_DRAFT  # what the target verifies after them; empty for plain decoding
    reason: str = ""  # why nothing was drafted; empty where something was
    offers: tuple[Tree, ...] = ()  # drafts of this round, verified or not; the pass says how far each is right
    expected: Mapping[str, Mapping[str, float]] = {}  # of plain decoding and each source, if rounds are logged
    draft_s: float = 0.0  # seconds that the draft took
    contention: float = 1.0  # how much longer the pass is expected to take because a drafter works beside it
    is_ahead: bool = False  # the draft comes from a drafter that works while the target verifies
    num_refused: int = 0  # tokens of a draft that the pass had no memory for


class DraftPolicy(Protocol):
    """Who drafts, and how much."""

    def propose(self, tokens: TokenIds, max_tokens: int, sampler: Sampler) -> Proposal:
        """The next round: a draft of at most max_tokens tokens, or none for plain decoding."""

    def observe(self, round: Proposal, logits: Logits, emitted: TokenIds, verify_s: float) -> None:
        """Learn from a round.

        Args:
            logits: After the last committed token and after each drafted one, [num_draft + 1, vocab_size].
            emitted: The tokens that the round yielded.
            verify_s: Seconds of the pass.
        """

    def close(self) -> None:
        """End an answer."""


class Plain:
    """Plain decoding: no draft ever."""

    def propose(self, tokens: TokenIds, max_tokens: int, sampler: Sampler) -> Proposal:
        return Proposal(tokens)

    def observe(self, round: Proposal, logits: Logits, emitted: TokenIds, verify_s: float) -> None:
        pass

    def close(self) -> None:
        pass


class Block(NamedTuple):
    """The yield of one pass of the target: tokens, [1 … num_draft + 1], the last of them its own.

    logits are the target's, [num_draft + 1, vocab_size], until its next pass.
    """

    tokens: TokenIds
    draft: Tree
    logits: Logits
    draft_s: float
    verify_s: float
    started_s: float = 0.0  # when the pass began, by the clock
    reason: str = ""  # why nothing was drafted
    confidence: float | None = None  # of a head, in the token of the last row

    def without_logits(self) -> "Block":
        return self._replace(logits=NO_LOGITS)

    @property
    def num_draft(self) -> int:
        return len(self.draft.tokens)

    @property
    def num_accepted(self) -> int:
        return len(self.tokens) - 1

    @property
    def chosen_from(self) -> list[int]:
        """The row of logits from which each token was chosen."""
        return [*rows_of(self.draft, self.tokens)]


def speculative_decode(
    tokens: TokenIds,
    target: Decoder,
    sampler: Sampler,
    policy: DraftPolicy,
    accept: Acceptance = equality,
    max_tokens: int | None = None,
    clock: Clock = perf_counter,
    relieve: Callable[[], bool] = lambda: False,
    cancel: Flag | None = None,
    num_prompt: int | None = None,
) -> Generator[Block, None, None]:
    """Draft, verify, repeat, until the context is full; never drafts beyond max_tokens.

    Args:
        relieve: Frees memory for a pass that was refused it without a draft; whether it freed any.
        cancel: Once set, no further pass begins.
        num_prompt: How many of tokens are the prompt, and not the beginning of an answer; all by default.

    Raises:
        ContextOverflow: The prompt alone does not fit.
        MemoryExhausted: Not even a pass without a draft is given memory.
        Cancelled: cancel is set.
    """
    cancel = cancel or Flag()
    num_prompt = len(tokens) if num_prompt is None else num_prompt
    # A pass over the whole context still gives the token that follows it.
    end = target.context_length if max_tokens is None else min(target.context_length, len(tokens) + max_tokens - 1)
    longest = end if target.can.rewind is None else target.can.rewind  # it goes back over what it does not accept
    try:
        while True:
            started = clock()
            _require_unset(cancel)
            proposed = policy.propose(tokens, max(0, min(longest, end - len(tokens))), sampler)
            _require_unset(cancel)
            drafted = clock()
            round, rows = _verify(target, proposed, relieve, num_prompt)
            try:
                emitted = accept(tokens, round.draft, rows.logits, sampler)
            except EdgeSpecError:  # behind drafted tokens no token may follow; the answer comes up to there
                if not len(round.draft.tokens):
                    raise
                round, rows = round._replace(draft=NO_DRAFT), Rows(rows.logits[:1])
                emitted = accept(tokens, NO_DRAFT, rows.logits, sampler)
            verified = clock()
            policy.observe(round, rows.logits, emitted, verified - drafted)
            draft_s = drafted - started + clock() - verified
            tokens = append(tokens, emitted)
            times = draft_s, verified - drafted, drafted
            yield Block(emitted, round.draft, rows.logits, *times, round.reason, rows.confidence)
            if len(tokens) > target.context_length:
                return
    finally:
        policy.close()


def _require_unset(cancel: Flag) -> None:
    if cancel.is_set():
        raise Cancelled("the answer was cancelled")


def _verify(
    target: Decoder, round: Proposal, relieve: Callable[[], bool], num_prompt: int
) -> tuple[Proposal, Rows]:
    """Run the pass, without its draft where there is no memory for it."""
    while True:
        try:
            return round, target.run(Pass(round.tokens, round.draft, num_prompt=num_prompt))
        except MemoryExhausted:
            if len(round.draft.tokens):
                round = round._replace(draft=NO_DRAFT, num_refused=len(round.draft.tokens))
            elif not relieve():
                raise
