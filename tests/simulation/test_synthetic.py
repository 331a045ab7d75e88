from itertools import islice
from time import thread_time

import numpy as np
import pytest
from double import branch_logits, tree_logits
from hypothesis import given
from hypothesis import strategies as st

from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.scheduler import Plain, speculative_decode
from edgespec.draft.measured import FixedLength
from edgespec.draft.model_drafter import ModelDrafter
from edgespec.engine.answers import Tally
from edgespec.simulation.synthetic import VOCAB_SIZE, SyntheticDecoder, synthetic_drafter, synthetic_target
from edgespec.types import TokenIds, append

PROMPT = np.array([1, 2, 3], np.int32)
GREEDY = GumbelSampler(SamplingParams())


def text(num_tokens: int, seed: int = 0) -> TokenIds:
    """What the target says."""
    tokens = PROMPT
    for block in islice(speculative_decode(PROMPT, synthetic_target(seed), GREEDY, Plain()), num_tokens):
        tokens = append(tokens, block.tokens)
    return tokens


def ranks(acceptance: float, num_tokens: int = 4000, seed: int = 0) -> TokenIds:
    """Where in the drafter's rows the target's tokens stand, from 1."""
    tokens = text(num_tokens, seed)
    rows = synthetic_drafter(acceptance, seed).logits(tokens[:-1], num_tokens)
    of_target = rows[np.arange(num_tokens), tokens[len(PROMPT) :]]
    return 1 + (rows > of_target[:, None]).sum(axis=1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("acceptance", [0.3, 0.54, 0.8, 0.95])
def test_the_targets_token_has_rank_i_with_geometric_chance(acceptance: float) -> None:
    found = ranks(acceptance)
    for i in (1, 2, 3):
        chance = acceptance * (1 - acceptance) ** (i - 1)
        bound = 4 * np.sqrt(chance * (1 - chance) / len(found))
        assert abs(np.mean(found == i) - chance) < bound


def test_tokens_are_kept_apart_from_each_other() -> None:
    right = ranks(0.6) == 1
    assert abs(np.mean(right[1:][right[:-1]]) - np.mean(right[1:][~right[:-1]])) < 0.06


@pytest.mark.parametrize(("acceptance", "first"), [(1.0, True), (0.0, False)])
def test_certain_drafters_are_always_right_or_never(acceptance: float, first: bool) -> None:
    assert {bool(rank == 1) for rank in ranks(acceptance, 300)} == {first}


def test_a_drafters_own_probabilities_are_its_chances() -> None:
    row = synthetic_drafter(0.7).logits(PROMPT, 1)[0]
    probs = np.sort(np.exp(row) / np.exp(row).sum())[::-1]
    np.testing.assert_allclose(probs[:4], [0.7, 0.21, 0.063, 0.0189], rtol=1e-4)


def test_a_drafter_is_right_where_that_is_known() -> None:
    tokens = text(200)
    known: list[bool | None] = [position % 3 != 0 for position in range(100)]
    known[10] = None
    for acceptance in (0.0, 0.7, 1.0):
        rows = synthetic_drafter(acceptance, known=known).logits(tokens[:-1], 200)
        is_right = rows.argmax(axis=1) == tokens[len(PROMPT) :]
        for position in range(len(PROMPT), 100):
            if known[position] is not None:
                assert is_right[position - len(PROMPT)] == known[position]
        assert abs(is_right[100:].mean() - acceptance) < 0.2


def test_texts_of_other_seeds_differ() -> None:
    assert np.mean(text(300) == text(300, seed=1)) < 0.1


def test_a_row_is_a_function_of_its_tokens_however_it_is_asked_for() -> None:
    tokens = text(60)
    for make in (synthetic_target, lambda: synthetic_drafter(0.5)):
        wide = make().logits(tokens, 40)
        decoder = make()
        narrow = np.concatenate([decoder.logits(tokens[: end + 1], 1) for end in range(23, 63)])
        assert np.array_equal(wide, narrow)


@given(st.integers(1, 12), st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8), st.data())
def test_rows_of_a_tree_are_those_of_its_branches(num_tokens: int, nodes: list[int], data: st.DataObject) -> None:
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(len(nodes))]
    ids, decoder = np.array(nodes, np.int32), synthetic_drafter(0.5)
    tokens = text(num_tokens)
    by_branch = branch_logits(synthetic_drafter(0.5), tokens, ids, parents)
    assert np.array_equal(tree_logits(decoder, tokens, ids, parents), by_branch)


def test_it_counts_what_a_cache_would_not_hold() -> None:
    decoder, tokens = synthetic_target(), text(20)
    fed = []
    for call in (tokens, append(tokens[:-3], [7, 7]), append(tokens[:-3], [7, 7, 8])):
        before = decoder.num_fed
        decoder.logits(call, 1)
        fed.append(decoder.num_fed - before)
    assert fed == [23, 2, 1]


def test_drafts_are_kept_as_the_geometric_series_says() -> None:
    tally = Tally()
    policy = FixedLength([ModelDrafter(synthetic_drafter(0.6), VOCAB_SIZE)], 3)
    for block in islice(speculative_decode(PROMPT, synthetic_target(), GREEDY, policy), 2000):
        tally.add(block, len(block.tokens))
    assert tally.tokens / tally.passes == pytest.approx(1 + 0.6 + 0.36 + 0.216, rel=0.04)


def test_a_row_costs_little() -> None:
    tokens = text(100)
    for decoder in (synthetic_target(), synthetic_drafter(0.5)):
        assert _seconds_a_row(decoder, tokens) < 5e-4  # 2e-5 on a core of its own


def _seconds_a_row(decoder: SyntheticDecoder, tokens: TokenIds) -> float:
    taken = []
    for _ in range(5):
        started = thread_time()
        decoder.logits(tokens, 50)
        taken.append((thread_time() - started) / 50)
    return min(taken)
