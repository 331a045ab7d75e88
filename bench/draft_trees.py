"""Tokens a second of drafts in chains and in trees, by agreement and by what rows cost, in virtual time.

    python bench/draft_trees.py [--tokens N] [--spread S] [--step C] [--rows R,…] [--agreements A,…]

A made-up target takes 10 ms a pass. The drafter knows how sure it is: the chance of its first choice differs from
token to token, by a beta distribution around the agreement (S = 0 is the same chance everywhere). Of what the
first choice leaves, the second has 0.42, the third 0.18 and so on. Kinds: chain; "beside", a tree whose next best
choices are verified and not drafted on from; tree. A line for each, as JSON.
"""

import json
import random
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from math import log

import numpy as np

from edgespec.decoding.decoder import Can, ForwardingDecoder, Pass, Rows
from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.scheduler import speculative_decode
from edgespec.draft.acceptance_rates import AcceptanceRates
from edgespec.draft.costs import PassCosts
from edgespec.draft.draft_model import DraftCosts, DraftModelStats, RowCosts
from edgespec.draft.measured import MeasuredPolicy
from edgespec.draft.model_drafter import ModelDrafter
from edgespec.simulation.synthetic import VOCAB_SIZE, Context, PacedDecoder, SyntheticDecoder, synthetic_target
from edgespec.system.clock import VirtualClock
from edgespec.types import Row

KINDS = ("chain", "beside", "tree")
_SHARES = (0.42, 0.18, 0.1, 0.06, 0.04)
_LEVELS = 32
_PASS_S = 0.01
_BRANCH = 0.1  # of a step of the drafter, for each further branch


def confident_drafter(agreement: float, spread: float, seed: int = 0) -> SyntheticDecoder:
    """Agrees with `synthetic_target(seed)` as often as it believes: in the mean by a given chance."""
    chances = [agreement] * _LEVELS
    if spread:
        draw = random.Random(1).betavariate
        drawn = sorted(draw(agreement / spread, (1 - agreement) / spread) for _ in range(100 * _LEVELS))
        chances = drawn[50::100]
    rows = [_log_probs(min(max(each, 0.01), 0.99)) for each in chances]
    target = synthetic_target(seed)

    def row_of(context: Context, num_tokens: int) -> Row:
        draw = random.Random(hash((seed, num_tokens, *context)))
        row = rows[draw.randrange(_LEVELS)]
        rank = draw.choices(range(VOCAB_SIZE), np.exp(row[:VOCAB_SIZE]).tolist())[0]
        first = (int(target.row_of(context, num_tokens).argmax()) - rank) % VOCAB_SIZE
        return row[VOCAB_SIZE - first :][:VOCAB_SIZE]

    return SyntheticDecoder(row_of)


def _log_probs(chance: float) -> Row:
    """Log-probabilities by rank, twice, so that a slice of them begins at any rank."""
    tail = (1 - sum(_SHARES)) / (VOCAB_SIZE - 1 - len(_SHARES))
    shares = [*_SHARES, *[tail] * (VOCAB_SIZE - 1 - len(_SHARES))]
    return np.array([log(chance), *(log((1 - chance) * share) for share in shares)] * 2, np.float32)


class _Chains(ForwardingDecoder):
    """A decoder without its trees."""

    can = Can()

    def run(self, given: Pass) -> Rows:
        return self._decoder.run(given)


def run(kind: str, agreement: float, row: float, step: float, spread: float, num_tokens: int) -> dict[str, float]:
    """Decode a text; tokens a second, and tokens and rows of a pass."""
    clock = VirtualClock()
    target = PacedDecoder(synthetic_target(), _pace(_PASS_S, row, by_rows=False), clock)
    drafter = confident_drafter(agreement, spread)
    decoder = PacedDecoder(
        drafter if kind == "tree" else _Chains(drafter),
        _pace(step * _PASS_S, _BRANCH, by_rows=True),
        clock,
    )
    costs = PassCosts({width: 1 + row * (width - 1) for width in (1, 2, 4, 8, 16, 32)}, _PASS_S)
    rows = RowCosts({1: 1.0, 9: 1 + 8 * _BRANCH})
    models = {"model": DraftModelStats(DraftCosts(step, 0.0), rows=rows)}
    policy = MeasuredPolicy(
        [ModelDrafter(decoder, VOCAB_SIZE)],
        costs,
        AcceptanceRates(),
        models,
        clock=clock,
        has_trees=kind != "chain",
    )
    sampler, done, passes, verified = GumbelSampler(SamplingParams()), 0, 0, 0
    for block in speculative_decode(np.zeros(1, np.int32), target, sampler, policy, clock=clock):
        done, passes, verified = done + len(block.tokens), passes + 1, verified + block.num_draft
        if done >= num_tokens:
            break
    return {"tokens_per_s": done / clock(), "tokens": done / passes, "rows": verified / passes}


def _pace(alone_s: float, row: float, *, by_rows: bool) -> Callable[[int, int], float]:
    return lambda num_fed, num_rows: alone_s * (1 + row * max(0, (num_rows if by_rows else num_fed) - 1))


def _numbers(text: str) -> Sequence[float]:
    return [float(each) for each in text.split(",")]


def _arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--spread", type=float, default=1.0, help="0: the drafter is always equally sure")
    parser.add_argument("--step", type=float, default=0.05, help="a step of the drafter, in passes")
    parser.add_argument("--rows", type=_numbers, default=[0.01, 0.02, 0.03, 0.05], help="in passes")
    parser.add_argument("--agreements", type=_numbers, default=[0.4, 0.6, 0.8])
    parser.add_argument("--kinds", type=partial(str.split, sep=","), default=KINDS)
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    for agreement, row, kind in product(args.agreements, args.rows, args.kinds):
        found = run(kind, agreement, row, args.step, args.spread, args.tokens)
        settings = {"kind": kind, "agreement": agreement, "row": row}
        print(json.dumps(settings | {name: round(each, 3) for name, each in found.items()}), flush=True)


if __name__ == "__main__":
    main()
