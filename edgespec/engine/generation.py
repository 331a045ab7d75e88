"""From blocks of tokens to the chunks of an answer: its text, its end, its figures.

Passes run in a thread of their own, with what must be known before the next pass: what was accepted, an end token,
the count. Their text, and all that is made of it, is made where it is read.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

from edgespec.decoding.acceptance import Acceptance
from edgespec.decoding.decoder import Decoder, ForwardingDecoder, Pass, Rows
from edgespec.decoding.greedy import PlainChoices, Reruns, decoder_for
from edgespec.decoding.logprobs import logprobs_of
from edgespec.decoding.pass_queue import Caller
from edgespec.decoding.sampling import GumbelSampler
from edgespec.decoding.scheduler import Block, speculative_decode
from edgespec.draft.acceptance_rates import AcceptanceChange
from edgespec.draft.answer_cache import AnswerCache
from edgespec.draft.pool import DrafterPool
from edgespec.draft.pool_policy import PoolPolicy
from edgespec.draft.speculation import Speculation
from edgespec.draft.timeline import Interval, overlap, schedule_of
from edgespec.engine.answer_stream import AnswerStream
from edgespec.engine.answers import Chunk
from edgespec.engine.idle_learner import IdleLearner
from edgespec.engine.request import Request
from edgespec.engine.request_queue import RequestQueue, Ticket
from edgespec.engine.run_ahead import RunAhead
from edgespec.engine.stats import Stats, was_alone
from edgespec.engine.writing import AnswerPass, TextStop, TokenStop, Writing, text_after
from edgespec.text.tokenizer import Tokenizer

# Rounds from which the thread of the passes has not learned, as the reader's thread may do it for them meanwhile.
_MAX_UNLEARNED = 3


class _Announcing(ForwardingDecoder):
    """A decoder that tells when a pass begins, as the queue does for one that waits there.

    Who is told works then. Before, it would take the interpreter from texts whose next passes run as one with it.
    """

    def __init__(self, decoder: Decoder, caller: Caller) -> None:
        super().__init__(decoder)
        self._caller = caller

    def run(self, given: Pass) -> Rows:
        if not self._caller.is_queued:
            self._caller.on_begin()
        return self._decoder.run(given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Turns requests into answers with one target and its drafters."""

    tokenizer: Tokenizer
    end_tokens: Sequence[int]  # any of them ends an answer
    speculation: Speculation
    pool: DrafterPool
    answers: AnswerCache | None  # where answers are stored for later drafts, if they are
    device_names: tuple[str, str]  # devices of target and drafter
    near_tie: float | None = None  # tokens that are nearer are decided as in plain decoding, if they are
    learner: IdleLearner | None = None  # learns from answers, if one does

    def stream(
        self, target: Decoder, request: Request, queue: RequestQueue, ticket: Ticket, num_read: Callable[[], int]
    ) -> AnswerStream:
        """A chunk for each pass, and a last one that says why the answer ended and what it cost.

        The answer is what was taken: a pass that ran ahead of its reader counts nowhere if the answer ends before.

        Args:
            num_read: How much of the prompt was read, in tokens.

        Raises, as it is read:
            ContextOverflow: The prompt does not fit.
            MemoryExhausted: Not even a pass without a draft is given memory.
        """
        writer = AnswerWriter(self, request, ticket)
        passes = RunAhead(
            self._passes(target, request, ticket, writer.drafting, writer.acceptance, lambda: passes.hand_over()),
            queue,
            ticket,
            is_prompt=any(each.can.run_ahead for each in self.speculation.drafters()),  # may be waited for
        )
        return AnswerStream(
            passes,
            writer,
            ticket,
            self.pool.report_changes,
            len(request.tokens),
            num_read,
            ends_loops=request.options.ends_loops,
        )

    def _passes(
        self,
        target: Decoder,
        request: Request,
        ticket: Ticket,
        drafting: list[Interval],
        acceptance: dict[str, AcceptanceChange],
        on_begin: Callable[[], None] = lambda: None,
    ) -> Generator[AnswerPass, None, None]:
        """The passes of an answer up to its end token or the count.

        Args:
            drafting: Takes at the end when drafter models have worked for the answer.
            acceptance: Takes at the end how much of what each source guessed was accepted.
            on_begin: Is called as each pass begins.
        """
        started, fed = perf_counter(), target.num_fed
        caller = ticket.caller
        caller.may_join = self.near_tie is None  # which counts on passes that run alone
        caller.on_begin = on_begin
        token_stop = TokenStop(self.end_tokens, request.max_tokens)
        sampler = GumbelSampler(
            request.sampling, len(request.prompt), mask=request.mask, constraint=request.constraint
        )
        clock = partial(_working_s, caller)
        policy = PoolPolicy(
            self.pool,
            self.speculation,
            _MAX_UNLEARNED,
            request.drafters,
            cache=lambda: ticket.cache or 0,
            caller=caller,
            clock=clock,
        )
        plain = None if self.near_tie is None else PlainChoices(target, sampler, self.near_tie)
        none_rerun, num_logprobs = Reruns(), request.options.logprobs
        decoder = plain or (target if request.reads_logits else decoder_for(request.sampling, target))
        with self._accepting() as accept:
            blocks = speculative_decode(
                request.tokens,
                _Announcing(decoder, caller),
                sampler,
                policy,
                accept,
                request.max_tokens,
                clock,
                relieve=self.pool.relieve,
                cancel=ticket.cancelled,
            )
            waited_s = caller.waited_s
            try:
                for block in blocks:
                    block, waited_s = _with_waits(block, waited_s, caller.waited_s), caller.waited_s
                    kept, reason = token_stop.cut(block.tokens)
                    reruns = plain.reruns if plain else none_rerun
                    seconds = perf_counter() - started
                    passed = block.without_logits(), kept, reason, target.num_fed - fed, seconds, reruns
                    logprobs = () if num_logprobs is None else logprobs_of(block, len(kept), num_logprobs)
                    yield AnswerPass(*passed, policy.learn, logprobs)
                    if reason:
                        break
            finally:
                blocks.close()
                caller.on_begin = lambda: None  # which refers to this answer
                acceptance.update(policy.acceptance_changes())
                if policy.has_models:
                    drafting.extend(each for each in self.pool.take_intervals() if each.start_s >= started)

    @contextmanager
    def _accepting(self) -> Iterator[Acceptance]:
        """The rule that accepts drafts; a head learns nothing within the block, and from it afterwards."""
        if self.learner is None:
            yield self.speculation.accept
            return
        with self.learner.answering() as log:
            yield log.noting(self.speculation.accept)


class AnswerWriter:
    """Makes chunks of the passes of an answer, and its figures.

    drafting: Takes at the end when drafter models have worked for the answer.
    acceptance: Takes at the end how much of what each source guessed was accepted.
    """

    def __init__(self, generation: Generation, request: Request, ticket: Ticket) -> None:
        self._generation, self._request, self._caller = generation, request, ticket.caller
        calls, tokenizer = request.calls, generation.tokenizer
        shown = tokenizer.special_within(calls.format.marks()) if calls else frozenset()
        stop = TextStop(request.stop)
        self._writing = Writing(
            text_after(request.prefill, tokenizer, shown),
            stop,
            calls.reader(stop) if calls else None,
            calls.reasoning() if calls and not len(request.prefill) else None,
        )
        self.drafting: list[Interval] = []
        self.acceptance: dict[str, AcceptanceChange] = {}

    def add(self, new: AnswerPass) -> Chunk:
        chunk = self._writing.add(new)
        new.learn()
        return chunk

    def finish(self, last: Chunk) -> Chunk:
        writing = self._writing
        chunk = writing.finish(last)
        ended = writing.timeline[-1].end_s if writing.timeline else 0.0
        timeline = [*writing.timeline, *(each for each in self.drafting if each.start_s <= ended)]
        return replace(chunk, stats=self._stats(timeline), timeline=tuple(timeline))

    def close(self) -> None:
        if self._generation.answers:
            self._generation.answers.add(self._request.tokens, self._writing.tokens)

    def _stats(self, timeline: Sequence[Interval]) -> Stats:
        """Figures of an answer; those whose passes waited for others, or ran as one with them, show no gain."""
        generation, choice, tally = self._generation, self._request.drafters, self._writing.tally
        length = choice.draft_length or generation.speculation.draft_length
        drafters = choice.select(generation.speculation.drafters())
        is_alone = was_alone(self._caller.num_joined, self._caller.waited_s, tally.taken_s)
        costs = generation.speculation.costs()
        costs.context_length = len(self._writing.tokens)
        return tally.stats(
            num_redecided=self._writing.reruns.num_tokens,
            num_reruns=self._writing.reruns.num_passes,
            drafter="+".join(drafter.name for drafter in drafters) or "none",
            draft_length="auto" if length is None else str(length),
            target_device=generation.device_names[0],
            drafter_device=generation.device_names[1] if generation.pool.has_models else None,
            downgrades=generation.pool.take_changes(),
            schedule=schedule_of(timeline),
            overlap=overlap(timeline),
            gain=tally.gain(costs) if is_alone else None,
            acceptance=self.acceptance,
            waited_passes=self._caller.waited_passes,
        )


def _working_s(caller: Caller) -> float:
    """The clock less the time in which an answer's passes waited for others, which is no cost of drafting."""
    return perf_counter() - caller.waited_s


def _with_waits(block: Block, before_s: float, after_s: float) -> Block:
    """A block in ordinary time, from seconds that the answer had waited before its pass and after it."""
    if not after_s:
        return block
    return block._replace(started_s=block.started_s + before_s, verify_s=block.verify_s + after_s - before_s)
