from threading import Event

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgespec.drafters import FirstOf, ModelDrafter, NgramDrafter, NoDrafter
from edgespec.runtimes.table import TableDecoder
from edgespec.sampling import GumbelSampler, SamplingParams
from edgespec.types import TokenIds

GREEDY = GumbelSampler(SamplingParams())
NEVER = Event()


def ids(*tokens: int) -> TokenIds:
    return np.array(tokens, np.int32)


def naive_lookup(tokens: list[int], num_tokens: int, shortest: int, longest: int) -> list[int]:
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                return tokens[start + length :][:num_tokens]
    return []


def test_ngram_continues_the_example_of_its_docstring() -> None:
    assert NgramDrafter(min_match=1).draft(ids(1, 2, 3, 1, 2), 3, GREEDY, NEVER).tolist() == [3, 1, 2]


def test_ngram_without_a_match_has_no_guess() -> None:
    assert NgramDrafter().draft(ids(1, 2, 3, 4), 5, GREEDY, NEVER).tolist() == []


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    num_tokens=st.integers(1, 9),
    shortest=st.integers(1, 3),
    more=st.integers(0, 9),
)
def test_ngram_finds_what_a_plain_search_finds(
    tokens: list[int], num_tokens: int, shortest: int, more: int
) -> None:
    drafter = NgramDrafter(shortest, shortest + more)
    found = drafter.draft(np.array(tokens, np.int32), num_tokens, GREEDY, NEVER).tolist()
    assert found == naive_lookup(tokens, num_tokens, shortest, shortest + more)


def test_model_drafter_decodes_greedily_with_the_given_sampler() -> None:
    decoder = TableDecoder(20, seed=1)
    tokens = ids(1, 2, 3)
    wanted = []
    for _ in range(4):
        wanted.append(int(decoder.logits(np.append(tokens, np.array(wanted, np.int32)), 1)[0].argmax()))
    assert ModelDrafter(decoder, 20).draft(tokens, 4, GREEDY, NEVER).tolist() == wanted


def test_model_drafter_stops_at_its_own_context() -> None:
    decoder = TableDecoder(20, seed=1, context_length=5)
    assert len(ModelDrafter(decoder, 20).draft(ids(1, 2, 3), 9, GREEDY, NEVER)) == 2
    assert len(ModelDrafter(decoder, 20).draft(np.zeros(8, np.int32), 9, GREEDY, NEVER)) == 0


def test_model_drafter_never_proposes_a_token_that_the_target_lacks() -> None:
    draft = ModelDrafter(TableDecoder(50, seed=1), vocab_size=7).draft(ids(1), 40, GREEDY, NEVER)
    assert draft.max() < 7


def test_cancelled_model_drafter_returns_at_once() -> None:
    cancel = Event()
    cancel.set()
    assert len(ModelDrafter(TableDecoder(20, seed=1), 20).draft(ids(1), 5, GREEDY, cancel)) == 0


def test_first_of_asks_in_order_until_one_has_a_guess() -> None:
    chain = FirstOf([NoDrafter(), NgramDrafter(), ModelDrafter(TableDecoder(9, seed=1), 9)])
    assert chain.name == "none+ngram+model"
    assert chain.draft(ids(5, 6, 7, 5, 6), 1, GREEDY, NEVER).tolist() == [7]
    assert len(chain.draft(ids(1, 2), 3, GREEDY, NEVER)) == 3
    assert len(FirstOf([NoDrafter()]).draft(ids(1), 3, GREEDY, NEVER)) == 0
