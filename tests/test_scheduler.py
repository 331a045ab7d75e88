"""Plain decoding and speculation give one text: on table models, for anything that can vary."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec import trees
from edgespec.acceptance import equality
from edgespec.chances import Chances
from edgespec.costs import PassCosts
from edgespec.drafters import ModelDrafter, NgramDrafter
from edgespec.errors import ContextOverflow
from edgespec.gate import FixedGate, MeasuredGate
from edgespec.runtimes.table import TableDecoder
from edgespec.sampling import GumbelSampler, SamplingParams
from edgespec.scheduler import Block, Gate, Plain, serial
from edgespec.speculation import Speculation
from edgespec.suffix import SuffixDrafter
from edgespec.types import Ask, Draft, Drafter, Logits, Sampler, TokenIds

VOCAB = 12
PROMPT = np.array([1, 2, 3, 1, 2], np.int32)


class WildDrafter:
    """Random guesses of random length, right only by luck."""

    name = "wild"

    def __init__(self, seed: int, *, is_free: bool = True) -> None:
        self.is_free = is_free
        self._rng = np.random.default_rng(seed)

    def draft(self, tokens: TokenIds, ask: Ask, sampler: Sampler) -> Draft:
        size = int(self._rng.integers(0, ask.num_tokens + 1))
        guess = self._rng.integers(0, VOCAB, size).astype(np.int32)
        return Draft(guess, (0,) * size, source=self.name)

    def learn(self, tokens: TokenIds, draft: Draft, logits: Logits) -> None:
        assert logits.shape == (len(draft.tokens) + 1, VOCAB)


class WildTrees:
    """Random trees, some of whose nodes are right."""

    name = "wild trees"
    is_free = True

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def draft(self, tokens: TokenIds, ask: Ask, sampler: Sampler) -> Draft:
        size = int(self._rng.integers(0, 3 * ask.num_tokens + 1))
        parents = tuple(int(self._rng.integers(-1, node)) for node in range(size))
        kept = np.flatnonzero(trees.depths(parents) <= ask.num_tokens)
        if len(kept) < size:
            return Draft(np.zeros(0, np.int32))
        return Draft(self._rng.integers(0, VOCAB, size).astype(np.int32), (0,) * size, parents, source=self.name)

    def learn(self, tokens: TokenIds, draft: Draft, logits: Logits) -> None:
        assert logits.shape == (len(draft.tokens) + 1, VOCAB)


def target(**settings: int) -> TableDecoder:
    return TableDecoder(VOCAB, seed=1, **settings)  # type: ignore[arg-type]


def near() -> TableDecoder:
    return TableDecoder(VOCAB, seed=2, near=target())


def drafters_of(kind: str, seed: int = 0) -> list[Drafter]:
    nearer = TableDecoder(VOCAB, seed=4, near=near())
    inner = ModelDrafter(nearer, VOCAB, speculation=Speculation(lambda: [NgramDrafter()], 3))
    drafters: dict[str, list[Drafter]] = {
        "none": [],
        "ngram": [NgramDrafter()],
        "suffix": [SuffixDrafter()],
        "near": [ModelDrafter(near(), VOCAB)],
        "far": [ModelDrafter(TableDecoder(VOCAB, seed=3), VOCAB)],
        "wild": [WildDrafter(seed)],
        "wild and paid": [WildDrafter(seed, is_free=False)],
        "several": [NgramDrafter(), SuffixDrafter(), ModelDrafter(near(), VOCAB)],
        "cascade": [ModelDrafter(near(), VOCAB, speculation=Speculation(lambda: [inner]))],
        "perfect": [ModelDrafter(target(), VOCAB)],
    }
    return drafters[kind]


KINDS = ["ngram", "suffix", "near", "far", "wild", "wild and paid", "several", "cascade", "perfect"]


def gate_of(kind: str, length: int | None, seed: int = 0) -> Gate:
    drafters = drafters_of(kind, seed)
    return MeasuredGate(drafters, PassCosts(), Chances()) if length is None else FixedGate(drafters, length)


def blocks(gate: Gate, sampler: GumbelSampler, num_blocks: int = 80, **context: int) -> list[Block]:
    return list(islice(serial(PROMPT, target(**context), sampler, gate), num_blocks))


def tokens_of(blocks: list[Block]) -> list[int]:
    return [int(token) for block in blocks for token in block.tokens]


sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.5]),
    top_k=st.sampled_from([0, 3, 7]),
    top_p=st.sampled_from([1.0, 0.9, 0.5]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 2**64 - 1),
)


@given(
    params=sampling_params,
    kind=st.sampled_from(KINDS),
    length=st.one_of(st.integers(0, 9), st.none()),
    seed=st.integers(0, 2**32),
)
def test_any_drafter_gives_the_tokens_of_plain_decoding(
    params: SamplingParams, kind: str, length: int | None, seed: int
) -> None:
    sampler = GumbelSampler(params, len(PROMPT))
    plain = tokens_of(blocks(Plain(), sampler, num_blocks=60))
    assert tokens_of(blocks(gate_of(kind, length, seed), sampler, num_blocks=60))[:60] == plain


@settings(max_examples=30)
@given(params=sampling_params, length=st.integers(1, 6), seed=st.integers(0, 2**32))
def test_trees_give_the_tokens_of_plain_decoding(params: SamplingParams, length: int, seed: int) -> None:
    sampler = GumbelSampler(params, len(PROMPT))
    plain = tokens_of(blocks(Plain(), sampler, num_blocks=60))
    found = blocks(FixedGate([WildTrees(seed)], length), sampler, num_blocks=60)
    assert tokens_of(found)[:60] == plain


def test_what_is_cut_off_a_tree_leaves_a_tree() -> None:
    tree = Draft(np.array([5, 6, 7, 8], np.int32), (0, 1, 2, 3), parents=(-1, 0, -1, 2))
    assert tree.cut(3).parents == (-1, 0, -1)
    assert tree.cut(0).parents == ()


def test_perfect_drafter_is_accepted_whole() -> None:
    found = blocks(gate_of("perfect", 4), GumbelSampler(SamplingParams(temperature=1.0)))
    assert {(block.num_draft, len(block.tokens)) for block in found} == {(4, 5)}


def test_plain_decoding_emits_a_token_a_block() -> None:
    found = blocks(Plain(), GumbelSampler(SamplingParams()))
    assert {(block.num_draft, len(block.tokens)) for block in found} == {(0, 1)}


@pytest.mark.parametrize("length", [0, 1, 3, 8])
def test_generation_fills_the_context_and_ends(length: int) -> None:
    sampler = GumbelSampler(SamplingParams(temperature=1.0, seed=4))
    plain = tokens_of(blocks(Plain(), sampler, context_length=20))
    found = blocks(gate_of("near", length), sampler, context_length=20)
    assert tokens_of(found) == plain
    assert len(plain) == 20 - len(PROMPT) + 1


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 17])
def test_drafts_end_where_the_answer_must(max_tokens: int) -> None:
    sampler = GumbelSampler(SamplingParams())
    found: list[int] = []
    for block in serial(PROMPT, target(), sampler, gate_of("perfect", 4), max_tokens=max_tokens):
        found += map(int, block.tokens)
        if len(found) >= max_tokens:
            break
    assert len(found) == max_tokens


def test_prompt_beyond_the_context_is_an_error() -> None:
    with pytest.raises(ContextOverflow):
        blocks(Plain(), GumbelSampler(SamplingParams()), context_length=4)


def test_closing_the_generator_leaves_the_decoder_usable() -> None:
    decoder = target()
    steps = serial(PROMPT, decoder, GumbelSampler(SamplingParams()), gate_of("near", 3))
    first = next(steps)
    steps.close()  # type: ignore[attr-defined]
    again = serial(PROMPT, decoder, GumbelSampler(SamplingParams()), Plain())
    assert next(again).tokens[0] == first.tokens[0]


def test_cache_of_the_target_is_used() -> None:
    decoder = target()
    steps = serial(PROMPT, decoder, GumbelSampler(SamplingParams()), gate_of("perfect", 3))
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
    guess = Draft(np.array(draft, np.int32))
    assert equality(PROMPT, guess, one_hot(*picked), GumbelSampler(SamplingParams())).tolist() == emitted


def test_accept_follows_the_branch_that_agrees() -> None:
    # 5 ─ 6 and 7 ─ (8, 9 ─ 4)
    tree = Draft(np.array([5, 6, 7, 8, 9, 4], np.int32), parents=(-1, 0, -1, 2, 2, 4))
    picked = one_hot(7, 0, 0, 9, 0, 4, 11)
    assert equality(PROMPT, tree, picked, GumbelSampler(SamplingParams())).tolist() == [7, 9, 4, 11]
