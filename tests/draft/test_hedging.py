"""Which branches a drafter drafts on from: those that yield the most used tokens in the time of a step."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.decoding.tree import NO_DRAFT, Tree, Worth
from edgespec.draft.acceptance_rates import AcceptanceRates
from edgespec.draft.hedging import behind, choose, typical_branching
from edgespec.draft.model_drafter import Guess, step_of
from edgespec.draft.model_rates import ModelRates, others_key

FREE = (1.0,) * 32


def odds(accepted: float = 0.8, others: float = 0.5, row_costs: tuple[float, ...] = FREE) -> Worth:
    return Worth((accepted,), row_costs, others=(others,) * 4, min_used=0.0)


def chain(num_tokens: int) -> Tree:
    tree = NO_DRAFT
    for i in range(num_tokens):
        others = (20 + i, 30 + i, 40 + i, 50 + i)
        tree = tree.grown(step_of([Guess(10 + i, others=others)], [i - 1]))
    return tree


@given(
    chances=st.lists(st.floats(0.001, 1), min_size=1, max_size=7),
    steps=st.lists(st.floats(0, 0.5), min_size=7, max_size=7),
)
def test_no_other_set_of_branches_yields_more_for_its_cost(chances: list[float], steps: list[float]) -> None:
    chances.sort(reverse=True)
    costs = [1 + sum(steps[:rows]) for rows in range(7)]
    num_rows = odds(row_costs=tuple(costs)).num_branches(chances)
    best = sum(chances[:num_rows]) / costs[num_rows - 1]
    sets = (each for size in range(1, len(chances) + 1) for each in combinations(chances, size))
    assert best == pytest.approx(max(sum(each) / costs[len(each) - 1] for each in sets))


def test_free_rows_are_all_used_and_dear_ones_not_at_all() -> None:
    assert len(choose(chain(4), odds(), 3, 9)[1]) == 9
    dear = odds(row_costs=tuple(1.0 + rows for rows in range(32)))
    assert len(choose(chain(1), dear, 0, 9)[1]) == 1


def test_the_likeliest_outcome_is_drafted_on_from_first() -> None:
    tree, nodes = choose(chain(3), odds(accepted=0.3, others=0.9), 2, 1)
    assert tree.tokens[nodes].tolist() == [20], "the first guess is wrong, and the next choice is right"
    sure, nodes = choose(chain(3), odds(accepted=0.95), 2, 1)
    assert (len(sure.tokens), nodes) == (3, [2]), "the end of the chain"


def test_a_step_too_seldom_used_is_left_out_and_so_is_what_lies_too_far_ahead() -> None:
    seldom = Worth((0.1,), FREE, others=(0.1,), min_used=0.5)
    assert choose(chain(3), seldom, 2, 9)[1] == []
    assert choose(chain(3), odds(), 2, 9, longest=0)[1] == []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, 9), st.integers(0, 3))
def test_what_is_drafted_after_an_outcome_serves_the_text_that_takes_it(
    seeds: list[int], max_rows: int, num_verified: int
) -> None:
    """Each branch is found again by its tokens, and no node is drafted on from twice."""
    tree = chain(2)
    for depth, _ in enumerate(seeds):
        tree, nodes = choose(tree, odds(), num_verified, max_rows)
        assert not set(nodes) & set(tree.nodes_run)
        found = [Guess(100 * (depth + 1) + i, others=(60, 61)) for i in range(len(nodes))]
        tree = tree.grown(behind(tree, nodes, found, odds()))
        for node, guess in zip(nodes, found, strict=True):
            served = tree.after(tree.tokens[tree.path(node)])
            assert served is not None
            assert served.parents is None
            assert served.tokens[0] == guess.token
    left = tree.after(np.array([99], np.int32))
    assert left is None


def test_a_miss_is_counted_for_the_alternatives_that_came_first() -> None:
    for token, wanted in ((31, [False, True]), (99, [False] * 4), (11, [])):
        seen = list[bool]()

        class Rates(AcceptanceRates):
            def observe(self, source: str, bucket: int, is_accepted: bool, seen: list[bool] = seen) -> None:
                assert (source, bucket) == (others_key("model"), len(seen))
                seen.append(is_accepted)

        ModelRates(Rates(), "model").observe_miss(chain(2), np.array([10, token], np.int32))
        assert seen == wanted


def test_what_branches_are_worth_falls_with_the_cost_of_rows() -> None:
    found = [typical_branching([1 + cost * rows for rows in range(25)]) for cost in (0.0, 0.05, 0.2, 1.0)]
    assert found == sorted(found, reverse=True)
    assert found[0][1] > 0.99
    assert found[-1] == (1, 0.0)
