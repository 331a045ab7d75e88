"""An answer as values: its chunks, and the whole of it. Knows nothing of threads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.decoding.logprobs import TokenLogprob
from edgespec.draft.timeline import Interval
from edgespec.engine.reasoning import CLOSE, OPEN, split_reasoning
from edgespec.engine.stats import Stats
from edgespec.text.call_events import CallEvent, join_calls
from edgespec.text.tool import ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of an answer. The last one says why the answer ended, what it cost, and when each device worked.

    origins: For each token "target", or who drafted it: suffix, ngram, answers, lookahead, or the name of a model.
    logprobs: For each token, if they were asked for.
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
    tool_calls: tuple[CallEvent, ...] = ()
    call_places: tuple[int, ...] = ()
    finish_reason: str | None = None
    stats: Stats | None = None
    timeline: tuple[Interval, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer. token_ids end with the token that completed a stop string, if one did.

    tool_calls: Calls of tools that it asks for; text is what it says beside them.
    """

    text: str
    token_ids: tuple[int, ...]
    origins: tuple[str, ...]
    finish_reason: str
    prompt_tokens: int
    stats: Stats
    timeline: tuple[Interval, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def reasoning(self) -> str:
        """The reasoning of a thinking model before it answered; empty where it did not."""
        return self._parts[0]

    @property
    def answer(self) -> str:
        """The text after the reasoning; all of it where there is none."""
        return self._parts[1]

    @property
    def _parts(self) -> tuple[str, str]:
        # Where the prompt has opened the reasoning, its end alone is in the text.
        head, mark, _ = self.text.partition(CLOSE)
        return split_reasoning(self.text, is_open=bool(mark) and OPEN not in head)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation that goes on, with its calls."""
        calls = {"tool_calls": [call.as_dict() for call in self.tool_calls]} if self.tool_calls else {}
        return {"role": "assistant", "content": self.text, **calls}


def join_chunks(chunks: Sequence[Chunk], prompt_tokens: int) -> Completion:
    """All chunks of an answer as one."""
    last = chunks[-1]
    assert last.finish_reason is not None
    assert last.stats is not None
    return Completion(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        origins=tuple(origin for chunk in chunks for origin in chunk.origins),
        finish_reason=last.finish_reason,
        prompt_tokens=prompt_tokens,
        stats=last.stats,
        timeline=last.timeline,
        logprobs=tuple(each for chunk in chunks for each in chunk.logprobs),
        tool_calls=join_calls(each for chunk in chunks for each in chunk.tool_calls),
    )
