"""A pass of an answer: what of it and of its text belongs to the answer, how it is run, and how long it took."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import nan
from time import perf_counter
from typing import NamedTuple

from edgespec.decoding.decoder import Decoder, Pass
from edgespec.decoding.greedy import BestRows, Reruns
from edgespec.decoding.logprobs import TokenLogprob, text_logprobs
from edgespec.decoding.pass_queue import Caller
from edgespec.decoding.repetition import LoopWatch
from edgespec.decoding.scheduler import Block
from edgespec.engine.request import Request
from edgespec.tools.text_reader import num_begun
from edgespec.types import FinishReason, TokenIds


@dataclass(slots=True)
class TokenStop:
    """Cuts a stream of blocks at an end token, which is not part of the answer, after max_tokens, or in a loop."""

    eos_token_ids: Collection[int]
    max_tokens: int
    loops: LoopWatch | None = None
    num_tokens: int = 0

    def cut(self, tokens: TokenIds) -> tuple[TokenIds, FinishReason | None]:
        """The tokens that belong to the answer, and the finish reason if it ends here."""
        room = self.max_tokens - self.num_tokens
        kept = tokens[:room]
        reason: FinishReason | None = "length" if len(tokens) >= room else None
        for i, token in enumerate(kept.tolist()):
            if token in self.eos_token_ids:
                kept, reason = tokens[:i], "stop"
                break
        if self.loops and (num := self.loops.find(kept.tolist())) is not None:
            kept, reason = kept[:num], "loop"
        self.num_tokens += len(kept)
        return kept, reason

    def is_end(self, tokens: TokenIds, num_before: int) -> bool:
        """True if an answer that has tokens behind num_before of them ends with these."""
        return int(tokens[-1]) in self.eos_token_ids or len(tokens) - num_before >= self.max_tokens


class TextStop:
    """Cuts a stream of text at that of several strings which is complete first, wherever the stream is cut.

    Of those that end there the longest counts. Text that may be the start of one is held back until it is clear.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [string for string in strings if string]
        self._held = ""
        self._num_cut = 0
        self.is_cut = False  # one was found

    @property
    def num_hidden(self) -> int:
        """Characters at the end of the text so far that are not shown, or not yet."""
        return len(self._held) + self._num_cut

    def push(self, text: str) -> tuple[str, bool]:
        """The text that can be shown, and whether the answer ends there."""
        if not self._strings:
            return text, False
        self._held += text
        complete = [(at + len(string), at) for string in self._strings if (at := self._held.find(string)) >= 0]
        if complete:
            _, at = min(complete)
            shown, self._num_cut, self._held = self._held[:at], len(self._held) - at, ""
            self.is_cut = True
            return shown, True
        cut = len(self._held) - num_begun(self._held, self._strings)
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def flush(self) -> str:
        """The text that was held back, when no more comes."""
        shown, self._held = self._held, ""
        return shown


class AnswerPass(NamedTuple):
    """A pass of an answer, the part of it that belongs to the answer, and the target's counts at that time."""

    block: Block | None  # without logits, of which many may wait; None for a pass over the prompt alone
    kept: TokenIds  # the block up to an end token or the count
    finish_reason: FinishReason | None  # if the answer ends with it
    num_fed: int  # tokens that the target has run for the answer
    made_s: float  # seconds since the first pass began
    reruns: Reruns  # of the answer so far
    learn: Callable[[], None]  # has the policy learn from it, while the next pass runs
    logprobs: tuple[TokenLogprob, ...]  # of each token of kept, or of the prompt, if they were asked for


def with_enough_rows(target: Decoder, request: Request) -> Decoder:
    """The target, or one that finds the likeliest tokens alone where these are enough for an answer."""
    options = request.options
    needs_rows = options.logprobs is not None or request.mask is not None or request.constraint is not None
    is_best_enough = not needs_rows and request.sampling.is_of_best and target.can.best
    return BestRows(target) if is_best_enough else target


def prompt_passes(target: Decoder, request: Request) -> Iterator[AnswerPass]:
    """Passes over a prompt alone: for the log-probabilities of its tokens, and where no answer follows."""
    started, fed, tokens = perf_counter(), target.num_fed, request.tokens

    def done(found: tuple[TokenLogprob, ...] = (), reason: FinishReason | None = None) -> AnswerPass:
        num_fed, made_s = target.num_fed - fed, perf_counter() - started
        return AnswerPass(None, tokens[:0], reason, num_fed, made_s, Reruns(), lambda: None, found)

    if request.options.prompt_logprobs:
        first = (TokenLogprob(int(tokens[0]), nan),)
        yield from map(done, chain([first], text_logprobs(target, tokens, request.options.logprobs or 0)))
    if not request.max_tokens:
        target.run(Pass(tokens, num_last=1, num_prompt=len(request.prompt)))
        yield done(reason="length")


class AnswerClock:
    """The time less that in which an answer's passes waited for others, which is no cost of drafting."""

    def __init__(self, caller: Caller) -> None:
        self._caller, self._waited_s = caller, caller.waited_s  # before the block that is made

    def __call__(self) -> float:
        return perf_counter() - self._caller.waited_s

    def in_ordinary_time(self, block: Block) -> Block:
        before_s, self._waited_s = self._waited_s, self._caller.waited_s
        if not self._waited_s:
            return block
        waited_s = self._waited_s - before_s
        return block._replace(started_s=block.started_s + before_s, verify_s=block.verify_s + waited_s)
