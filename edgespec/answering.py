"""From blocks of tokens to the chunks of an answer: what ends it, its text, its figures.

Knows protocols: whose target and whose drafters these are is the engine's affair.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from edgespec.answers import Chunk
from edgespec.costs import PassCosts
from edgespec.greedy_rows import read_by
from edgespec.memory import Memory
from edgespec.roster import Roster
from edgespec.sampling import GumbelSampler, SamplingParams
from edgespec.scheduler import Block, Gate, serial
from edgespec.speculation import Speculation
from edgespec.stats import Stats, Tally
from edgespec.stopping import TextStop, TokenStop
from edgespec.timeline import Interval, overlap, schedule_of
from edgespec.tokenizer import TextStream, Tokenizer
from edgespec.turns import Turn
from edgespec.types import Decoder, Draft, Logits, Sampler, TokenIds, append


class Request(NamedTuple):
    """A prompt, and how it is to be answered."""

    prompt: TokenIds
    sampling: SamplingParams
    max_tokens: int
    stop: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """What answers are made with.

    end_tokens: Any of them ends an answer.
    device_names: Of target and drafter.
    """

    tokenizer: Tokenizer
    end_tokens: Sequence[int]
    speculation: Speculation
    roster: Roster
    memory: Memory | None
    device_names: tuple[str, str]

    def chunks(self, target: Decoder, request: Request, turn: Turn) -> Generator[Chunk, None, None]:
        """A chunk a pass, and a last one that says why the answer ended and what it cost.

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
        gate = self.roster.gate(self.speculation)
        blocks = serial(
            request.prompt,
            read_by(request.sampling, target),
            GumbelSampler(request.sampling, len(request.prompt)),
            _WantedGate(gate, turn),
            self.speculation.accept,
            request.max_tokens,
            relieve=self.roster.relieve,
        )
        try:
            turn.expect_wanted()
            for block in blocks:
                if not writing.tally.passes:
                    writing.tally.prompt_read(target.num_fed - fed, perf_counter() - started)
                piece = writing.add(block)
                if piece.reason:
                    break
                yield piece.chunk()
            else:
                piece = _Piece(reason="context")
        except Exception:
            if not turn.is_cancelled:  # else it is what ended the pass
                raise
            piece = _Piece(reason="cancelled")
        finally:
            blocks.close()
            if self.memory:
                self.memory.add(request.prompt, writing.tokens)
        piece = writing.ended(piece)
        timeline = [*writing.timeline, *(each for each in self.roster.take_intervals() if each.start_s >= started)]
        yield piece.chunk(self._stats(writing.tally, timeline, gate.undrafted), timeline)

    def _stats(self, tally: Tally, timeline: Sequence[Interval], undrafted: Mapping[str, int]) -> Stats:
        length = self.speculation.draft_length
        return tally.stats(
            drafter=self.speculation.name,
            draft_length="auto" if length is None else str(length),
            target_device=self.device_names[0],
            drafter_device=self.device_names[1] if self.roster.has_models else None,
            downgrades=self.roster.take_news(),
            schedule=schedule_of(timeline),
            overlap=overlap(timeline),
            costs=PassCosts(dict(self.speculation.ratios)),
            undrafted=undrafted,
        )


class _Piece(NamedTuple):
    """What a user gets of a block. reason: why the answer ends with it, if it does."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    origins: tuple[str, ...] = ()
    reason: str | None = None
    is_cut: bool = False  # by a stop string

    def chunk(self, stats: Stats | None = None, timeline: Sequence[Interval] = ()) -> Chunk:
        return Chunk(
            text=self.text,
            token_ids=self.token_ids,
            origins=self.origins,
            finish_reason=self.reason,
            stats=stats,
            timeline=tuple(timeline),
        )


@dataclass(slots=True)
class _Writing:
    """What there is of an answer: tokens, with those behind a stop string, text up to there, figures."""

    token_stop: TokenStop
    text_stream: TextStream
    text_stop: TextStop
    tokens: TokenIds
    tally: Tally = field(default_factory=Tally)
    timeline: list[Interval] = field(default_factory=list)

    def add(self, block: Block) -> _Piece:
        kept, reason = self.token_stop.cut(block.tokens)
        self.tokens = append(self.tokens, kept)
        text, num_shown, is_cut = self._shown(kept)
        self.tally.add(block, num_shown)
        self.timeline.append(_verified(block))
        shown = tuple(int(token) for token in kept[:num_shown])
        return _Piece(text, shown, _origins(block, num_shown), "stop" if is_cut else reason, is_cut)

    def ended(self, last: _Piece) -> _Piece:
        """The last piece with the text that was held back."""
        if last.is_cut:
            return last
        rest, is_cut = self.text_stop.push(self.text_stream.flush())
        rest = rest if is_cut else rest + self.text_stop.flush()
        return last._replace(text=last.text + rest, reason="stop" if is_cut else last.reason)

    def _shown(self, tokens: TokenIds) -> tuple[str, int, bool]:
        """Text of tokens up to a stop string, how many tokens that took, and whether one was met.

        Token by token, so that where the answer ends does not depend on how tokens came in blocks.
        """
        text = ""
        for i, token in enumerate(tokens):
            piece, is_cut = self.text_stop.push(self.text_stream.push([token]))
            text += piece
            if is_cut:
                return text, i + 1, True
        return text, len(tokens), False


@dataclass(frozen=True, slots=True)
class _WantedGate:
    """Another gate, which ends an answer that was cancelled before the next pass."""

    gate: Gate
    turn: Turn

    def draft(self, tokens: TokenIds, room: int, sampler: Sampler) -> Draft:
        """Raises Cancelled."""
        self.turn.expect_wanted()
        draft = self.gate.draft(tokens, room, sampler)
        self.turn.expect_wanted()
        return draft

    def observe(self, tokens: TokenIds, draft: Draft, logits: Logits, emitted: TokenIds, verify_s: float) -> None:
        self.gate.observe(tokens, draft, logits, emitted, verify_s)

    def close(self) -> None:
        self.gate.close()


def _origins(block: Block, num_tokens: int) -> tuple[str, ...]:
    """Of the first num_tokens of a block: who drafted each, and "target" for the last, which is its own."""
    return (*[block.draft.source] * block.num_accepted, "target")[:num_tokens]


def _verified(block: Block) -> Interval:
    return Interval("target", "verify", block.started_s, block.started_s + block.verify_s, len(block.tokens))
