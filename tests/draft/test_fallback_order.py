"""As memory gets short a device with cheap rows drafts by a model, by lookahead, from the text, and not at all."""

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import groupby, islice

import numpy as np
import numpy.typing as npt
import pytest
from imitated_machine import MIB, Machine
from table_decoder import TableDecoder

from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.scheduler import Block, Plain, speculative_decode
from edgespec.draft.costs import PassCosts, pass_costs
from edgespec.draft.drafter import Drafter
from edgespec.draft.drafter_sets import Candidate, OpenModel, drafter_sets
from edgespec.draft.lookahead import best_window
from edgespec.draft.memory_watch import MemoryWatch
from edgespec.draft.model_drafter import ModelDrafter
from edgespec.draft.pool import ChangeLog, DrafterPool
from edgespec.draft.pool_policy import PoolPolicy
from edgespec.draft.speculation import Speculation
from edgespec.draft.text_source import make_text_drafters
from edgespec.memory.free_memory import HOST, FreeByPlace, FreeMemory
from edgespec.memory.pressure import NO_PRESSURE
from edgespec.simulation.synthetic import PacedDecoder
from edgespec.system.cancel import Cancel
from edgespec.types import Report

VOCAB = 400
PROMPT = np.arange(1, 6, dtype=np.int32)
SAMPLER = GumbelSampler(SamplingParams(), len(PROMPT))
STEP_S, ROW = 0.01, 0.03
# Tokens that a pass costs 3 % of a step for each, as a GPU would; measured as a profile measures them.
COSTS = pass_costs({width: STEP_S * (1 + ROW * (width - 1)) for width in (1, 2, 4, 8, 16)})
TEXT_MIB = {frozenset({"suffix", "lookahead"}): 4, frozenset({"suffix"}): 2, frozenset({"ngram"}): 1}


class Verses(TableDecoder):
    """A language of verses: each begins with one of 60 tokens by chance and goes on by rule."""

    def _row(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        token = 5 * int(tokens[-1]) + 1
        if len(tokens) % 12 == 0:
            token = 7 * int(np.random.default_rng((int(tokens[-1]), len(tokens))).integers(60))
        return np.eye(VOCAB, dtype=np.float32)[token % VOCAB]


class Ladder:
    """A pool on an imitated device, whose other programs a test lets take memory."""

    def __init__(self, costs: PassCosts) -> None:
        self.machine = Machine()
        self.window = best_window(costs)
        ahead = {"lookahead"} if self.window else set()
        sets = drafter_sets(
            [[self.model()]],
            frozenset({"suffix"} | ahead),
            frozenset({"suffix"} | ahead),
            lambda names: TEXT_MIB.get(names, 0) * MIB,
        )
        self.total_bytes = 0
        self.pool = DrafterPool(
            sets,
            VOCAB,
            self.texts,
            watch=MemoryWatch(
                [each.tier for each in sets],
                free=self.free,
                clock=self.machine.clock,
                pressure=lambda: NO_PRESSURE,
            ),
            changes=ChangeLog(self.machine.reported.append),
        )

    def model(self) -> Candidate:
        def opened(cancel: Cancel, report: Report) -> OpenModel:
            decoder = Verses(VOCAB, 1)
            return OpenModel(ModelDrafter(decoder, VOCAB, "model"), decoder, self.machine)

        return Candidate("model", {HOST: 200 * MIB}, opened)

    def texts(self, names: frozenset[str]) -> list[Drafter]:
        return list(make_text_drafters(names, self.window if "lookahead" in names else None))

    def free(self) -> FreeByPlace:
        held = self.pool.drafter_sets[self.pool.watch.position].tier.needed.get(HOST, 0)
        return {HOST: FreeMemory(self.total_bytes - held, "a test")}

    def answer(self, free_mib: Callable[[int], int], num_blocks: int) -> list[tuple[str, Block]]:
        """Blocks with the drafters that were there; free_mib is what all drafters together may take and leave."""
        clock = self.machine.clock
        paced = PacedDecoder(Verses(VOCAB, 1), lambda fed, rows: STEP_S * (1 + ROW * (rows - 1)), clock)
        speculation = Speculation(self.pool.drafters, None, COSTS.ratios)
        policy = PoolPolicy(self.pool, speculation)
        found = []
        self.total_bytes = free_mib(0) * MIB
        for block in islice(speculative_decode(PROMPT, paced, SAMPLER, policy, clock=clock), num_blocks):
            found.append((self.pool.drafter_set.name, block))
            self.total_bytes = free_mib(len(found)) * MIB
            clock.sleep(0.1)  # so that each round looks
        policy.close()
        return found


def plain_tokens(num_tokens: int) -> list[int]:
    blocks = islice(speculative_decode(PROMPT, Verses(VOCAB, 1), SAMPLER, Plain()), num_tokens)
    return [int(token) for block in blocks for token in block.tokens]


def test_each_way_to_draft_is_left_for_the_next_smaller_one_and_the_text_stays() -> None:
    ladder = Ladder(COSTS)
    ladder.pool.start({HOST: FreeMemory(1 << 40, "a test")}, {})
    budgets = [400, 60, 51, 49, 10]  # MiB; 48 are to stay free
    length = 80
    found = ladder.answer(lambda num: budgets[min(num // length, 4)], length * len(budgets))
    assert [name for name, _ in groupby(name for name, _ in found)] == [
        "lookahead+suffix+model",
        "lookahead+suffix",
        "suffix",
        "ngram",
        "plain decoding",
    ]
    sources: dict[str, Counter[str]] = {}
    for name, block in found:
        sources.setdefault(name, Counter())[block.draft.source] += 1
    assert sources["lookahead+suffix"]["lookahead"] > length // 4
    assert sources["lookahead+suffix"]["suffix"] > 0
    assert set(sources["suffix"]) <= {"suffix", "none"}
    assert set(sources["ngram"]) <= {"ngram", "none"}
    assert sources["suffix"]["suffix"] > 0
    assert sources["ngram"]["ngram"] > 0
    assert set(sources["plain decoding"]) == {"none"}
    tokens = [int(token) for _, block in found for token in block.tokens]
    assert tokens == plain_tokens(len(tokens))
    news = ladder.pool.take_changes()
    assert [line.split()[2] for line in news] == ["down"] * 4


def test_lookahead_gains_on_a_device_whose_rows_cost_three_percent() -> None:
    ladder = Ladder(COSTS)
    ladder.pool.start({HOST: FreeMemory(60 * MIB + (48 << 20), "a test")}, {})
    assert ladder.pool.drafter_set.name == "lookahead+suffix"
    blocks = [block for _, block in ladder.answer(lambda num: 120, 300)]
    ahead = [block for block in blocks if block.draft.source == "lookahead"]
    yielded = sum(len(block.tokens) for block in ahead)
    taken_s = sum(block.verify_s for block in ahead)
    assert len(ahead) > 50
    assert yielded * STEP_S / taken_s > 1.06


@pytest.mark.parametrize("ratios", [{1: 1.0, 8: 2.3, 16: 3.7}, {1: 1.0, 2: 1.19, 4: 1.39, 8: 2.0, 16: 3.3}])
def test_without_cheap_rows_the_suffix_automaton_follows_the_model(ratios: Mapping[int, float]) -> None:
    """Rows of SmolLM2 on a CPU, and of ONNX Runtime's table for an A100."""
    names = [each.name for each in Ladder(PassCosts(dict(ratios))).pool.drafter_sets]
    assert names == ["suffix+model", "suffix", "ngram", "plain decoding"]
