"""Plain decoding and speculation give one text: on table models, for anything that can vary."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_decoder import TableDecoder
from table_runs import (
    KINDS,
    PROMPT,
    VOCAB,
    WildTrees,
    blocks,
    masks,
    none_twice_in_four,
    policy_of,
    sampling_params,
    target,
    tokens_of,
)

from edgespec.decoding.acceptance import equality
from edgespec.decoding.decoder import Can
from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.scheduler import Block, DraftPolicy, Plain, speculative_decode
from edgespec.decoding.tree import Tree
from edgespec.draft.measured import FixedLength
from edgespec.errors import ContextOverflow, UsageError
from edgespec.types import TokenMask


@pytest.mark.slow
@given(
    params=sampling_params,
    mask=masks,
    kind=st.sampled_from(KINDS),
    length=st.one_of(st.integers(0, 9), st.none()),
    seed=st.integers(0, 2**32),
)
def test_any_drafter_gives_the_tokens_of_plain_decoding(
    params: SamplingParams, mask: TokenMask | None, kind: str, length: int | None, seed: int
) -> None:
    sampler = GumbelSampler(params, len(PROMPT), mask=mask)
    plain = tokens_of(blocks(Plain(), sampler, num_blocks=60))
    assert tokens_of(blocks(policy_of(kind, length, seed), sampler, num_blocks=60))[:60] == plain


@pytest.mark.slow
@settings(max_examples=30)
@given(params=sampling_params, mask=masks, length=st.integers(1, 6), seed=st.integers(0, 2**32))
def test_trees_give_the_tokens_of_plain_decoding(
    params: SamplingParams, mask: TokenMask | None, length: int, seed: int
) -> None:
    sampler = GumbelSampler(params, len(PROMPT), mask=mask)
    plain = tokens_of(blocks(Plain(), sampler, num_blocks=60))
    found = blocks(FixedLength([WildTrees(seed)], length), sampler, num_blocks=60)
    assert tokens_of(found)[:60] == plain


@pytest.mark.parametrize("kind", ["perfect", "wild"])
def test_an_answer_that_cannot_go_on_ends_behind_the_same_tokens(kind: str) -> None:
    def until_error(policy: DraftPolicy) -> list[int]:
        steps, found = speculative_decode(PROMPT, target(), sampler, policy), list[Block]()
        with pytest.raises(UsageError, match="no token may follow"):
            found.extend(steps)
        return tokens_of(found)

    for num_tokens in range(1, 8):
        sampler = GumbelSampler(
            SamplingParams(), len(PROMPT), mask=lambda answer, end=num_tokens: np.full(VOCAB, len(answer) < end)
        )
        assert len(until_error(Plain())) == num_tokens
        assert until_error(policy_of(kind, 4)) == until_error(Plain())
        assert until_error(FixedLength([WildTrees(1)], 4)) == until_error(Plain())


def test_masks_are_those_of_each_rows_own_prefix() -> None:
    sampler = GumbelSampler(SamplingParams(temperature=1.0), len(PROMPT), mask=none_twice_in_four)
    found = blocks(policy_of("perfect", 5), sampler)
    assert {block.num_accepted for block in found} == {5}
    tokens = tokens_of(found)
    assert all(token not in tokens[max(0, i - 3) : i] for i, token in enumerate(tokens))


def test_what_is_cut_off_a_tree_leaves_a_tree() -> None:
    tree = Tree(np.array([5, 6, 7, 8], np.int32), (0, 1, 2, 3), parents=(-1, 0, -1, 2))
    assert tree.cut(3).parents == (-1, 0, -1)
    assert tree.cut(0).parents == ()


def test_perfect_drafter_is_accepted_whole() -> None:
    found = blocks(policy_of("perfect", 4), GumbelSampler(SamplingParams(temperature=1.0)))
    assert {(block.num_draft, len(block.tokens)) for block in found} == {(4, 5)}


def test_plain_decoding_emits_a_token_a_block() -> None:
    found = blocks(Plain(), GumbelSampler(SamplingParams()))
    assert {(block.num_draft, len(block.tokens)) for block in found} == {(0, 1)}


@pytest.mark.parametrize("length", [0, 1, 3, 8])
def test_generation_fills_the_context_and_ends(length: int) -> None:
    sampler = GumbelSampler(SamplingParams(temperature=1.0, seed=4))
    plain = tokens_of(blocks(Plain(), sampler, context_length=20))
    found = blocks(policy_of("near", length), sampler, context_length=20)
    assert tokens_of(found) == plain
    assert len(plain) == 20 - len(PROMPT) + 1


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 17])
def test_drafts_end_where_the_answer_must(max_tokens: int) -> None:
    sampler = GumbelSampler(SamplingParams())
    found: list[int] = []
    for block in speculative_decode(PROMPT, target(), sampler, policy_of("perfect", 4), max_tokens=max_tokens):
        found += map(int, block.tokens)
        if len(found) >= max_tokens:
            break
    assert len(found) == max_tokens


@pytest.mark.parametrize("rewind", [0, 2, 40])
def test_no_draft_is_longer_than_the_target_can_go_back(rewind: int) -> None:
    class Recurrent(TableDecoder):
        can = Can(rewind=rewind)

    sampler, policy = GumbelSampler(SamplingParams()), policy_of("perfect", 4)
    decoder = Recurrent(VOCAB, seed=target().seed)
    found = list(islice(speculative_decode(PROMPT, decoder, sampler, policy), 9))
    assert max(block.num_draft for block in found) == min(4, rewind)


def test_prompt_beyond_the_context_is_an_error() -> None:
    with pytest.raises(ContextOverflow):
        blocks(Plain(), GumbelSampler(SamplingParams()), context_length=4)


def test_closing_the_generator_leaves_the_decoder_usable() -> None:
    decoder = target()
    steps = speculative_decode(PROMPT, decoder, GumbelSampler(SamplingParams()), policy_of("near", 3))
    first = next(steps)
    steps.close()  # type: ignore[attr-defined]
    again = speculative_decode(PROMPT, decoder, GumbelSampler(SamplingParams()), Plain())
    assert next(again).tokens[0] == first.tokens[0]


def test_cache_of_the_target_is_used() -> None:
    decoder = target()
    steps = speculative_decode(PROMPT, decoder, GumbelSampler(SamplingParams()), policy_of("perfect", 3))
    emitted = tokens_of(list(islice(steps, 50)))
    # The last token of each block is not in the cache when it is drafted from; nothing else is run twice.
    assert decoder.num_fed == len(PROMPT) + len(emitted) - 1


def one_hot(*tokens: int) -> np.ndarray:
    return np.eye(VOCAB, dtype=np.float32)[list(tokens)]


@pytest.mark.parametrize(
    ("draft", "picked", "emitted"),
    [
        ([], [5], [5]),
        ([5], [5, 6], [5, 6]),
        ([5], [4, 6], [4]),
        ([5, 6, 7], [5, 6, 7, 8], [5, 6, 7, 8]),
        ([5, 6, 7], [5, 9, 7, 8], [5, 9]),
        ([5, 6, 7], [9, 6, 7, 8], [9]),
    ],
)
def test_accept_keeps_the_agreeing_prefix_and_one_more(
    draft: list[int], picked: list[int], emitted: list[int]
) -> None:
    guess = Tree(np.array(draft, np.int32))
    assert equality(PROMPT, guess, one_hot(*picked), GumbelSampler(SamplingParams())).tolist() == emitted


def test_accept_follows_the_branch_that_agrees() -> None:
    # 5 ─ 6 and 7 ─ (8, 9 ─ 4)
    tree = Tree(np.array([5, 6, 7, 8, 9, 4], np.int32), parents=(-1, 0, -1, 2, 2, 4))
    picked = one_hot(7, 0, 0, 9, 0, 4, 11)
    assert equality(PROMPT, tree, picked, GumbelSampler(SamplingParams())).tolist() == [7, 9, 4, 11]
