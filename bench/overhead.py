"""What scheduler, gate and sampling take a block, on the rows of a real model.

    python bench/overhead.py MODEL

The rows of a text are taken from the model once and then served from memory, and serving them is not counted.
"""

import argparse
import sys
from time import perf_counter

import numpy as np

from edgespec import SamplingParams, load
from edgespec.chances import Chances
from edgespec.costs import PassCosts
from edgespec.gate import MeasuredGate
from edgespec.sampling import GumbelSampler
from edgespec.scheduler import serial
from edgespec.suffix import SuffixDrafter
from edgespec.types import Logits, TokenIds

TEXT = "Write a Python function that merges two sorted lists into one, with a docstring, then explain it."
SAMPLINGS = {
    "greedy": SamplingParams(),
    "temperature 0.8": SamplingParams(temperature=0.8, seed=1),
    "top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95, seed=1),
    "top-k 40": SamplingParams(temperature=0.8, top_k=40, seed=1),
}
NUM_PROMPT, NUM_BLOCKS = 2000, 200


class Served:
    """Rows in turn, as the last token says; spent_s is what it took to serve them."""

    context_length = 1 << 20
    num_fed = 0

    def __init__(self, rows: Logits) -> None:
        self._rows = rows
        self.vocab_size = rows.shape[1]
        self.spent_s = 0.0

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        started = perf_counter()
        rows = self._rows[tokens[-num_last:] % len(self._rows)]
        self.spent_s += perf_counter() - started
        return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", metavar="MODEL")
    with load(parser.parse_args().model, drafter="none") as engine:
        text = engine.encode(TEXT)
        rows = engine.target.logits(text, len(text)).copy()
    print(f"vocabulary of {rows.shape[1]}, {NUM_BLOCKS} blocks behind {NUM_PROMPT} tokens")
    for name, sampling in SAMPLINGS.items():
        served, num_tokens = Served(rows), 0
        gate = MeasuredGate([SuffixDrafter()], PassCosts({1: 1.0, 4: 1.1, 24: 1.5}, 0.02), Chances())
        prompt = np.arange(NUM_PROMPT, dtype=np.int32) % len(rows)
        blocks = serial(prompt, served, GumbelSampler(sampling, NUM_PROMPT), gate)
        started = perf_counter()
        for _ in range(NUM_BLOCKS):
            num_tokens += len(next(blocks).tokens)
        taken_s = perf_counter() - started - served.spent_s
        print(f"{name:16} {1e3 * taken_s / NUM_BLOCKS:.2f} ms a block of {num_tokens / NUM_BLOCKS:.2f} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
