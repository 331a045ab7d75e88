"""The cost of an answer as a stream of text, relative to its passes alone in the caller's thread.

    python bench/handover.py MODEL [--rounds N]

A stream runs its passes in a thread of their own, and detokenises in the thread that reads it. Decoding is plain,
so each token is a chunk. Both ways run in turn. Printed are the median of the ratios within a round, and the
quartiles around it.
"""

from statistics import median, quantiles
from time import perf_counter

import numpy as np
from command_line import command_line
from interleaved import measure_in_turn

from edgespec import load
from edgespec.engine.engine import Engine
from edgespec.engine.generation import AnswerWriter, Generation
from edgespec.engine.request import AnswerSettings, Request
from edgespec.engine.run_ahead import Ticket

PROMPT = "Tell a long story about a lighthouse, a storm and a letter that came too late."
NUM_TOKENS = 96


def time_loop_s(engine: Engine) -> float:
    """Seconds a pass in this thread, after the first."""
    request = Request(np.array(engine.encode(PROMPT), np.int32), AnswerSettings(max_tokens=NUM_TOKENS))
    generation, ticket = Generation(engine._model, engine._drafting), Ticket()
    passes = generation._passes(engine.target, request, ticket, AnswerWriter(generation, request, ticket))
    next(passes)
    started = perf_counter()
    num_passes = sum(1 for _ in passes)
    return (perf_counter() - started) / num_passes


def time_stream_s(engine: Engine) -> float:
    """Seconds a chunk of `Engine.stream`, after the first chunk."""
    with engine.stream(PROMPT, max_tokens=NUM_TOKENS) as answer:
        next(answer)
        started = perf_counter()
        num_chunks = sum(1 for _ in answer)
        return (perf_counter() - started) / num_chunks


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    with load(options.model, drafter="none") as engine:
        time_stream_s(engine), time_loop_s(engine)  # warm up
        ways = {"loop": lambda _: time_loop_s(engine), "stream": lambda _: time_stream_s(engine)}
        times_s = measure_in_turn(ways, options.rounds)
    ratios = [stream / loop for stream, loop in zip(times_s["stream"], times_s["loop"], strict=True)]
    low, _, high = quantiles(ratios, n=4)
    stream_ms, loop_ms = (1e3 * median(times_s[way]) for way in ("stream", "loop"))
    print(f"{stream_ms:.3f} ms a chunk of a stream, {loop_ms:.3f} ms a pass alone")
    print(f"ratio {median(ratios):.4f}, quartiles {low:.4f} and {high:.4f}, of {options.rounds} pairs")


if __name__ == "__main__":
    main()
