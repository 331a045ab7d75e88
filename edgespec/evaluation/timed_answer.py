"""An answer with the times at which its reader got its first token and its last.

All time between them counts: passes, drafts, the text of tokens and the handover to the reader.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter, process_time, sleep

from edgespec import Chunk, Completion, Engine, Message, SamplingParams, empty_cache, join_chunks
from edgespec.evaluation.document import AnswerRecord

# Threads of a session spin for up to 30 ms of processor time after a pass, and would take a core from the next.
_QUIET_S, _QUIET_SHARE, _MOST_S = 0.02, 0.1, 0.5


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """decode_s is the time from the first chunk to the last, in which num_decoded tokens came."""

    completion: Completion
    first_s: float
    decode_s: float
    num_decoded: int

    def record(self) -> AnswerRecord:
        stats = self.completion.stats
        pass_speed = stats.decode_tokens_per_second
        return {
            "decoded": self.num_decoded,
            "decode_s": self.decode_s,
            "first_token_s": self.first_s,
            "pass_tokens_per_second": pass_speed,
            "passes": max(0, stats.passes - 1),
            "sources": stats.sources,
            "positions": [{"drafted": drafted, "kept": kept} for drafted, kept in stats.counts_by_position],
            "widths": {
                width: {"passes": passes, "seconds": seconds} for width, (passes, seconds) in stats.widths.items()
            },
        }


def time_answer(
    engine: Engine,
    messages: Sequence[Message],
    max_tokens: int,
    sampling: SamplingParams,
    watch: Callable[[int], None] = lambda num_chunks: None,
) -> TimedAnswer:
    """Read an answer and note when its first and its last token came. Raises as Engine.stream does.

    watch is told behind each chunk how many there are.
    """
    begun = perf_counter()
    stream = engine.stream(messages, max_tokens=max_tokens, sampling=sampling)
    chunks: list[Chunk] = []
    times_s: list[float] = []
    for chunk in stream:
        if chunk.token_ids:
            times_s.append(perf_counter())
        chunks.append(chunk)
        watch(len(chunks))
    num_first = next((len(chunk.token_ids) for chunk in chunks if chunk.token_ids), 0)
    completion = join_chunks(chunks, 0)
    return TimedAnswer(
        completion,
        first_s=times_s[0] - begun if times_s else 0.0,
        decode_s=times_s[-1] - times_s[0] if times_s else 0.0,
        num_decoded=len(completion.token_ids) - num_first,
    )


def clear_cache(engine: Engine) -> None:
    """Have nothing of a prompt cached: forget texts, and run a token that none begins with in the first cache."""
    engine.forget_prompts()
    empty_cache(engine.target, engine.plain().encode("a"))


def settle() -> None:
    """Wait until the threads of this process rest, so that those of one model disturb no other."""
    waited_s = 0.0
    while waited_s < _MOST_S:
        before_s = process_time()
        sleep(_QUIET_S)
        waited_s += _QUIET_S
        if process_time() - before_s < _QUIET_SHARE * _QUIET_S:
            return
