"""Which branches a drafter drafts on from: those that yield the most used tokens in the time of a step."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.drafters.branches import Branches, GuessTree, typical_branching
from edgespec.drafters.guess import Guess
from edgespec.types import Missed, Worth

TEXT = np.array([1, 2, 3], np.int32)
FREE = (1.0,) * 32


def odds(accepted: float = 0.8, others: float = 0.5, row_costs: tuple[float, ...] = FREE) -> Worth:
    return Worth((accepted,), row_costs, others=(others,) * 4, min_used=0.0)


def chain(num_tokens: int) -> list[Guess]:
    return [Guess(10 + i, others=(20 + i, 30 + i, 40 + i, 50 + i)) for i in range(num_tokens)]


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
    assert len(Branches(TEXT, chain(4)).choose(3, odds(), 9, 99)[1]) == 9
    dear = odds(row_costs=tuple(1.0 + rows for rows in range(32)))
    assert len(Branches(TEXT, chain(1)).choose(0, dear, 9, 99)[1]) == 1


def test_the_likeliest_outcome_is_drafted_on_from_first() -> None:
    step, nodes = Branches(TEXT, chain(3)).choose(2, odds(accepted=0.3, others=0.9), 1, 99)
    assert [guess.token for guess in step.guesses] == [20], (
        "the first guess is wrong, and the next choice is right"
    )
    sure, nodes = Branches(TEXT, chain(3)).choose(2, odds(accepted=0.95), 1, 99)
    assert (sure.guesses, nodes) == ([], [2]), "the end of the chain"


def test_a_step_too_seldom_used_is_left_out_and_so_is_what_lies_too_far_ahead() -> None:
    seldom = Worth((0.1,), FREE, others=(0.1,), min_used=0.5)
    assert Branches(TEXT, chain(3)).choose(2, seldom, 9, 99)[1] == []
    assert Branches(TEXT, chain(3)).choose(2, odds(), 9, 0)[1] == []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, 9), st.integers(0, 3))
def test_whoever_is_given_the_steps_sees_the_tree_that_the_lane_grows(
    seeds: list[int], max_rows: int, num_verified: int
) -> None:
    """Each branch is found again by its tokens, and the nodes of a step lie behind those that it chose."""
    branches, given_tree = Branches(TEXT, chain(2)), GuessTree()
    given_tree.add(branches.first.guesses)
    for depth, _ in enumerate(seeds):
        alternatives, nodes = branches.choose(num_verified, odds(), max_rows, 99)
        found = [Guess(100 * (depth + 1) + i, others=(60, 61)) for i in range(len(nodes))]
        step = branches.add(found, nodes, odds())
        given_tree.add(alternatives.guesses)
        given_tree.add(step.guesses)
        for node, guess in zip(nodes, found, strict=True):
            path = []
            while node >= 0:
                path.append(branches.nodes[node].token)
                node = branches.nodes[node].after
            tokens = np.array(path[::-1], np.int32)
            for behind in (
                given_tree.path_after(tokens),
                branches.chain_after(np.concatenate([TEXT, tokens])),
            ):
                assert behind is not None
                assert guess.token in [each.token for each in behind] or behind[0].token < 100


def test_a_miss_says_how_many_alternatives_came_first() -> None:
    tree = GuessTree()
    tree.add(Branches(TEXT, chain(2)).first.guesses)
    assert tree.path_after(np.array([10], np.int32)) is not None
    assert tree.take_missed() is None
    assert tree.path_after(np.array([10, 31], np.int32)) is None
    assert tree.take_missed() == Missed(1, is_named=True)
    assert tree.path_after(np.array([99], np.int32)) is None
    assert tree.take_missed() == Missed(4, is_named=False)
    assert tree.take_missed() is None


def test_what_branches_are_worth_falls_with_the_cost_of_rows() -> None:
    found = [typical_branching([1 + cost * rows for rows in range(25)]) for cost in (0.0, 0.05, 0.2, 1.0)]
    assert found == sorted(found, reverse=True)
    assert found[0][1] > 0.99
    assert found[-1] == (1, 0.0)
