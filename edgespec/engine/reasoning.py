"""The reasoning of thinking models, which stands between <think> and </think> at the beginning of an answer.

Some families have other marks, for which the text of their answers has these (tools/channels).

Tells it from the answer (the same marks later on are text), and bounds it. The bound is a pure function of the
answer so far, as a grammar is, so that drafts and schedules change nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec.engine.request import Request, under_constraint
from edgespec.errors import UsageError
from edgespec.manifest import Manifest
from edgespec.text.prompt_encoder import Prompt, PromptEncoder
from edgespec.text.tokenizer import Tokenizer
from edgespec.tools import channels
from edgespec.tools.text_reader import num_begun
from edgespec.tools.tool import ToolUse, demands_call
from edgespec.types import TokenConstraint, TokenIds, append

OPEN, CLOSE = channels.THINK_MARKS[0]


class Marks(NamedTuple):
    """The texts around the reasoning as a model writes them; closing is all that stands before its answer."""

    open: str
    close: str
    closing: str


# What stands between the last thought and the answer, as models write it by themselves.
TAGS = Marks(OPEN, CLOSE, f"\n{CLOSE}\n\n")
CHANNELS = Marks(channels.ANALYSIS, channels.END, channels.NEXT + channels.FINAL)


def marks_of(tokenizer: Tokenizer) -> Marks:
    """The marks around reasoning that a model with this tokenizer writes."""
    if tokenizer.channel_marks:
        return CHANNELS
    open, close = tokenizer.think_marks
    return TAGS if open == OPEN else Marks(open + channels.THINK_HEADERS.get(open, ""), close, closing=close)


def _marked_text(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    """The text of tokens, with the marks of reasoning."""
    return partial(tokenizer.decode, shown=tokenizer.special_within((*marks_of(tokenizer), *TAGS)))


_NONE: TokenIds = np.zeros(0, np.int32)
# Tokens in which an answer opens its reasoning: the mark, which few tokenizers cut into more, and white space.
_MOST_OPENING = 16
_TAIL = 16  # tokens at the end of a prompt, in which a template opens the reasoning


class AnswerPart(NamedTuple):
    """A piece of an answer's text, and whether it is part of the reasoning."""

    text: str
    is_reasoning: bool


class ReasoningStream:
    """Takes the text of an answer in pieces and gives its parts, without the marks and the space around them.

    is_open: The prompt has opened the reasoning already, as some chat templates do.
    """

    def __init__(self, *, is_open: bool = False) -> None:
        self._gate = ReasoningGate(is_open=is_open)
        self._mark = "" if is_open else OPEN  # that is yet to come
        self._skips_space = True
        self._space = ""  # at the end of the reasoning so far, which may stand before its closing mark

    @property
    def is_reasoning(self) -> bool:
        return self._gate.is_inside

    def push(self, text: str) -> list[AnswerPart]:
        """Return what is known by now; a mark that is not complete waits."""
        return self._parts(*self._gate.push(text))

    def end(self) -> list[AnswerPart]:
        """Return what was held back, without the space at the end of reasoning that was cut short."""
        return self._parts(*self._gate.end())

    def _parts(self, reasoning: str, text: str) -> list[AnswerPart]:
        if reasoning and self._mark:
            reasoning, self._mark = reasoning.lstrip().removeprefix(self._mark), ""
        reasoning = self._space + reasoning
        is_closed = self._gate.is_over and reasoning.endswith(CLOSE)
        shown = (reasoning.removesuffix(CLOSE) if is_closed else reasoning).rstrip()
        self._space = "" if is_closed else reasoning[len(shown) :]
        if self._gate.is_over and self._mark:  # there is no reasoning
            self._skips_space = False
        parts = self._part(shown, is_reasoning=True)
        self._skips_space = self._skips_space or is_closed
        return parts + self._part(text, is_reasoning=False)

    def _part(self, text: str, *, is_reasoning: bool) -> list[AnswerPart]:
        if self._skips_space:
            text = text.lstrip()
        self._skips_space = self._skips_space and not text
        return [AnswerPart(text, is_reasoning)] if text else []


class ReasoningGate:
    """Takes the text of an answer in pieces, and tells what of it is reasoning, with its marks, as it is written.

    is_open: The prompt has opened the reasoning already.
    """

    def __init__(self, *, is_open: bool = False) -> None:
        self._is_begun = is_open
        self.is_over = False  # nothing that follows is reasoning
        self._held = ""

    @property
    def is_inside(self) -> bool:
        """The reasoning has begun, and not ended."""
        return self._is_begun and not self.is_over

    @property
    def num_held(self) -> int:
        """Characters that wait until it is clear if they are a mark."""
        return len(self._held)

    def push(self, text: str) -> tuple[str, str]:
        """Reasoning that is known by now, and what comes after it; a mark that is not complete waits."""
        if self.is_over:
            return "", text
        self._held += text
        if not self._is_begun:
            begun = self._held.lstrip()
            if OPEN.startswith(begun) and begun != OPEN:
                return "", ""
            self._is_begun, self.is_over = begun.startswith(OPEN), not begun.startswith(OPEN)
        if self.is_over:
            return "", self._take(len(self._held))
        before, mark, _ = self._held.partition(CLOSE)
        if mark:
            self.is_over = True
            return self._take(len(before + mark)), self._take(len(self._held))
        return self._take(len(self._held) - num_begun(self._held, [CLOSE])), ""

    def end(self) -> tuple[str, str]:
        """The text that was held back, as push gives it."""
        held = self._take(len(self._held))
        return (held, "") if self.is_inside else ("", held)

    def _take(self, num: int) -> str:
        taken, self._held = self._held[:num], self._held[num:]
        return taken


def split_reasoning(text: str, *, is_open: bool | None = None) -> tuple[str, str]:
    """The reasoning and the answer of a whole text.

    is_open: As for ReasoningStream; by default where the text has only the mark that ends the reasoning, on a new
        line or right behind a word, and not quoted or in code.
    """
    if is_open is None:
        head, mark, rest = text.partition(CLOSE)
        line = head.rpartition("\n")[2]
        is_quoted = line.endswith((" ", "(", "[", "{")) or line[-1:] + rest[:1] in ("''", '""')
        is_code = head.count("`") % 2 and rest.count("`") % 2  # reasoning may end in a block that is left open
        is_open = bool(mark) and OPEN not in head and not (is_code or (is_quoted and line.strip()))
    stream = ReasoningStream(is_open=is_open)
    parts = [*stream.push(text), *stream.end()]
    return (
        "".join(part.text for part in parts if part.is_reasoning),
        "".join(part.text for part in parts if not part.is_reasoning),
    )


class PlacedBeginning(NamedTuple):
    """A prompt, the beginning of its answer, and whether that is in the reasoning."""

    prompt: TokenIds
    begun: str
    is_open: bool


@dataclass(frozen=True)
class ModelReasoning:
    """The reasoning of a model: if it may, where it begins, and what bounds it."""

    encoder: PromptEncoder
    manifest: Manifest

    @property
    def is_possible(self) -> bool:
        """The chat template or the tokenizer knows the marks."""
        marks = (OPEN, CLOSE)
        return (
            self._are_tokens
            or self.encoder.can_switch_thinking
            or any(map(self.encoder.spells_in_template, marks))
            or any(mark in self.encoder.tokenizer.added_tokens for mark in marks)
        )

    @cached_property
    def answer_marks(self) -> tuple[str, ...]:
        """The texts that the model writes around an answer behind its reasoning."""
        family = self.manifest.architecture
        return next((marks for name, marks in channels.ANSWER_MARKS.items() if family.startswith(name)), ())

    @property
    def _has_channels(self) -> bool:
        return self._marks is CHANNELS

    @property
    def _are_tokens(self) -> bool:
        """The marks are tokens for which the text of an answer has others."""
        return self._has_channels or bool(self.encoder.tokenizer.think_texts)

    @property
    def _marks(self) -> Marks:
        return marks_of(self.encoder.tokenizer)

    @cached_property
    def is_opened_by_template(self) -> bool:
        """Prompts may end with the mark that begins the reasoning."""
        return bool(self.encoder.tokenizer.think_texts) or self.encoder.spells_in_template(OPEN)

    def is_open(self, prompt: TokenIds) -> bool:
        """True if a prompt ends with the mark that begins the reasoning, as its chat template can have it."""
        if not self.is_opened_by_template:
            return False
        # At its very end: the mark may also stand in a message, of which nothing begins.
        return self._tail(prompt).rstrip().endswith(self._marks.open.rstrip())

    def opens(self, prompt: Prompt, prefill: str, options: Mapping[str, Any]) -> bool:
        """True if an answer begins in the reasoning, as Engine.opens_reasoning tells it."""
        if not (self.is_possible if prefill else self.is_opened_by_template):
            return False
        return self.place(self.encoder.encode(prompt, **options, is_bounded=True), prefill).is_open

    def _tail(self, prompt: TokenIds) -> str:
        tokenizer = self.encoder.tokenizer
        return tokenizer.decode(prompt[-_TAIL:], tokenizer.special_tokens.values())

    def _closing(self) -> TokenIds:
        return self.encoder.tokenizer.encode(self._marks.closing, special=True, is_behind_text=True)

    def place(self, prompt: TokenIds, begun: str) -> "PlacedBeginning":
        """Fit the beginning of an answer to a prompt whose template may have opened the reasoning.

        The opening mark does not come twice. Where the beginning has neither mark, it is no reasoning, which is
        closed before it.
        """
        if self._are_tokens:
            return self._place_by_tokens(prompt, begun)
        is_open, text = self.is_open(prompt), begun.lstrip()
        is_marked = text.startswith(OPEN)
        if is_open and is_marked:
            begun = text.removeprefix(OPEN)
            begun = begun.removeprefix("\n") if self._tail(prompt).endswith("\n") else begun
        elif is_open and text and CLOSE not in text:
            is_open, prompt = False, append(prompt, self._closing())
        return PlacedBeginning(prompt, begun, (is_open or is_marked) and CLOSE not in text)

    def _place_by_tokens(self, prompt: TokenIds, begun: str) -> "PlacedBeginning":
        """Puts the beginning of an answer behind a prompt, with marks as tokens or as headers of messages."""
        encode = partial(self.encoder.tokenizer.encode, is_behind_text=True)
        is_open, (before, mark, rest) = self.is_open(prompt), begun.lstrip().partition(CLOSE)
        is_marked = before.startswith(OPEN)
        if not (is_marked or (is_open and (mark or not before))):
            if self._has_channels:
                prompt = append(prompt, encode(channels.FINAL, special=True))
            elif is_open:
                prompt = append(prompt, self._closing())
            return PlacedBeginning(prompt, begun, is_open=False)
        if not is_open:
            prompt = append(prompt, encode(self._marks.open, special=True))
        thought = before.removeprefix(OPEN).lstrip() if is_marked else before
        if not mark:
            return PlacedBeginning(prompt, thought, is_open=True)
        closed = append(encode(thought.rstrip()), self._closing())
        return PlacedBeginning(append(prompt, closed), rest.lstrip(), is_open=False)

    def begin_answer(self, prompt: TokenIds, *, has_tools: bool) -> TokenIds:
        """The prompt of an answer that has to match a format, or to be a call, from its first token.

        So it has no reasoning.

        has_tools: It may be a call, for which some models have a channel of its own.
        """
        if self._has_channels:
            return prompt if has_tools else self._place_by_tokens(prompt, "").prompt
        return append(prompt, self._closing()) if self.is_open(prompt) else prompt

    def bounded(self, request: Request, num_tokens: int) -> Request:
        """The request, with an end to the reasoning of its answer after num_tokens."""
        tokenizer = self.encoder.tokenizer
        constraint = ThinkingBudget(
            num_tokens,
            self.manifest.vocab_size,
            self._closing(),
            _marked_text(tokenizer),
            self._marks,
            is_open=self.is_open(request.prompt),
            inner=request.constraint,
        )
        drafters = under_constraint(request.drafters, constraint, len(request.prompt))
        return request._replace(constraint=constraint, drafters=drafters)

    def require_budget_possible(self, use: ToolUse | None, response_format: object, banned: Sequence[str]) -> None:
        """Raises UsageError: The model never reasons, an answer has no place for it, or must not hold its end."""
        if not self.is_possible:
            raise UsageError(
                f"thinking_budget is given, but {self.manifest.name} does not reason before it answers: neither "
                f"its chat template nor its tokenizer has {OPEN}; leave it out or choose a thinking model"
            )
        if response_format is not None or (use is not None and demands_call(use.choice)):
            other = "response_format" if response_format is not None else "a tool that must be called"
            raise UsageError(
                f"thinking_budget is given with {other}, which an answer has to begin with, so that it has no "
                "reasoning; leave one of them out"
            )
        closing = self._marks.closing
        if kept_out := next((text for text in banned if text and text in closing), None):
            raise UsageError(
                f"{kept_out!r} is banned, and reasoning ends with {closing!r} where thinking_budget is spent; "
                "leave one of them out"
            )


@dataclass(frozen=True, slots=True)
class ThinkingBudget(TokenConstraint):
    """Lets an answer reason for num_tokens, not counting the mark that opens the reasoning, and closes it then.

    What an answer was given to begin with counts too.

    closing: Tokens that close the reasoning, [num_closing].
    decode: The text of tokens, with the marks of reasoning.
    marks: Those of the model.
    is_open: The prompt has opened the reasoning; otherwise the answer does, or there is none.
    inner: What else the answer has to match.
    """

    num_tokens: int
    vocab_size: int
    closing: TokenIds
    decode: Callable[[Sequence[int]], str]
    marks: Marks = TAGS
    is_open: bool = False
    inner: TokenConstraint | None = None

    def next_closing(self, answer: TokenIds) -> TokenIds:
        """The tokens that close the reasoning and are not written yet; none where it is not to be closed."""
        if not self._may_close(len(answer), len(answer)):
            return _NONE
        begin = find_reasoning(answer, self.decode, is_open=self.is_open, mark=self.marks.open)
        if begin is None or not 0 <= (num_written := len(answer) - begin - self.num_tokens) < len(self.closing):
            return _NONE
        reasoning = self.decode(answer[begin : begin + self.num_tokens].tolist())
        return _NONE if self.marks.close in reasoning else self.closing[num_written:]

    def _may_close(self, first: int, last: int) -> bool:
        """True if answers of first to last tokens may be where the reasoning is closed, whatever they are."""
        return last >= self.num_tokens and first < self.num_tokens + _MOST_OPENING + len(self.closing)

    def bias(self, answer: TokenIds) -> npt.NDArray[np.float32] | None:
        if len(closing := self.next_closing(answer)):
            bias = np.full(self.vocab_size, -np.inf, np.float32)
            bias[closing[0]] = 0
            return bias
        return None if self.inner is None else self.inner.bias(answer)

    def forced(self, answer: TokenIds, max_tokens: int) -> TokenIds:
        if len(closing := self.next_closing(answer)):
            return closing[:max_tokens]
        return _NONE if self.inner is None else self.inner.forced(answer, max_tokens)

    def num_allowed(self, answer: TokenIds, tokens: TokenIds) -> int:
        num = len(tokens) if self.inner is None else self.inner.num_allowed(answer, tokens)
        if not self._may_close(len(answer), len(answer) + num):
            return num
        for i in range(num):
            closing = self.next_closing(append(answer, tokens[:i]))
            if len(closing) and closing[0] != tokens[i]:
                return i
        return num

    def has_ample_room(self, answer: TokenIds) -> bool:
        if len(self.next_closing(answer)):
            return False
        return self.inner is None or self.inner.has_ample_room(answer)

    def leaves_room(self, answer: TokenIds, token: int) -> bool:
        if len(closing := self.next_closing(answer)):
            return token == int(closing[0])
        return self.inner is None or self.inner.leaves_room(answer, token)

    def bounds_loop(self, answer: TokenIds, span_length: int) -> bool:
        return self.inner is not None and self.inner.bounds_loop(answer, span_length)

    def way_out(self, answer: TokenIds) -> int:
        if len(closing := self.next_closing(answer)):
            return int(closing[0])
        assert self.inner is not None
        return self.inner.way_out(answer)


def find_reasoning(
    answer: TokenIds, decode: Callable[[Sequence[int]], str], *, is_open: bool, mark: str
) -> int | None:
    """Where the reasoning begins in an answer, behind its mark; None where there is none, or not yet.

    is_open: The prompt has opened it.
    mark: It begins behind this.
    """
    if is_open:
        return 0
    for num in range(1, min(len(answer), _MOST_OPENING) + 1):
        text = decode(answer[:num].tolist()).lstrip()
        if text.startswith(mark):
            return num
        if not mark.startswith(text):
            return None
    return None


def has_spent(answer: TokenIds, num_tokens: int, tokenizer: Tokenizer, *, is_open: bool) -> bool:
    """True if the reasoning of an answer was closed as it had num_tokens; is_open as in find_reasoning."""
    marks, decode = marks_of(tokenizer), _marked_text(tokenizer)
    begin = find_reasoning(answer, decode, is_open=is_open, mark=marks.open)
    if begin is None or len(answer) <= begin + num_tokens:
        return False
    return marks.close not in decode(answer[begin : begin + num_tokens].tolist())
