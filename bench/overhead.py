"""What scheduler, gate and sampling take a block, on the rows of a real model.

    python bench/overhead.py MODEL

The rows of a text are taken from the model once and then served from memory, and serving them is not counted.
Drafts come from the text. Under rejection three tokens a block come from a drafter whose rows are the model's with
noise, and drawing them counts. Time is that of the processor: what a busy machine gives to others is not counted.
Beside it stands what looking once at each row that gave a token takes, and at the end what one row takes.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from time import thread_time

import numpy as np

from edgespec import SamplingParams, load
from edgespec.acceptance import equality
from edgespec.chances import Chances
from edgespec.costs import PassCosts
from edgespec.drafters import ModelDrafter
from edgespec.gate import FixedGate, MeasuredGate
from edgespec.rejection import rejection
from edgespec.sampling import GumbelSampler
from edgespec.scheduler import Gate, serial
from edgespec.suffix import SuffixDrafter
from edgespec.truncation import nucleus, weights_of
from edgespec.types import Acceptance, Logits, Row, TokenIds

TEXT = "Write a Python function that merges two sorted lists into one, with a docstring, then explain it."
WARM = {"temperature": 0.8, "seed": 1}
CASES: dict[str, tuple[SamplingParams, Acceptance]] = {
    "greedy": (SamplingParams(), equality),
    "temperature 0.8": (SamplingParams(**WARM), equality),
    "top-p 0.95": (SamplingParams(**WARM, top_p=0.95), equality),
    "top-k 40": (SamplingParams(**WARM, top_k=40), equality),
    "min-p 0.05": (SamplingParams(**WARM, min_p=0.05), equality),
    "top-p, penalties": (
        SamplingParams(**WARM, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1),
        equality,
    ),
    "rejection, top-k": (SamplingParams(**WARM, top_k=40), rejection),
    "rejection, top-p": (SamplingParams(**WARM, top_p=0.95), rejection),
    "rejection": (SamplingParams(**WARM), rejection),
}
NUM_PROMPT, NUM_BLOCKS, NUM_DRAFT = 2000, 200, 3


class Served:
    """Rows in turn, as the last token says; spent_s is what it took to serve them."""

    context_length = 1 << 20
    num_fed = 0

    def __init__(self, rows: Logits) -> None:
        self._rows = rows
        self.vocab_size = rows.shape[1]
        self.spent_s = 0.0

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        started = thread_time()
        rows = self._rows[tokens[-num_last:] % len(self._rows)]
        self.spent_s += thread_time() - started
        return rows


def blocks(
    rows: Logits, noisy: Logits, sampling: SamplingParams, accept: Acceptance
) -> Iterator[tuple[float, float, int]]:
    """Of each block: its seconds, those of finding the largest logits of its rows, and its tokens."""
    target, drafter = Served(rows), Served(noisy)
    gate: Gate = MeasuredGate([SuffixDrafter()], PassCosts({1: 1.0, 4: 1.1, 24: 1.5}, 0.02), Chances())
    if accept is rejection:
        gate = FixedGate([ModelDrafter(drafter, drafter.vocab_size)], NUM_DRAFT, with_distributions=True)
    prompt = np.arange(NUM_PROMPT, dtype=np.int32) % len(rows)
    made = serial(prompt, target, GumbelSampler(sampling, NUM_PROMPT), gate, accept)
    for _ in range(NUM_BLOCKS):
        started, served_s = thread_time(), target.spent_s + drafter.spent_s
        block = next(made)
        taken_s = thread_time() - started - (target.spent_s + drafter.spent_s - served_s)
        used = block.logits[: len(block.tokens)]
        yield taken_s, sum(seconds(np.argmax, row) for row in used), len(used)


def seconds(work: Callable[[Row], object], row: Row) -> float:
    started = thread_time()
    work(row)
    return thread_time() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", metavar="MODEL")
    with load(parser.parse_args().model, drafter="none") as engine:
        text = engine.encode(TEXT)
        rows = engine.target.logits(text, len(text)).copy()
    noise = np.random.default_rng(0).normal(0, 0.5, rows.shape)
    noisy = rows + noise.astype(np.float32)
    print(f"vocabulary of {rows.shape[1]}, {NUM_BLOCKS} blocks behind {NUM_PROMPT} tokens; ms of processor time")
    for name, (sampling, accept) in CASES.items():
        taken_s, looked_s, num_tokens = np.array(list(blocks(rows, noisy, sampling, accept))).T
        block_ms, token_ms = 1e3 * taken_s.mean(), 1e3 * taken_s.sum() / num_tokens.sum()
        print(
            f"{name:17} {block_ms:.2f} a block of {num_tokens.mean():.2f} tokens, {token_ms:.2f} a token; "
            f"{1e3 * looked_s.mean():.2f} to look at its rows"
        )
    each: dict[str, Callable[[Row], object]] = {
        "its largest logit": np.argmax,
        "weights of all, and their sum": lambda row: weights_of(row, row.max(), WARM["temperature"]).sum(),
        "nucleus of 0.95": lambda row: nucleus(row, row.max(), WARM["temperature"], 0.95),
    }
    for name, work in each.items():
        taken_ms = [1e3 * seconds(work, row) for row in np.tile(rows, (10, 1))]
        print(f"a row's {name}: {np.mean(taken_ms):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
