"""A stream of chunks that a test makes itself, in the place of an engine's."""

from collections.abc import Generator
from dataclasses import replace

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
    passes = RunAhead(chunks, RequestQueue(), ticket, max_ahead=0)
    options = {"ends_loops": ends_loops, "opens_reasoning": opens_reasoning}
    return AnswerStream(passes, _Given(stats), ticket, **options)
