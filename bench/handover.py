"""What it takes that an answer is made in a thread of its own, beside the same loop in the caller's.

    python bench/handover.py MODEL [--rounds N]

Plain decoding, so that each token is a chunk and there is a handover for each. Both ways take turns, and
what is printed is the median of the pairs' ratios, with the middle half of them.
"""

import argparse
import sys
from statistics import median, quantiles
from time import perf_counter

from edgespec import SamplingParams, load
from edgespec.answering import Request
from edgespec.engine import Engine
from edgespec.turns import Turn

PROMPT = "Tell a long story about a lighthouse, a storm and a letter that came too late."
NUM_TOKENS = 96


def direct_s(engine: Engine) -> float:
    """Seconds of the loop in this thread, from the first chunk to the last."""
    request = Request(engine.encode(PROMPT), SamplingParams(), NUM_TOKENS, ())
    chunks = engine._answering().chunks(engine.target, request, Turn(lambda: None))
    next(chunks)
    started = perf_counter()
    num_chunks = sum(1 for _ in chunks)
    return (perf_counter() - started) / num_chunks


def streamed_s(engine: Engine) -> float:
    """The same as users have it."""
    with engine.stream(PROMPT, max_tokens=NUM_TOKENS) as answer:
        next(answer)
        started = perf_counter()
        num_chunks = sum(1 for _ in answer)
        return (perf_counter() - started) / num_chunks


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    with load(options.model, drafter="none") as engine:
        streamed_s(engine), direct_s(engine)
        pairs = []
        for i in range(options.rounds):
            ways = (streamed_s, direct_s) if i % 2 else (direct_s, streamed_s)
            taken = {way: way(engine) for way in ways}
            pairs.append((taken[streamed_s], taken[direct_s]))
    ratios = [streamed / direct for streamed, direct in pairs]
    low, _, high = quantiles(ratios, n=4)
    streamed_ms, direct_ms = (1e3 * median(way) for way in zip(*pairs, strict=True))
    print(f"{streamed_ms:.3f} ms a chunk in a thread of its own, {direct_ms:.3f} ms in the caller's")
    print(f"ratio {median(ratios):.4f}, middle half {low:.4f} to {high:.4f}, of {options.rounds} pairs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
