"""From blocks of tokens to the chunks of an answer: its text, its end, its figures."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import NamedTuple

from edgespec.decoding.argmax import decoder_for
from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.scheduler import Block, speculative_decode
from edgespec.drafters.answer_cache import AnswerCache
from edgespec.drafters.pool import DrafterPool
from edgespec.drafters.timeline import Interval, overlap, schedule_of
from edgespec.engine.answers import Chunk
from edgespec.engine.request_queue import Ticket
from edgespec.engine.stats import Stats, Tally
from edgespec.engine.stopping import TextStop, TokenStop
from edgespec.policy.costs import PassCosts
from edgespec.policy.speculation import Speculation
from edgespec.tokenization.tokenizer import TextStream, Tokenizer
from edgespec.types import Decoder, TokenIds, append


class Request(NamedTuple):
    """A prompt, and how to answer it."""

    prompt: TokenIds
    sampling: SamplingParams
    max_tokens: int
    stop: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Makes answers."""

    tokenizer: Tokenizer
    end_tokens: Sequence[int]  # any of them ends an answer
    speculation: Speculation
    pool: DrafterPool
    answers: AnswerCache | None  # where answers are stored for later drafts, if they are
    device_names: tuple[str, str]  # devices of target and drafter

    def chunks(self, target: Decoder, request: Request, ticket: Ticket) -> Generator[Chunk, None, None]:
        """A chunk for each pass, and a last one that says why the answer ended and what it cost.

        Raises:
            ContextOverflow: The prompt does not fit.
            MemoryExhausted: Not even a pass without a draft is given memory.
        """
        started, fed = perf_counter(), target.num_fed
        writing = _Writing(
            TokenStop(self.end_tokens, request.max_tokens),
            TextStream(self.tokenizer),
            TextStop(request.stop),
            request.prompt[:0],
        )
        blocks = speculative_decode(
            request.prompt,
            decoder_for(request.sampling, target),
            GumbelSampler(request.sampling, len(request.prompt)),
            self.pool.policy(self.speculation),
            self.speculation.accept,
            request.max_tokens,
            relieve=self.pool.relieve,
            cancel=ticket.cancelled,
        )
        try:
            for block in blocks:
                if not writing.tally.passes:
                    writing.tally.add_prompt(target.num_fed - fed, perf_counter() - started)
                chunk = writing.add(block)
                if chunk.finish_reason:
                    break
                yield chunk
            else:
                chunk = Chunk(text="", token_ids=(), finish_reason="context")
        except Exception:
            if not ticket.is_cancelled:  # otherwise the error is what ended the pass
                raise
            chunk = Chunk(text="", token_ids=(), finish_reason="cancelled")
        finally:
            blocks.close()
            if self.answers:
                self.answers.add(request.prompt, writing.tokens)
        chunk = writing.finish(chunk)
        timeline = [*writing.timeline, *(each for each in self.pool.take_intervals() if each.start_s >= started)]
        yield replace(chunk, stats=self._stats(writing.tally, timeline), timeline=tuple(timeline))

    def _stats(self, tally: Tally, timeline: Sequence[Interval]) -> Stats:
        length = self.speculation.draft_length
        return tally.stats(
            drafter=self.speculation.name,
            draft_length="auto" if length is None else str(length),
            target_device=self.device_names[0],
            drafter_device=self.device_names[1] if self.pool.has_models else None,
            downgrades=self.pool.take_changes(),
            schedule=schedule_of(timeline),
            overlap=overlap(timeline),
            estimated_gain=tally.estimated_gain(PassCosts(dict(self.speculation.ratios))),
        )


@dataclass(slots=True)
class _Writing:
    """The state of an answer: its tokens, with those behind a stop string, its text up to there, its figures."""

    token_stop: TokenStop
    text_stream: TextStream
    text_stop: TextStop
    tokens: TokenIds
    tally: Tally = field(default_factory=Tally)
    timeline: list[Interval] = field(default_factory=list)
    is_cut: bool = False  # by a stop string

    def add(self, block: Block) -> Chunk:
        kept, reason = self.token_stop.cut(block.tokens)
        self.tokens = append(self.tokens, kept)
        text, num_shown = self._text_of(kept)
        self.tally.add(block, num_shown)
        self.timeline.append(_interval(block))
        return Chunk(
            text=text,
            token_ids=tuple(kept[:num_shown].tolist()),
            origins=_origins(block, num_shown),
            finish_reason="stop" if self.is_cut else reason,
        )

    def finish(self, last: Chunk) -> Chunk:
        """The last chunk with the text that was held back."""
        if self.is_cut:
            return last
        rest, is_cut = self.text_stop.push(self.text_stream.flush())
        rest = rest if is_cut else rest + self.text_stop.flush()
        return replace(last, text=last.text + rest, finish_reason="stop" if is_cut else last.finish_reason)

    def _text_of(self, tokens: TokenIds) -> tuple[str, int]:
        """The text of tokens up to a stop string, and how many tokens that took.

        Token by token, so that where the answer ends does not depend on how tokens came in blocks.
        """
        text = ""
        for i, token in enumerate(tokens):
            piece, self.is_cut = self.text_stop.push(self.text_stream.push([token]))
            text += piece
            if self.is_cut:
                return text, i + 1
        return text, len(tokens)


def _origins(block: Block, num_tokens: int) -> tuple[str, ...]:
    """The drafter of each of the first num_tokens of a block; "target" for the last one of the block."""
    return (*[block.draft.source] * block.num_accepted, "target")[:num_tokens]


def _interval(block: Block) -> Interval:
    return Interval("target", "verify", block.started_s, block.started_s + block.verify_s, len(block.tokens))
