"""A tree of guesses has the nodes that are worth their rows, and grows while its steps are worth their time."""

from collections.abc import Sequence
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from table_decoder import TableDecoder

from edgespec.decoding.decoder import CHAINS, ForwardingDecoder, Pass, Rows
from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.tree import NO_DRAFT, Tree, Worth
from edgespec.draft.drafter import DraftRequest
from edgespec.draft.model_drafter import Guess, ModelDrafter, next_choices
from edgespec.draft.model_rates import NUM_CLASSES, typical_probability
from edgespec.system.cancel import Flag
from edgespec.types import append

TEXT, MOST = np.array([3, 4], np.int32), 24
CHANCES = tuple(typical_probability(each) for each in range(NUM_CLASSES))
SAMPLERS = [GumbelSampler(SamplingParams()), GumbelSampler(SamplingParams(temperature=0.9, seed=5))]


def worth(row: float = 0.03, step: float = 0.1, branch: float = 0.01) -> Worth:
    return Worth(
        accepted=(0.6,),
        chances=CHANCES,
        pass_times=[1 + row * num_nodes for num_nodes in range(MOST + 1)],
        step_times=[step + branch * num_rows for num_rows in range(MOST)],
    )


def grown(worth: Worth, deepest: int, probabilities: Sequence[float], *, has_branches: bool = True) -> Tree:
    """A tree all of whose guesses have these probabilities, best first, and other tokens."""
    tree, token = NO_DRAFT, 0
    while tips := tree.tips(worth, deepest, has_branches=has_branches):
        ranks, guesses = len(probabilities), []
        for _ in tips:
            others, rest = tuple(range(token + 1, token + ranks)), tuple(probabilities[1:])
            guesses.append(Guess(token, probabilities[0], others=others, other_probabilities=rest))
            token += ranks
        tree = tree.grown(next_choices(tree, tips, guesses, worth))
    return tree


def path_chances(whole: Tree, draft: Tree) -> list[float]:
    """The chance that the text runs through each node of a draft of the best guesses."""
    assert whole.parents is not None
    places, found = {token: place for place, token in enumerate(whole.tokens.tolist())}, []
    for token in draft.tokens.tolist():
        path = whole.path(places[token])
        found.append(float(np.prod([CHANCES[whole.buckets[node]] for node in path])))
    assert draft.chances == pytest.approx(found)
    return found


@pytest.mark.parametrize("row", [0.001, 0.03, 0.1, 0.3])
def test_the_nodes_of_a_draft_are_the_best_of_all(row: float) -> None:
    """No other part of the tree whose steps were run yields more for the time of its pass."""
    believed = worth(row, step=0.15)
    tree = grown(believed, 2, (0.62, 0.18, 0.076))
    draft = tree.best(believed)
    chances = [CHANCES[4], CHANCES[10], CHANCES[9]]
    first, tips = (*tree.steps, 0)[:2]
    assert first == 1
    nodes = [(chance, None) for chance in chances]
    nodes += [(chances[parent] * chance, parent) for parent, chance in product(range(tips), chances)]
    whole = [
        subset
        for size in range(1, len(nodes) + 1)
        for subset in combinations(range(len(nodes)), size)
        if all(nodes[node][1] is None or nodes[node][1] in subset for node in subset)
    ]
    best = max(sum(nodes[node][0] for node in subset) - row * len(subset) for subset in whole)
    assert sum(path_chances(tree, draft)) - row * len(draft.tokens) == pytest.approx(best)


@given(
    row=st.floats(0.0, 0.4),
    step=st.floats(0.0, 0.4),
    branch=st.floats(0.0, 0.1),
    first=st.floats(0.5, 0.98),
    depth=st.integers(1, 6),
)
def test_a_draft_is_a_tree_within_its_bounds(
    row: float, step: float, branch: float, first: float, depth: int
) -> None:
    rest = 1 - first
    believed = worth(row, step, branch)
    tree = grown(believed, depth, (first, rest / 2, rest / 4))
    draft = tree.best(believed)
    assert 1 <= len(draft.tokens) <= MOST
    assert len(draft.buckets) == len(draft.tokens) == len(set(draft.tokens.tolist()))
    assert len(tree.tokens) == 3 * sum(tree.steps)
    parents = draft.parents if draft.parents is not None else range(-1, len(draft.tokens) - 1)
    assert all(parent < node for node, parent in enumerate(parents))
    assert draft.depth <= depth
    assert draft.depth <= len(tree.steps)
    trunk = draft.trunk()
    assert trunk.parents is None
    assert trunk.tokens.tolist() == draft.tokens[: len(trunk.tokens)].tolist()
    chances = path_chances(tree, draft)
    if len(chances) > 1:
        assert min(chances) >= row - 1e-9


def test_free_steps_and_rows_fill_the_pass_and_dear_steps_are_not_made() -> None:
    free = worth(0.0, 0.0, 0.0)
    assert len(grown(free, 9, (0.6, 0.3)).best(free).tokens) == MOST
    dear = worth(0.0, step=0.7)
    tree = grown(dear, 4, (0.6, 0.3))
    assert tree.steps == (1,)
    assert tree.best(dear).parents == (-1, -1)


def test_without_branches_next_best_choices_are_leaves() -> None:
    tree = grown(worth(), 4, (0.5, 0.4), has_branches=False)
    draft = tree.best(worth())
    assert set(tree.steps) == {1}
    assert draft.parents is not None
    assert max(draft.parents) < len(draft.trunk().tokens)


class Chains(ForwardingDecoder):
    """A decoder without its trees."""

    can = CHAINS

    def run(self, given: Pass) -> Rows:
        return self._decoder.run(given)


def drafted(worth: Worth, sampler: GumbelSampler, *, has_branches: bool = True, num_tokens: int = 4) -> Tree:
    decoder = TableDecoder(50, seed=1)
    drafter = ModelDrafter(decoder if has_branches else Chains(decoder), 50)
    return drafter.draft(TEXT, DraftRequest(num_tokens, worth=worth), sampler).best(worth)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("has_branches", [True, False])
def test_children_of_a_node_are_the_best_choices_of_the_drafter_behind_it(
    sampler: GumbelSampler, has_branches: bool
) -> None:
    draft, decoder = drafted(worth(0.01, 0.02, 0.0), sampler, has_branches=has_branches), TableDecoder(50, seed=1)
    assert draft.parents is not None
    assert len(draft.tokens) > 8
    for parent in {-1, *draft.parents}:
        children = [node for node, above in enumerate(draft.parents) if above == parent]
        text = append(TEXT, draft.tokens[draft.path(parent)])
        ranked = sampler.ranked(decoder.logits(text, 1)[0], text, len(children))
        assert draft.tokens[children].tolist() == ranked


@pytest.mark.parametrize("sampler", SAMPLERS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("has_branches", [True, False])
def test_a_tree_of_dear_rows_is_a_chain(sampler: GumbelSampler, has_branches: bool) -> None:
    draft = drafted(worth(0.6, 0.0), sampler, has_branches=has_branches)
    chain = ModelDrafter(TableDecoder(50, seed=1), 50).draft(TEXT, DraftRequest(4), sampler)
    assert draft.parents is None
    assert draft.tokens.tolist() == chain.tokens[: len(draft.tokens)].tolist()


def test_a_tree_ends_where_it_is_cancelled_and_at_the_end_of_the_context() -> None:
    cancel = Flag()
    cancel.set()
    drafter, free = ModelDrafter(TableDecoder(50, seed=1, context_length=4), 50), worth(0.0, 0.0, 0.0)
    assert not len(drafter.draft(TEXT, DraftRequest(4, cancel=cancel, worth=free), SAMPLERS[0]).tokens)
    found = drafter.draft(TEXT, DraftRequest(4, worth=free), SAMPLERS[0])
    assert found.parents is not None
    assert found.depth == 2


def test_a_drafter_that_spells_its_guesses_anew_drafts_a_chain() -> None:
    drafter = ModelDrafter(TableDecoder(50, seed=1), 50, respell=list)
    assert not drafter.can.trees
    draft = drafter.draft(TEXT, DraftRequest(3, worth=worth(0.0, 0.0)), SAMPLERS[0])
    chain = ModelDrafter(TableDecoder(50, seed=1), 50).draft(TEXT, DraftRequest(3), SAMPLERS[0])
    assert draft.parents is None
    assert draft.tokens.tolist() == chain.tokens.tolist()
