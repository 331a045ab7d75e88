"""A stream of chunks that a test makes itself, in the place of an engine's."""

from collections.abc import Generator
from dataclasses import replace

from edgespec.decoding.repetition import LoopWatch
from edgespec.engine.answer_stream import AnswerStream
from edgespec.engine.answers import Chunk, Stats
from edgespec.engine.run_ahead import RequestQueue, RunAhead, Ticket


class _Given:
    """Chunks as they were made; the last one of a cancelled answer gets figures, if there are any."""

    def __init__(self, stats: Stats | None) -> None:
        self._stats = stats

    def add(self, new: Chunk) -> Chunk:
        return new

    def finish(self, last: Chunk) -> Chunk:
        return replace(last, stats=last.stats or self._stats)

    def close(self) -> None:
        pass


def stream_of(
    chunks: Generator[Chunk, None, None],
    ticket: Ticket | None = None,
    stats: Stats | None = None,
    *,
    ends_loops: bool = False,
    opens_reasoning: bool = False,
) -> AnswerStream:
    """A stream of chunks, each of which is made when it is asked for."""
    ticket = ticket or Ticket()
    passes = RunAhead(_until_loop(chunks) if ends_loops else chunks, RequestQueue(), ticket, max_ahead=0)
    return AnswerStream(passes, _Given(stats), ticket, opens_reasoning=opens_reasoning)


def _until_loop(chunks: Generator[Chunk, None, None]) -> Generator[Chunk, None, None]:
    watch = LoopWatch()
    for chunk in chunks:
        if watch.find(chunk.token_ids) is not None:
            yield replace(chunk, finish_reason="loop")
            return
        yield chunk
