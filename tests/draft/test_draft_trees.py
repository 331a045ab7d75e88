"""Drafts of a drafter model are trees where rows are cheap, and no tree changes a text."""

from collections.abc import Iterator

import numpy as np
import pytest
from table_decoder import TableDecoder

from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.scheduler import Block, speculative_decode
from edgespec.draft.acceptance_rates import AcceptanceRates
from edgespec.draft.costs import PassCosts
from edgespec.draft.draft_model import DraftCosts, DraftModelStats, RowCosts, TreeGain, may_pay
from edgespec.draft.measured import MeasuredPolicy
from edgespec.draft.model_drafter import ModelDrafter
from edgespec.draft.model_rates import NUM_CLASSES, confidence_class, nodes_key, typical_probability
from edgespec.simulation.synthetic import PacedDecoder
from edgespec.system.clock import VirtualClock

GREEDY, PROMPT, NUM_TOKENS = SamplingParams(), np.array([1, 2, 3], np.int32), 300


def test_only_cheap_rows_may_pay() -> None:
    cheap, dear = ({width: 1 + row * (width - 1) for width in (1, 2, 4, 8, 16)} for row in (0.03, 0.17))
    assert [may_pay(each) for each in (cheap, dear, {}, {1: 1.0})] == [True, False, False, False]


def test_a_class_holds_its_typical_probability_and_no_higher_one_holds_less() -> None:
    for confidence in range(NUM_CLASSES):
        is_first = confidence < NUM_CLASSES // 2
        assert confidence_class(typical_probability(confidence), is_first=is_first) == confidence
    classes = [confidence_class(probability, is_first=True) for probability in np.linspace(0, 1, 101)]
    assert classes == sorted(classes)
    assert classes[0] == 0
    assert classes[-1] == NUM_CLASSES // 2 - 1


def test_trees_count_as_chains_until_they_promise_more() -> None:
    gain = TreeGain()
    assert gain.ratio == 1
    for _ in range(200):
        gain.observe(3.0, 2.0)
    assert gain.ratio == pytest.approx(1.5, rel=0.01)
    for _ in range(200):
        gain.observe(1.5, 2.0)
    assert gain.ratio == 1


class Run:
    """A text decoded by a measured policy with a drafter that agrees often, under a virtual clock."""

    def __init__(self, row_s: float, params: SamplingParams = GREEDY, *, has_trees: bool = True) -> None:
        self.clock, self.rates = VirtualClock(), AcceptanceRates()
        self.target = TableDecoder(40, seed=1)
        near = TableDecoder(40, seed=2, near=TableDecoder(40, seed=1), nearness=0.6)
        self.paced, self.drafter = (
            PacedDecoder(decoder, pace, self.clock)
            for decoder, pace in (
                (self.target, lambda width, rows: 0.01 + row_s * (width - 1)),
                (near, lambda width, rows: 0.0005 + 0.00005 * rows),
            )
        )
        costs = PassCosts({width: 1 + row_s / 0.01 * (width - 1) for width in (1, 2, 4, 8, 16, 32)})
        models = {"model": DraftModelStats(DraftCosts(0.05, 0.005), rows=RowCosts({1: 1.0, 2: 1.1}))}
        self.policy = MeasuredPolicy(
            [ModelDrafter(self.drafter, 40)], costs, self.rates, models, clock=self.clock, has_trees=has_trees
        )
        self.sampler = GumbelSampler(params)
        self.blocks = list(self._blocks())
        self.text = np.concatenate([block.tokens for block in self.blocks])[:NUM_TOKENS].tolist()

    def _blocks(self) -> Iterator[Block]:
        num_tokens = 0
        for block in speculative_decode(PROMPT, self.paced, self.sampler, self.policy, clock=self.clock):
            num_tokens += len(block.tokens)
            yield block.without_logits()
            if num_tokens >= NUM_TOKENS:
                return

    @property
    def num_beside(self) -> int:
        """Nodes that were verified beside a trunk."""
        return sum(block.num_draft - len(block.draft.trunk().tokens) for block in self.blocks)


def plain_text(params: SamplingParams) -> list[int]:
    tokens, target, sampler = PROMPT, TableDecoder(40, seed=1), GumbelSampler(params)
    while len(tokens) < len(PROMPT) + NUM_TOKENS:
        tokens = np.append(tokens, sampler(target.logits(tokens, 1)[0], tokens)).astype(np.int32)
    return tokens[len(PROMPT) :].tolist()


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8, seed=3)], ids=["greedy", "sampled"])
def test_cheap_rows_are_used_for_trees_which_are_faster_and_change_no_text(params: SamplingParams) -> None:
    chain, tree = Run(0.0002, params, has_trees=False), Run(0.0002, params)
    assert plain_text(params) == chain.text == tree.text
    assert chain.num_beside == 0
    assert tree.num_beside > 100
    assert any(
        parent >= len(block.draft.trunk().tokens) for block in tree.blocks for parent in block.draft.parents or ()
    )
    assert tree.clock() < 0.97 * chain.clock()
    assert tree.rates.counts(nodes_key("model"))[1] > 20
    assert chain.rates.counts(nodes_key("model"))[1] == 0
    assert list(tree.policy.acceptance_changes()) == ["model"]


def test_trees_where_rows_are_dear_are_chains() -> None:
    tree = Run(0.008)
    assert tree.text == plain_text(GREEDY)
    assert tree.num_beside == 0
