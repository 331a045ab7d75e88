"""From blocks of tokens to the chunks of an answer: its text, its end, its figures.

Passes run in a thread of their own, with what must be known before the next pass: what was accepted, an end token,
the count. Their text, and all that is made of it, is made where it is read.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from edgespec.decoding.decoder import Decoder
from edgespec.decoding.greedy import PlainChoices, Reruns
from edgespec.decoding.logprobs import TokenLogprob, logprobs_of
from edgespec.decoding.pass_ahead import PassAhead
from edgespec.decoding.repetition import SHORTEST_LOOP, LoopWatch, ends_in_loop
from edgespec.decoding.sampling import GumbelSampler
from edgespec.decoding.scheduler import speculative_decode
from edgespec.draft.acceptance_rates import AcceptanceChange
from edgespec.draft.answer_cache import AnswerCache
from edgespec.draft.pool import DrafterPool
from edgespec.draft.pool_policy import PoolPolicy
from edgespec.draft.speculation import Speculation
from edgespec.draft.timeline import Interval, overlap, schedule_of
from edgespec.engine.answer_passes import (
    AnswerClock,
    AnswerPass,
    TextStop,
    TokenStop,
    prompt_passes,
    with_enough_rows,
)
from edgespec.engine.answer_stream import AnswerStream
from edgespec.engine.answers import AnswerFrame, Chunk, Stats, Tally, usage_of
from edgespec.engine.embedder import Embedder
from edgespec.engine.reasoning import ReasoningGate
from edgespec.engine.request import Request
from edgespec.engine.run_ahead import RequestQueue, RunAhead, Ticket
from edgespec.manifest import Manifest
from edgespec.setup.usage import UsageCounter
from edgespec.system.context_managers import contextmanager
from edgespec.text.prompt_encoder import PromptEncoder
from edgespec.text.tokenizer import TextStream
from edgespec.tools.call_events import CallEvent, Part, TextPart, in_order
from edgespec.tools.call_parser import CallParser
from edgespec.types import TokenIds, append

if TYPE_CHECKING:
    from edgespec.engine.idle_learner import IdleLearner

# Rounds from which the thread of the passes has not learned, as the reader's thread may do it for them meanwhile.
_MAX_UNLEARNED = 3
_NONE_RERUN = Reruns()


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """The target of an engine: its description, and the encoder that reads texts.

    device_names: Of target and drafter.
    near_tie: Tokens that are nearer are decided as in plain decoding, if they are.
    embedder: Of a model that was trained for embeddings, which writes no text.
    """

    manifest: Manifest
    encoder: PromptEncoder
    device_names: tuple[str, str] = ("cpu", "cpu")
    is_deterministic: bool = False
    near_tie: float | None = None
    embedder: Embedder | None = None


@dataclass(frozen=True, kw_only=True)
class OpenDrafters:
    """The drafters of an engine, and all that was learned of them.

    answers: Where answers are stored for later drafts, if they are. learner: Learns from answers, if one does.
    counter: Counts answers, if they are counted. held: Other programs see by it that the models are open.
    sha256: The recorded hash of each drafter model's weights file.
    """

    speculation: Speculation = field(default_factory=Speculation)
    pool: DrafterPool = field(default_factory=DrafterPool)
    answers: AnswerCache | None = None
    learner: "IdleLearner | None" = None
    counter: UsageCounter | None = None
    held: ExitStack = field(default_factory=ExitStack)
    sha256: tuple[str, ...] = ()

    def report(self) -> None:
        """Report what has changed in the time without answers."""
        self.pool.report_changes()
        if self.learner:
            self.learner.report_problem()

    def close(self) -> None:
        """Free the models, once what was learned is kept."""
        if self.learner:
            self.learner.close()
        self.speculation.close()
        self.pool.close()
        if self.answers:
            self.answers.save()
        if self.counter:
            self.counter.close()
        self.held.close()


@dataclass(frozen=True, slots=True)
class Generation:
    """Turns requests into answers with one target and its drafters."""

    model: LoadedModel
    drafting: OpenDrafters

    def stream(
        self, target: Decoder, request: Request, queue: RequestQueue, ticket: Ticket, num_read: Callable[[], int]
    ) -> AnswerStream:
        """A chunk for each pass, and a last one that says why the answer ended and what it cost.

        The answer is what was taken: a pass that ran ahead of its reader counts nowhere if the answer ends before.

        num_read: How much of the prompt was read, in tokens.

        Raises, as it is read:
            ContextOverflow: The prompt does not fit.
            MemoryExhausted: Not even a pass without a draft is given memory.
        """
        writer, drafters = AnswerWriter(self, request, ticket), self.drafting.speculation.drafters()
        passes = RunAhead(
            self._all_passes(target, request, ticket, writer, lambda: passes.hand_over()),
            queue,
            ticket,
            is_prompt=any(each.can.run_ahead for each in drafters),  # may be waited for
        )
        return AnswerStream(
            passes,
            writer,
            ticket,
            self.drafting.pool.report_changes,
            len(request.tokens),
            num_read,
            schema=request.options.schema,
            opens_reasoning=request.opens_reasoning,
        )

    def _all_passes(
        self,
        target: Decoder,
        request: Request,
        ticket: Ticket,
        writer: "AnswerWriter",
        on_begin: Callable[[], None],
    ) -> Generator[AnswerPass, None, None]:
        """The passes over a prompt alone, where they are wanted, and those that make the answer.

        on_begin: Is called as each pass begins.
        """
        caller = ticket.caller
        caller.may_join = self.model.near_tie is None  # which counts on passes that run alone
        caller.on_begin = on_begin
        try:
            if request.options.prompt_logprobs or not request.max_tokens:
                yield from prompt_passes(target, request)
            if request.max_tokens:
                yield from self._passes(target, request, ticket, writer)
        finally:
            caller.on_begin = lambda: None  # so that it does not refer to the answer

    def _passes(
        self, target: Decoder, request: Request, ticket: Ticket, writer: "AnswerWriter"
    ) -> Generator[AnswerPass, None, None]:
        """The passes of an answer up to its end token or the count; at the end its writer takes who drafted."""
        started, fed, caller, drafters = perf_counter(), target.num_fed, ticket.caller, self.drafting
        loops = LoopWatch(partial(_may_repeat, request)) if request.options.is_loop_ended else None
        token_stop, clock = TokenStop(writer.end_tokens, request.max_tokens, loops), AnswerClock(caller)
        sampler = GumbelSampler(
            request.sampling, len(request.prompt), mask=request.mask, constraint=request.constraint
        )
        policy = PoolPolicy(
            drafters.pool,
            drafters.speculation,
            _MAX_UNLEARNED,
            request.drafters,
            cache=lambda: ticket.cache or 0,
            caller=caller,
            clock=clock,
        )
        fast = _running_ahead(target, request, policy, token_stop)
        # A head learns nothing while an answer is made, and from it afterwards.
        answering = drafters.learner.answering() if drafters.learner else nullcontext()
        with self._reporting(policy, writer), answering as log, fast as ahead:
            accept = drafters.speculation.accept
            near_tie = self.model.near_tie
            plain = None if near_tie is None else PlainChoices(target, sampler, near_tie, lambda: ticket.num_given)
            decoder = plain or with_enough_rows(ahead, request)
            blocks = speculative_decode(
                request.tokens,
                decoder,
                sampler,
                policy,
                log.noting(accept) if log else accept,
                request.max_tokens,
                clock,
                relieve=drafters.pool.relieve,
                cancel=ticket.cancelled,
                num_prompt=len(request.prompt),
            )
            with closing(blocks):
                num_logprobs = request.options.logprobs
                for block in map(clock.in_ordinary_time, blocks):
                    kept, reason = token_stop.cut(block.tokens)
                    yield AnswerPass(
                        block.without_logits(),
                        kept,
                        reason,
                        decoder.num_fed - fed,
                        perf_counter() - started,
                        plain.reruns if plain else _NONE_RERUN,
                        policy.learn,
                        () if num_logprobs is None else logprobs_of(block, len(kept), num_logprobs),
                    )
                    if reason:
                        break

    @contextmanager
    def _reporting(self, policy: PoolPolicy, writer: "AnswerWriter") -> Iterator[None]:
        """At the end the writer takes the work of drafter models, and what was accepted of each source."""
        started = perf_counter()
        try:
            yield
        finally:
            writer.acceptance = policy.acceptance_changes()
            if policy.has_models and self.drafting.pool.has_models:
                intervals = self.drafting.pool.take_intervals()
                writer.drafting = [each for each in intervals if each.start_s >= started]


class AnswerWriter:
    """The state of an answer while it is written: makes chunks of its passes, and its figures.

    end_tokens: Those of the model, and special tokens, which are no text, that a stop string spells.
    drafting: When drafter models have worked for the answer, once its passes are over.
    acceptance: By then, how much of what each source guessed was accepted.
    """

    def __init__(self, generation: Generation, request: Request, ticket: Ticket) -> None:
        self._generation, self._request, self._caller = generation, request, ticket.caller
        self.drafting: list[Interval] = []
        self.acceptance: dict[str, AcceptanceChange] = {}
        self._text_stop = TextStop(request.stop)
        self._calls: CallParser | None = None  # searches text beside calls by the stop strings
        self._reasoning: ReasoningGate | None = None  # in which nothing is a call
        calls, tokenizer = request.calls, generation.model.encoder.tokenizer
        marks = (*request.answer_marks, *(calls.format.marks() if calls else ()))
        shown = tokenizer.special_within(marks) if marks else frozenset()
        in_use = shown if request.is_raw else {*shown, *tokenizer.channel_marks}  # to read the answer by
        stops = {tokenizer.special_tokens[each] for each in request.stop if each in tokenizer.special_tokens}
        self.end_tokens = {*generation.model.manifest.eos_token_ids, *(stops - in_use)}
        if calls:
            self._calls = CallParser(
                calls.format,
                calls.use.tools,
                holds_arguments=calls.holds_arguments,
                stop=self._text_stop,
                is_parallel=calls.use.is_parallel,
            )
            # All of an answer may be a call where one is demanded, from its beginning.
            if calls.use.choice == "auto" and (request.opens_reasoning or not len(request.prefill)):
                self._reasoning = ReasoningGate(is_open=request.opens_reasoning)
        self._text_stream = TextStream(tokenizer, shown, request.prompt if request.is_raw else ())
        self._text_stream.skip(request.prefill.tolist())
        self._frame: AnswerFrame | None = None
        if request.answer_marks:
            self._frame = AnswerFrame(request.answer_marks, is_open=request.opens_reasoning)
        self._kept: list[TokenIds] = []  # by pass, with those after a stop string
        self._num_written = 0  # characters, with those that may belong to a stop string
        self._starts: list[int] = []  # where the text of the tokens of _logprobs begins
        self._logprobs: list[TokenLogprob] = []  # that wait until their text is shown
        self._tally = Tally()
        self._timeline: list[Interval] = []
        self._reruns = Reruns()
        self._is_cut = False  # by a stop string, or after the one call that it may have

    def add(self, new: AnswerPass) -> Chunk:
        block, tally = new.block, self._tally
        if block is None:
            tally.num_read, tally.first_s = new.num_fed, new.made_s
            return Chunk(text="", token_ids=(), prompt_logprobs=new.logprobs, finish_reason=new.finish_reason)
        if not tally.passes:
            tally.num_read += max(0, new.num_fed - block.num_draft)
            tally.first_s = new.made_s + (tally.first_s or 0.0)
        self._kept.append(new.kept)
        parts, num_shown = self._parts_of_tokens(new.kept)
        self._logprobs += new.logprobs[:num_shown]
        text, events, places = split_parts(parts)
        tally.add(block, num_shown)
        ended_s = block.started_s + block.verify_s
        self._timeline.append(Interval("target", "verify", block.started_s, ended_s, len(block.tokens)))
        self._reruns = new.reruns
        new.learn()
        return Chunk(
            text=text,
            token_ids=tuple(new.kept[:num_shown].tolist()),
            origins=(*[block.draft.source] * block.num_accepted, "target")[:num_shown],
            logprobs=self._shown_logprobs(is_last=False),
            tool_calls=events,
            call_places=places,
            finish_reason="stop" if self._is_cut else new.finish_reason,
        )

    def finish(self, last: Chunk) -> Chunk:
        """The last chunk with the text that was held back, and the figures."""
        parts: list[Part] = [TextPart(last.text)]
        if last.tool_calls:
            parts = [*in_order(last.text, last.tool_calls, last.call_places)]
        if not self._is_cut:
            held = self._text_stream.flush()
            parts += self._parts_of_text(self._frame.push(held) + self._frame.end() if self._frame else held)
            parts += self._read_calls(*self._reasoning.end()) if self._reasoning and not self._is_cut else []
        if self._calls:
            parts += self._calls.flush()
            self._is_cut = self._is_cut or self._calls.output.is_stopped
        elif not self._is_cut:
            parts.append(TextPart(self._text_stop.flush()))
        reason = "stop" if self._is_cut else last.finish_reason
        reason = "tool_calls" if reason == "stop" and self._calls and self._calls.output.has_calls else reason
        text, events, places = split_parts(parts)
        logprobs = (*last.logprobs, *self._shown_logprobs(is_last=True))
        ended_s = self._timeline[-1].end_s if self._timeline else 0.0
        timeline = (*self._timeline, *(each for each in self.drafting if each.start_s <= ended_s))
        stats = self._stats(timeline)
        if self._generation.drafting.counter:
            self._generation.drafting.counter.count(usage_of(stats))
        return replace(
            last,
            text=text,
            logprobs=logprobs,
            tool_calls=events,
            call_places=places,
            finish_reason=reason,
            stats=stats,
            timeline=timeline,
        )

    def close(self) -> None:
        if self._generation.drafting.answers:
            self._generation.drafting.answers.add(self._request.tokens, self._all_kept())

    def _all_kept(self) -> TokenIds:
        return np.concatenate(self._kept) if self._kept else np.zeros(0, np.int32)

    def _parts_of_tokens(self, tokens: TokenIds) -> tuple[list[Part], int]:
        """The text of tokens up to a stop string with the calls in it, and how many tokens that took.

        Token by token, so that where the answer ends does not depend on how tokens came in blocks.
        """
        parts: list[Part] = []
        for i, token in enumerate(tokens):
            if self._request.stop and self._request.options.logprobs is not None:
                start = self._num_written + self._text_stream.num_held
                self._starts.append(max([start, *self._starts[-1:]]))  # none are held while one is incomplete
            text = self._text_stream.push([token])
            parts += self._parts_of_text(self._frame.push(text) if self._frame else text)
            if self._is_cut:
                return parts, i + 1
        return parts, len(tokens)

    def _shown_logprobs(self, *, is_last: bool) -> tuple[TokenLogprob, ...]:
        """Take those of the tokens whose text is shown by now; of what only a stop string has, none ever come."""
        num = len(self._logprobs)
        if self._request.stop and not (is_last and not self._text_stop.is_cut):
            num_held = sum(each.num_held for each in (self._reasoning, self._calls) if each)
            num_shown = self._num_written - self._text_stop.num_hidden - num_held
            num = min(num, sum(start < num_shown for start in self._starts))
        taken = tuple(self._logprobs[:num])
        self._logprobs, self._starts = self._logprobs[num:], self._starts[num:]
        return taken

    def _parts_of_text(self, text: str) -> list[Part]:
        """The calls in more of the text, and what is text of it up to a stop string: all of the reasoning is."""
        self._num_written += len(text)
        if self._calls is None:
            return self._text_to_stop(text)
        return self._read_calls(*(self._reasoning.push(text) if self._reasoning else ("", text)))

    def _read_calls(self, reasoning: str, text: str) -> list[Part]:
        assert self._calls is not None
        parts = self._text_to_stop(reasoning) if reasoning else []
        if text and not self._is_cut:
            parts += self._calls.push(text)
            self._is_cut = self._calls.is_over
        return parts

    def _text_to_stop(self, text: str) -> list[Part]:
        shown, self._is_cut = self._text_stop.push(text)
        return [TextPart(shown)] if shown else []

    def _stats(self, timeline: Sequence[Interval]) -> Stats:
        """Figures of an answer; one whose passes waited for others, or ran as one with them, shows no gain.

        Nor does one that ends by repeating itself, which is easy to guess and of use to nobody.
        """
        generation, choice, tally = self._generation, self._request.drafters, self._tally
        length = choice.draft_length or generation.drafting.speculation.draft_length
        drafters = choice.select(generation.drafting.speculation.drafters())
        costs = generation.drafting.speculation.costs()
        costs.context_length = num_kept = sum(map(len, self._kept))
        is_alone = tally.was_alone(self._caller.num_joined, self._caller.waited_s)
        gain = tally.gain(costs) if is_alone else None
        if gain is not None and num_kept >= SHORTEST_LOOP and ends_in_loop(self._all_kept().tolist()):
            gain = None
        return tally.stats(
            num_redecided=self._reruns.num_tokens,
            num_reruns=self._reruns.num_passes,
            drafter="+".join(drafter.name for drafter in drafters) or "none",
            draft_length="auto" if length is None else str(length),
            target_device=generation.model.device_names[0],
            drafter_device=generation.model.device_names[1] if generation.drafting.pool.has_models else None,
            downgrades=generation.drafting.pool.take_changes(),
            **({"schedule": schedule_of(timeline), "overlap": overlap(timeline)} if self.drafting else {}),
            gain=gain,
            acceptance=self.acceptance,
            waited_passes=self._caller.waited_passes,
        )


def split_parts(parts: Sequence[Part]) -> tuple[str, tuple[CallEvent, ...], tuple[int, ...]]:
    """Text and events apart, and for each event how many characters of the text stand before it."""
    text, events, places = "", list[CallEvent](), list[int]()
    for part in parts:
        if isinstance(part, TextPart):
            text += part.text
        else:
            events.append(part)
            places.append(len(text))
    return text, tuple(events), tuple(places)


def _may_repeat(request: Request, tokens: list[int], span_length: int) -> bool:
    """True if what the answer has to match demands or bounds the loop that its tokens end with."""
    constraint, answer = request.constraint, append(request.prefill, tokens)
    return constraint is not None and constraint.bounds_loop(answer, span_length)


def _running_ahead(
    target: Decoder, request: Request, policy: PoolPolicy, token_stop: TokenStop
) -> AbstractContextManager[Decoder]:
    """The target, whose plain passes begin before they are asked for where a device waits for Python otherwise.

    Only one that pads passes to few widths, as a GPU does, is so fast.
    """

    def goes_on(text: TokenIds) -> bool:
        is_last = token_stop.is_end(text, len(request.tokens))
        return policy.is_plain and not policy.caller.is_queued and not is_last

    if not (target.can.best and target.can.widths):
        return nullcontext(target)
    return closing(PassAhead(target, goes_on, lambda: policy.caller.on_begin()))
