"""The state of an answer while it is written: from its passes to text, calls of tools and figures, and its end."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from edgespec.decoding.greedy import Reruns
from edgespec.decoding.logprobs import TokenLogprob
from edgespec.decoding.scheduler import Block
from edgespec.draft.timeline import Interval
from edgespec.engine.answers import Chunk
from edgespec.engine.reasoning import ReasoningGate
from edgespec.engine.stats import Tally
from edgespec.text.call_events import Part, TextPart, in_order, split_parts
from edgespec.text.call_parser import CallReader
from edgespec.text.tokenizer import TextStream, Tokenizer
from edgespec.types import TokenIds, append


@dataclass(slots=True)
class TokenStop:
    """Cuts a stream of blocks at an end token, which is not part of the answer, or after max_tokens."""

    eos_token_ids: Collection[int]
    max_tokens: int
    num_tokens: int = 0

    def cut(self, tokens: TokenIds) -> tuple[TokenIds, str | None]:
        """The tokens that belong to the answer, and the finish reason if it ends here."""
        room = self.max_tokens - self.num_tokens
        kept = tokens[:room]
        for i, token in enumerate(kept.tolist()):
            if token in self.eos_token_ids:
                self.num_tokens += i
                return tokens[:i], "stop"
        self.num_tokens += len(kept)
        return kept, "length" if self.num_tokens >= self.max_tokens else None


class TextStop:
    """Cuts a stream of text at the first of several strings.

    Text that may be the start of one is held back until it is clear.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [string for string in strings if string]
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that can be shown, and whether the answer ends there."""
        self._held += text
        found = [at for string in self._strings if (at := self._held.find(string)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = self._num_undecided()
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def flush(self) -> str:
        """The text that was held back, when no more comes."""
        shown, self._held = self._held, ""
        return shown

    def _num_undecided(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max(map(len, self._strings), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(string.startswith(self._held[-size:]) for string in self._strings):
                return size
        return 0


class AnswerPass(NamedTuple):
    """A pass of an answer, the part of it that belongs to the answer, and the target's counts at that time."""

    block: Block  # without logits: many passes may wait, and a row has half a megabyte
    kept: TokenIds  # the block up to an end token or the count
    finish_reason: str | None  # if the answer ends with it
    num_fed: int  # tokens that the target has run for the answer
    made_s: float  # seconds since the first pass began
    reruns: Reruns  # of the answer so far
    learn: Callable[[], None]  # has the policy learn from it, while the next pass runs
    logprobs: tuple[TokenLogprob, ...]  # of each token of kept, if they were asked for


@dataclass(slots=True)
class Writing:
    """The state of an answer: its tokens, with those after a stop string, its text up to there, its figures."""

    text_stream: TextStream
    text_stop: TextStop
    calls: CallReader | None = None  # where the answer may call tools; searches text beside calls by text_stop
    reasoning: ReasoningGate | None = None  # in which nothing is a call
    tokens: TokenIds = field(default_factory=lambda: np.zeros(0, np.int32))
    tally: Tally = field(default_factory=Tally)
    timeline: list[Interval] = field(default_factory=list)
    reruns: Reruns = field(default_factory=Reruns)
    is_cut: bool = False  # by a stop string, or after the one call that it may have

    def add(self, new: AnswerPass) -> Chunk:
        """Take a pass; returns what the reader gets of it."""
        if not self.tally.passes:
            self.tally.add_prompt(max(0, new.num_fed - new.block.num_draft), new.made_s)
        block = new.block
        self.tokens = append(self.tokens, new.kept)
        parts, num_shown = self._parts_of(new.kept)
        text, events, places = split_parts(parts)
        self.tally.add(block, num_shown)
        self.timeline.append(_interval(block))
        self.reruns = new.reruns
        return Chunk(
            text=text,
            token_ids=tuple(new.kept[:num_shown].tolist()),
            origins=_origins(block, num_shown),
            logprobs=new.logprobs[:num_shown],
            tool_calls=events,
            call_places=places,
            finish_reason="stop" if self.is_cut else new.finish_reason,
        )

    def finish(self, last: Chunk) -> Chunk:
        """The last chunk with the text that was held back."""
        reason = last.finish_reason
        parts = [*in_order(last.text, last.tool_calls, last.call_places)]
        if not self.is_cut:
            parts += self._parts_of_text(self.text_stream.flush())
            parts += self._read_calls(*self.reasoning.end()) if self.reasoning and not self.is_cut else []
        if self.calls:
            parts += self.calls.flush()
            self.is_cut = self.is_cut or self.calls.is_stopped
        elif not self.is_cut:
            parts.append(TextPart(self.text_stop.flush()))
        reason = "stop" if self.is_cut else reason
        reason = "tool_calls" if reason == "stop" and self.calls and self.calls.has_calls else reason
        text, events, places = split_parts(parts)
        return replace(last, text=text, tool_calls=events, call_places=places, finish_reason=reason)

    def _parts_of(self, tokens: TokenIds) -> tuple[list[Part], int]:
        """The text of tokens up to a stop string with the calls in it, and how many tokens that took.

        Token by token, so that where the answer ends does not depend on how tokens came in blocks.
        """
        parts: list[Part] = []
        for i, token in enumerate(tokens):
            parts += self._parts_of_text(self.text_stream.push([token]))
            if self.is_cut:
                return parts, i + 1
        return parts, len(tokens)

    def _parts_of_text(self, text: str) -> list[Part]:
        """The calls in a piece of text, and what is text of it up to a stop string: all of the reasoning is."""
        if self.calls is None:
            return self._text_to_stop(text)
        return self._read_calls(*(self.reasoning.push(text) if self.reasoning else ("", text)))

    def _read_calls(self, reasoning: str, text: str) -> list[Part]:
        assert self.calls is not None
        parts = self._text_to_stop(reasoning) if reasoning else []
        if text and not self.is_cut:
            parts += self.calls.push(text)
            self.is_cut = self.calls.is_over
        return parts

    def _text_to_stop(self, text: str) -> list[Part]:
        shown, self.is_cut = self.text_stop.push(text)
        return [TextPart(shown)] if shown else []


def text_after(prefill: TokenIds, tokenizer: Tokenizer, shown: Collection[int] = ()) -> TextStream:
    """A stream of the text after prefill, from a character on that prefill left incomplete.

    Args:
        shown: Special tokens that are text.
    """
    stream = TextStream(tokenizer, shown)
    for token in prefill.tolist():
        stream.push([token])
    return stream


def _origins(block: Block, num_tokens: int) -> tuple[str, ...]:
    """The drafter of each of the first num_tokens of a block; "target" for the last one of the block."""
    return (*[block.draft.source] * block.num_accepted, "target")[:num_tokens]


def _interval(block: Block) -> Interval:
    return Interval("target", "verify", block.started_s, block.started_s + block.verify_s, len(block.tokens))
