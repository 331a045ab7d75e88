"""Next best choices are verified beside a chain where their chance is worth more than their row."""

from itertools import combinations, product

import numpy as np
import pytest

from edgespec.decoding import trees
from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.scheduler import speculative_decode
from edgespec.drafters.model_drafter import ModelDrafter
from edgespec.policy.acceptance_rates import AcceptanceRates
from edgespec.policy.costs import PassCosts
from edgespec.policy.measured import MeasuredPolicy
from edgespec.policy.model_rates import others_key
from edgespec.policy.side_nodes import choose_side_nodes, may_pay
from edgespec.runtimes.paced import PacedDecoder
from edgespec.runtimes.table import TableDecoder
from edgespec.system.clock import VirtualClock
from edgespec.types import Draft, DraftRequest, TokenIds

RATES, ALTERNATIVES = (0.6, 0.5, 0.4), (0.5, 0.3, 0.2)


def expected(nodes: tuple[tuple[int, int], ...]) -> float:
    """Tokens of a pass over the chain of RATES and these side nodes."""
    total, reached = 1.0, 1.0
    for position, rate in enumerate(RATES):
        left = reached * (1 - rate)
        for rank, alternative in enumerate(ALTERNATIVES):
            total += left * alternative * ((position, rank) in nodes)
            left *= 1 - alternative
        reached *= rate
        total += reached
    return total


@pytest.mark.parametrize("row", [0.01, 0.03, 0.08, 0.2])
def test_the_nodes_that_are_chosen_are_the_best_of_all(row: float) -> None:
    times_s = [1 + row * width for width in range(30)]
    speed, nodes = choose_side_nodes(RATES, ALTERNATIVES, times_s, 0.1)
    every = list(product(range(3), range(3)))
    best = max(
        expected(subset) / (0.1 + times_s[3 + len(subset)])
        for size in range(len(every) + 1)
        for subset in combinations(every, size)
    )
    assert speed == pytest.approx(best)
    assert speed == pytest.approx(expected(nodes) / (0.1 + times_s[3 + len(nodes)]))
    assert (len(nodes) == 0) == (row == 0.2)


def test_a_pass_is_no_wider_than_its_times_are_known() -> None:
    assert len(choose_side_nodes((0.5,), (0.5,) * 8, [1.0] * 4)[1]) == 2


def test_only_cheap_rows_may_pay() -> None:
    cheap, dear = ({width: 1 + row * (width - 1) for width in (1, 2, 4, 8, 16)} for row in (0.03, 0.17))
    assert [may_pay(each) for each in (cheap, dear, {}, {1: 1.0})] == [True, False, False, False]


def test_side_nodes_are_the_next_best_choices_of_the_drafter() -> None:
    decoder = TableDecoder(50, seed=1)
    sampler = GumbelSampler(SamplingParams())
    tokens = np.array([3, 4], np.int32)
    request = DraftRequest(3, num_others=2, side_nodes=((0, 0), (0, 1), (2, 0)))
    draft = ModelDrafter(decoder, 50).draft(tokens, request, sampler)
    assert draft.parents == (-1, 0, 1, -1, -1, 1)
    chain = ModelDrafter(decoder, 50).draft(tokens, DraftRequest(3), sampler)
    assert draft.trunk().tokens.tolist() == chain.tokens.tolist()
    assert draft.trunk().parents is None
    row = decoder.logits(tokens, 1)[0].argsort()[::-1]
    assert draft.tokens[[0, 3, 4]].tolist() == row[:3].tolist()


def run(row_s: float, has_trees: bool) -> tuple[TokenIds, int, AcceptanceRates, float]:
    """Decode 300 tokens with a drafter that agrees often; text, side nodes verified, rates, virtual seconds."""
    clock = VirtualClock()
    target, drafter = (
        TableDecoder(40, seed=1),
        TableDecoder(40, seed=2, near=TableDecoder(40, seed=1), nearness=0.6),
    )
    paced = PacedDecoder(target, lambda width, rows: 0.01 + row_s * (width - 1), clock.sleep, clock)
    slow = PacedDecoder(drafter, lambda width, rows: 0.0005, clock.sleep, clock)
    costs = PassCosts({width: 1 + row_s / 0.01 * (width - 1) for width in (1, 2, 4, 8, 16, 32)})
    rates = AcceptanceRates()
    policy = MeasuredPolicy([ModelDrafter(slow, 40)], costs, rates, clock=clock, has_trees=has_trees)
    tokens, num_side = np.array([1, 2, 3], np.int32), 0
    blocks = speculative_decode(
        tokens, paced, GumbelSampler(SamplingParams()), policy, max_tokens=300, clock=clock
    )
    emitted: list[int] = []
    for block in blocks:
        emitted += block.tokens.tolist()
        num_side += block.num_draft - len(block.draft.trunk().tokens)
        if len(emitted) >= 300:
            break
    return np.array(emitted[:300]), num_side, rates, clock()


def test_cheap_rows_are_used_for_trees_which_are_faster_and_dear_ones_are_not() -> None:
    chain, tree, dear = run(0.0002, False), run(0.0002, True), run(0.003, True)
    assert np.array_equal(chain[0], tree[0])
    assert np.array_equal(chain[0], dear[0])
    assert chain[1] == 0
    assert tree[1] > 100 > dear[1]
    assert tree[3] < 0.97 * chain[3]
    assert tree[2].num_judged(others_key("model")) > 20


def test_trunk_of_a_chain_is_the_chain() -> None:
    draft = Draft(np.array([1, 2], np.int32), (0, 1))
    assert draft.trunk() is draft
    assert trees.depths((-1, 0, -1)).tolist() == [1, 2, 1]
