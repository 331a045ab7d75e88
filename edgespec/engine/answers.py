"""An answer as values: its chunks, the whole of it, and its figures, a fold over its blocks.

Knows nothing of threads.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any, TypeVar, overload

from edgespec.decoding.logprobs import TokenLogprob
from edgespec.decoding.scheduler import Block
from edgespec.decoding.tree import Tree
from edgespec.draft.acceptance_rates import AcceptanceChange
from edgespec.draft.costs import Gain, PassCosts, measured_gain
from edgespec.draft.timeline import Interval
from edgespec.engine.reasoning import ReasoningGate, split_reasoning
from edgespec.grammar.python_type import read_value
from edgespec.setup.usage import Usage
from edgespec.system.units import format_speed
from edgespec.tools.call_events import CallEvent, join_calls
from edgespec.tools.text_reader import num_begun
from edgespec.tools.tool import ToolCall
from edgespec.types import FinishReason, TokenIds

# Of the time between two passes no more than this share of a pass counts: in longer pauses the answer waited.
_MAX_PAUSE = 0.5
_SHOWN = 60  # characters of a text in a repr
_MOST_WAITED = 0.01  # of the seconds of an answer: what the interval of a gain allows anyway
Value = TypeVar("Value")
_COUNTS = ("rounds", "drafted", "verified", "accepted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Figures of one answer. Rates are None where nothing was measured."""

    decode_tokens_per_second: float | None
    prefill_tokens_per_second: float | None
    time_to_first_token_s: float | None
    tokens_per_pass: float
    acceptance_rate: float | None
    acceptance_by_position: tuple[float, ...]  # of a tree by depth
    passes: int
    num_drafted: int
    num_verified: int  # drafted tokens whose predecessors were all accepted
    num_accepted: int
    num_corrections: int  # passes whose last token replaced a drafted one
    num_bonuses: int  # passes that accepted a whole branch and gave one token more
    num_emitted: int  # tokens that the user got
    num_decoded: int  # tokens after the first pass, which reads the prompt
    sources: dict[str, dict[str, int]]  # rounds, drafted, verified and accepted of each; none is plain decoding
    counts_by_position: tuple[tuple[int, int], ...]  # drafts that reached it, and drafts accepted up to it
    widths: dict[int, tuple[int, float]]  # passes and their seconds, by tokens run; the first pass left out
    drafter: str
    draft_length: str
    target_device: str
    drafter_device: str | None
    schedule: str = "serial"
    overlap: float = 0.0  # share of the time in which target and drafter worked at once
    gain: Gain | None = None  # over plain decoding, measured against passes without a draft; None where it was not
    acceptance: dict[str, AcceptanceChange] = field(default_factory=dict)  # of each source, now and before
    undrafted: dict[str, int] = field(default_factory=dict)  # why passes had no draft, and how many
    num_read: int = 0  # tokens of the prompt that the first pass ran, as no cache held them
    waited_passes: int = 0  # that ended from when one of its own was asked for to when that had ended
    num_redecided: int = 0  # near-ties that were decided as in plain decoding, with --exact
    num_reruns: int = 0  # passes of one token that this took, which passes does not count
    downgrades: tuple[str, ...] = ()  # drafters closed for lack of memory or a fault, and those that came back

    def __repr__(self) -> str:
        speed = self.decode_tokens_per_second
        shown = f", {format_speed(speed)} tokens/s" if speed else ""
        drafts = f", {self.num_accepted} of {self.num_drafted} drafted accepted" if self.num_drafted else ""
        return f"<Stats of {self.num_emitted} tokens in {self.passes} passes{shown}{drafts}>"

    def as_dict(self) -> dict[str, Any]:
        """Figures as JSON values."""
        return asdict(self)


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…")


def usage_of(stats: Stats) -> Usage:
    """What is counted of an answer."""
    decode_s = stats.num_decoded / (stats.decode_tokens_per_second or inf)
    is_measured = bool(stats.gain) or not stats.num_drafted
    return Usage(
        answers=1,
        measured=int(is_measured),
        tokens=stats.num_emitted,
        accepted=min(stats.num_accepted, stats.num_emitted),
        decode_s=decode_s if is_measured else 0.0,
        saved_s=(stats.gain.value - 1.0) * decode_s if stats.gain else 0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of an answer. The last one says why the answer ended, what it cost, and when each device worked.

    origins: For each token "target", or who drafted it: suffix, ngram, answers, lookahead, or the name of a model.
    logprobs: For each token, if they were asked for.
    prompt_logprobs: Of tokens of the prompt, which come before the answer, if they were asked for.
    tool_calls: What it adds to the calls of tools: CallStart, CallArguments and CallEnd.
    call_places: For each of tool_calls, how many characters of text stand before it.
    finish_reason: stop (an end token or a stop string), tool_calls (the same, with calls of tools), length
        (max_tokens), context (no room left), cancelled, timeout (timeout_s), or loop (it repeated itself, in a
        conversation that ends loops).
    """

    text: str
    token_ids: tuple[int, ...]
    origins: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[CallEvent, ...] = ()
    call_places: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stats: Stats | None = None
    timeline: tuple[Interval, ...] = ()

    def __repr__(self) -> str:
        end = f", {self.finish_reason}" if self.finish_reason else ""
        return f"<Chunk {_short(self.text)}, {len(self.token_ids)} tokens{end}>"

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer. token_ids end with the token that completed a stop string, if one did.

    tool_calls: Calls of tools that it asks for; text is what it says beside them.
    schema: What it was asked to match, for parse().
    """

    text: str
    token_ids: tuple[int, ...]
    origins: tuple[str, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    stats: Stats
    timeline: tuple[Interval, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    schema: Any = field(default=None, repr=False)

    def __repr__(self) -> str:
        calls = f", {len(self.tool_calls)} calls" if self.tool_calls else ""
        return f"<Completion {_short(self.text)}, {self.finish_reason}, {len(self.token_ids)} tokens{calls}>"

    def __str__(self) -> str:
        return self.text

    @overload
    def parse(self, kind: type[Value]) -> Value: ...
    @overload
    def parse(self, kind: Any = None) -> Any: ...
    def parse(self, kind: Any = None) -> Any:
        """The answer as a value: of the type that was given as schema, or of another type; else as JSON has it.

            is_blue = engine.generate("Is the sky blue?", schema=bool, max_tokens=8).parse(bool)

        Raises:
            ValueError: It is no JSON, or none of that type, such as an answer that was cut short.
            FormatError: No JSON can be of that type.
        """
        kind = self.schema if kind is None else kind
        with suppress(ValueError):  # one of its texts may have the mark that ends reasoning
            return read_value(kind, self.text)
        try:
            return read_value(kind, self.answer)
        except ValueError as error:
            wanted = "not JSON" if kind is None else "not what was asked for"
            raise ValueError(
                f"the answer, which ended with the finish reason {self.finish_reason}, is {wanted}: {error}"
            ) from None

    @property
    def reasoning(self) -> str:
        """The reasoning of a thinking model before it answered; empty where it did not."""
        return split_reasoning(self.text)[0]

    @property
    def answer(self) -> str:
        """The text after the reasoning; all of it where there is none."""
        return split_reasoning(self.text)[1]

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation that goes on, with its calls."""
        calls = {"tool_calls": [call.as_dict() for call in self.tool_calls]} if self.tool_calls else {}
        return {"role": "assistant", "content": self.text, **calls}


def join_chunks(chunks: Sequence[Chunk], prompt_tokens: int, schema: Any = None) -> Completion:
    """All chunks of an answer as one."""
    last = chunks[-1]
    assert last.finish_reason is not None
    assert last.stats is not None
    events = [each for chunk in chunks for each in chunk.tool_calls]
    return Completion(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        origins=tuple(origin for chunk in chunks for origin in chunk.origins),
        finish_reason=last.finish_reason,
        prompt_tokens=prompt_tokens,
        stats=last.stats,
        timeline=last.timeline,
        logprobs=tuple(each for chunk in chunks for each in chunk.logprobs),
        prompt_logprobs=tuple(each for chunk in chunks for each in chunk.prompt_logprobs),
        tool_calls=join_calls(events) if events else (),
        schema=schema,
    )


@dataclass(slots=True)
class Tally:
    """Counts over the blocks of an answer. The first pass reads the prompt and does not count as decoding."""

    passes: int = 0
    corrections: int = 0
    tokens: int = 0
    decode_tokens: int = 0
    decode_s: float = 0.0
    pause_s: float = 0.0  # between passes, beside drafts
    ended_s: float = 0.0  # when the last pass did, by its clock
    num_read: int = 0  # by the first pass, as no cache held them
    first_s: float | None = None  # that it took
    drafted: list[int] = field(default_factory=list)  # by position: how many drafts reached it, a tree counts once
    accepted: list[int] = field(default_factory=list)
    sources: dict[str, dict[str, int]] = field(default_factory=dict)
    widths: dict[int, tuple[int, float]] = field(default_factory=dict)
    undrafted: dict[str, int] = field(default_factory=dict)

    def add(self, block: Block, num_kept: int) -> None:
        """Count a block of which the user gets num_kept tokens."""
        if self.passes:
            self.decode_tokens += num_kept
            self.decode_s += block.draft_s + block.verify_s
            passes, seconds = self.widths.get(block.num_draft + 1, (0, 0.0))
            self.widths[block.num_draft + 1] = passes + 1, seconds + block.verify_s
            pause_s = block.started_s - self.ended_s - block.draft_s
            self.pause_s += min(max(0.0, pause_s), _MAX_PAUSE * block.verify_s)
        self.ended_s = block.started_s + block.verify_s
        self.passes += 1
        self.tokens += num_kept
        if block.reason:
            self.undrafted[block.reason] = self.undrafted.get(block.reason, 0) + 1
        verified, is_correction = verdicts(block.draft, block.tokens)
        self.corrections += is_correction
        source = self.sources.setdefault(block.draft.source, dict.fromkeys(_COUNTS, 0))
        for name, count in zip(_COUNTS, (1, block.num_draft, verified, block.num_accepted), strict=True):
            source[name] += count
        depth = block.draft.depth
        missing = depth - len(self.drafted)
        self.drafted += [0] * missing
        self.accepted += [0] * missing
        for i in range(depth):
            self.drafted[i] += 1
            self.accepted[i] += i < block.num_accepted

    def stats(self, **setup: Any) -> Stats:
        """The figures.

        setup: Fields of Stats that say what ran: drafter, draft_length, devices, and those that have defaults.
        """
        drafted, verified, accepted = (sum(each[name] for each in self.sources.values()) for name in _COUNTS[1:])
        by_position = tuple(zip(self.drafted, self.accepted, strict=True))
        return Stats(
            decode_tokens_per_second=self.decode_tokens / self.decode_s if self.decode_tokens else None,
            prefill_tokens_per_second=self.num_read / self.first_s if self.first_s else None,
            time_to_first_token_s=self.first_s,
            tokens_per_pass=self.tokens / self.passes if self.passes else 0.0,
            acceptance_rate=accepted / drafted if drafted else None,
            acceptance_by_position=tuple(accepted / reached for reached, accepted in by_position),
            passes=self.passes,
            num_drafted=drafted,
            num_verified=verified,
            num_accepted=accepted,
            num_corrections=self.corrections,
            num_bonuses=self.passes - self.corrections,
            num_emitted=self.tokens,
            num_decoded=self.decode_tokens,
            sources=self.sources,
            counts_by_position=by_position,
            widths=self.widths,
            undrafted=self.undrafted,
            num_read=self.num_read,
            **setup,
        )

    def was_alone(self, num_joined: int, waited_s: float) -> bool:
        """True if its passes ran alone: none as one with those of others, and no wait that a gain would show.

        To enter an empty queue of passes takes some microseconds, too.
        """
        return not num_joined and waited_s <= _MOST_WAITED * ((self.first_s or 0.0) + self.decode_s + self.pause_s)

    def gain(self, costs: PassCosts) -> Gain | None:
        """The gain of drafting, by what passes take; None where nothing was drafted or too little is known."""
        if not sum(self.drafted):
            return None
        pause_s = self.pause_s / max(1, self.passes - 1)
        widths = {width: (passes, taken_s + passes * pause_s) for width, (passes, taken_s) in self.widths.items()}
        return measured_gain(costs, widths, self.decode_tokens, self.decode_s + self.pause_s)


def cancelled_chunk(last: Chunk | None) -> Chunk:
    """The last chunk of an answer as far as it was read, with the figures of its own last one, if it has that."""
    nothing = Tally().stats(drafter="none", draft_length="auto", target_device="none", drafter_device=None)
    stats, timeline = (last.stats, last.timeline) if last else (nothing, ())
    return Chunk(text="", token_ids=(), finish_reason="cancelled", stats=stats, timeline=timeline)


def verdicts(draft: Tree, emitted: TokenIds) -> tuple[int, bool]:
    """How many drafted tokens a pass has judged, and whether its last token replaced one.

    Every token is judged whose predecessors were all accepted: of a chain, the accepted ones and the first that
    was not.
    """
    above, judged, accepted = draft.above, draft.judged(emitted), [-1, *draft.matching(emitted[:-1])]
    return len(judged), any(above[node] == accepted[-1] for node, _ in judged)


class AnswerFrame:
    """Takes the text of an answer in pieces, and leaves out the marks around what comes behind the reasoning.

    The first mark stands before all else there, the second behind it; the white space beside them is left out too.
    """

    def __init__(self, marks: Sequence[str], *, is_open: bool) -> None:
        self._gate = ReasoningGate(is_open=is_open)
        self._opening, self._closing = marks
        self._skips_space = False
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is known to be none of the marks by now."""
        if not (self._closing or self._skips_space):
            return text
        reasoning, text = self._gate.push(text)
        return reasoning + self._within(text)

    def end(self) -> str:
        """The text that was held back."""
        reasoning, text = self._gate.end()
        found, self._held = reasoning + self._within(text) + self._held, ""
        return found

    def _within(self, text: str) -> str:
        text, self._held = self._held + text, ""
        if self._opening:
            begun = text.lstrip()
            if begun != self._opening and self._opening.startswith(begun):
                self._held = text
                return ""
            if not begun.startswith(self._opening):
                self._opening = self._closing = ""
                return text
            text, self._opening, self._skips_space = begun.removeprefix(self._opening), "", True
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        if not self._closing:
            return text
        before, mark, rest = text.partition(self._closing)
        if mark:
            self._closing, self._skips_space = "", True
            return before.rstrip() + self._within(rest)
        shown = text[: len(text) - num_begun(text, [self._closing])].rstrip()
        self._held = text[len(shown) :]
        return shown
