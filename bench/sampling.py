"""The processor time of scheduler, draft policy and sampling for a block, on logits of a real model.

    python bench/sampling.py MODEL

The logits of a text are taken from the model once and then served from memory, which is not counted. Drafts come
from the text. Under rejection three tokens a block come from a drafter whose logits are the model's with noise;
drawing them counts. Processor time leaves out what a busy machine gives to other programs. Printed beside each
figure is the time of looking once at each row that gave a token, and at the end the time of steps over one row.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import thread_time

import numpy as np
from command_line import command_line

from edgespec import SamplingParams, load
from edgespec.decoding.acceptance import Acceptance, equality, rejection
from edgespec.decoding.decoder import Decoder, Pass, Rows
from edgespec.decoding.sampling import GumbelSampler
from edgespec.decoding.scheduler import DraftPolicy, speculative_decode
from edgespec.decoding.truncation import nucleus, weights_of
from edgespec.draft.acceptance_rates import AcceptanceRates
from edgespec.draft.costs import PassCosts
from edgespec.draft.measured import FixedLength, MeasuredPolicy
from edgespec.draft.model_drafter import ModelDrafter
from edgespec.draft.suffix import SuffixDrafter
from edgespec.errors import EdgeSpecError
from edgespec.system.console import print_stderr
from edgespec.types import Logits, Row

TEXT = "Write a Python function that merges two sorted lists into one, with a docstring, then explain it."
WARM = SamplingParams(temperature=0.8, seed=1)
TOP_P, TOP_K = replace(WARM, top_p=0.95), replace(WARM, top_k=40)
PENALTIES = replace(TOP_P, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1)
CASES: dict[str, tuple[SamplingParams, Acceptance]] = {
    "greedy": (SamplingParams(), equality),
    "temperature 0.8": (WARM, equality),
    "top-p 0.95": (TOP_P, equality),
    "top-k 40": (TOP_K, equality),
    "min-p 0.05": (replace(WARM, min_p=0.05), equality),
    "top-p, penalties": (PENALTIES, equality),
    "rejection, top-k": (TOP_K, rejection),
    "rejection, top-p": (TOP_P, rejection),
    "rejection": (WARM, rejection),
}
NUM_PROMPT, NUM_BLOCKS, NUM_DRAFT = 2000, 200, 3


class ReplayDecoder(Decoder):
    """Serves recorded rows, chosen by the last token. serving_s is the time spent on this."""

    context_length = 1 << 20
    num_fed = 0

    def __init__(self, rows: Logits) -> None:
        self._rows = rows
        self.vocab_size = rows.shape[1]
        self.serving_s = 0.0

    def run(self, given: Pass) -> Rows:
        started = thread_time()
        rows = self._rows[given.tokens[-given.num_rows :] % len(self._rows)]
        self.serving_s += thread_time() - started
        return Rows(rows)


def time_blocks(
    rows: Logits, noisy: Logits, sampling: SamplingParams, accept: Acceptance
) -> Iterator[tuple[float, float, int]]:
    """Seconds of each block, seconds of finding the largest logits of its rows, and its number of tokens."""
    target, drafter = ReplayDecoder(rows), ReplayDecoder(noisy)
    policy: DraftPolicy = MeasuredPolicy(
        [SuffixDrafter()], PassCosts({1: 1.0, 4: 1.1, 24: 1.5}, 0.02), AcceptanceRates()
    )
    if accept is rejection:
        policy = FixedLength([ModelDrafter(drafter, drafter.vocab_size)], NUM_DRAFT, with_distributions=True)
    prompt = np.arange(NUM_PROMPT, dtype=np.int32) % len(rows)
    blocks = speculative_decode(prompt, target, GumbelSampler(sampling, NUM_PROMPT), policy, accept)
    for _ in range(NUM_BLOCKS):
        started, serving_s = thread_time(), target.serving_s + drafter.serving_s
        block = next(blocks)
        block_s = thread_time() - started - (target.serving_s + drafter.serving_s - serving_s)
        used = block.logits[: len(block.tokens)]
        yield block_s, sum(time_s(np.argmax, row) for row in used), len(used)


def time_s(work: Callable[[Row], object], row: Row) -> float:
    started = thread_time()
    work(row)
    return thread_time() - started


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("model", metavar="MODEL")
    try:
        with load(parser.parse_args().model, drafter="none") as engine:
            text = np.array(engine.encode(TEXT), np.int32)
            rows = engine.target.logits(text, len(text)).copy()
    except EdgeSpecError as error:
        print_stderr(f"sampling: {error}")
        return error.exit_code
    noisy = rows + np.random.default_rng(0).normal(0, 0.5, rows.shape).astype(np.float32)
    print(f"vocabulary of {rows.shape[1]}, {NUM_BLOCKS} blocks after {NUM_PROMPT} tokens; ms of processor time")
    for name, (sampling, accept) in CASES.items():
        blocks_s, look_s, num_tokens = np.array(list(time_blocks(rows, noisy, sampling, accept))).T
        block_ms, token_ms = 1e3 * blocks_s.mean(), 1e3 * blocks_s.sum() / num_tokens.sum()
        print(
            f"{name:17} {block_ms:.2f} a block of {num_tokens.mean():.2f} tokens, {token_ms:.2f} a token; "
            f"{1e3 * look_s.mean():.2f} to look at its rows"
        )
    steps: dict[str, Callable[[Row], object]] = {
        "largest logit": np.argmax,
        "weights of all tokens, and their sum": lambda row: weights_of(row, row.max(), WARM.temperature).sum(),
        "nucleus of 0.95": lambda row: nucleus(row, row.max(), WARM.temperature, 0.95),
    }
    for name, step in steps.items():
        row_ms = [1e3 * time_s(step, row) for row in np.tile(rows, (10, 1))]
        print(f"one row, {name}: {np.mean(row_ms):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
