"""Plain decoding and speculation give one text: on table models, for anything that can vary."""

from itertools import islice
from threading import Event

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.acceptance import accept
from edgespec.draft_length import DraftLength, FixedLength, MeasuredLength
from edgespec.drafters import FirstOf, ModelDrafter, NgramDrafter, NoDrafter
from edgespec.errors import ContextOverflow
from edgespec.runtimes.table import TableDecoder
from edgespec.sampling import GumbelSampler, SamplingParams
from edgespec.scheduler import Block, serial
from edgespec.types import Drafter, Sampler, TokenIds

VOCAB = 12
PROMPT = np.array([1, 2, 3, 1, 2], np.int32)


class WildDrafter:
    """Random guesses of random length, right only by luck."""

    name = "wild"

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def draft(self, tokens: TokenIds, num_tokens: int, sampler: Sampler, cancel: Event) -> TokenIds:
        return self._rng.integers(0, VOCAB, self._rng.integers(0, num_tokens + 1)).astype(np.int32)


def target(**settings: int) -> TableDecoder:
    return TableDecoder(VOCAB, seed=1, **settings)  # type: ignore[arg-type]


def drafter_of(kind: str, seed: int) -> Drafter:
    near = ModelDrafter(TableDecoder(VOCAB, seed=2, near=target()), VOCAB)
    far = ModelDrafter(TableDecoder(VOCAB, seed=3), VOCAB)
    drafters: dict[str, Drafter] = {
        "none": NoDrafter(),
        "ngram": NgramDrafter(1),
        "near": near,
        "far": far,
        "wild": WildDrafter(seed),
        "chain": FirstOf([NgramDrafter(3), near]),
        "perfect": ModelDrafter(target(), VOCAB),
    }
    return drafters[kind]


def blocks(
    drafter: Drafter, sampler: GumbelSampler, length: DraftLength, num_blocks: int = 80, **context: int
) -> list[Block]:
    return list(islice(serial(PROMPT, drafter, target(**context), sampler, length), num_blocks))


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


@settings(deadline=None, max_examples=100)
@given(
    params=sampling_params,
    kind=st.sampled_from(["ngram", "near", "far", "wild", "chain", "perfect"]),
    length=st.one_of(st.integers(0, 9).map(FixedLength), st.builds(MeasuredLength)),
    seed=st.integers(0, 2**32),
)
def test_any_drafter_gives_the_tokens_of_plain_decoding(
    params: SamplingParams, kind: str, length: DraftLength, seed: int
) -> None:
    sampler = GumbelSampler(params, len(PROMPT))
    plain = tokens_of(blocks(NoDrafter(), sampler, FixedLength(0), num_blocks=60))
    assert tokens_of(blocks(drafter_of(kind, seed), sampler, length, num_blocks=60))[:60] == plain


def test_perfect_drafter_is_accepted_whole() -> None:
    found = blocks(drafter_of("perfect", 0), GumbelSampler(SamplingParams(temperature=1.0)), FixedLength(4))
    assert {(block.num_draft, len(block.tokens)) for block in found} == {(4, 5)}


def test_plain_decoding_emits_a_token_a_block() -> None:
    found = blocks(NoDrafter(), GumbelSampler(SamplingParams()), FixedLength(4))
    assert {(block.num_draft, len(block.tokens)) for block in found} == {(0, 1)}


@pytest.mark.parametrize("length", [0, 1, 3, 8])
def test_generation_fills_the_context_and_ends(length: int) -> None:
    sampler = GumbelSampler(SamplingParams(temperature=1.0, seed=4))
    plain = tokens_of(blocks(NoDrafter(), sampler, FixedLength(0), context_length=20))
    found = blocks(drafter_of("near", 0), sampler, FixedLength(length), context_length=20)
    assert tokens_of(found) == plain
    assert len(plain) == 20 - len(PROMPT) + 1


def test_prompt_beyond_the_context_is_an_error() -> None:
    with pytest.raises(ContextOverflow):
        blocks(NoDrafter(), GumbelSampler(SamplingParams()), FixedLength(0), context_length=4)


def test_closing_the_generator_leaves_the_decoder_usable() -> None:
    decoder = target()
    steps = serial(PROMPT, drafter_of("near", 0), decoder, GumbelSampler(SamplingParams()), FixedLength(3))
    first = next(steps)
    steps.close()
    again = serial(PROMPT, NoDrafter(), decoder, GumbelSampler(SamplingParams()), FixedLength(0))
    assert next(again).tokens[0] == first.tokens[0]


def test_cache_of_the_target_is_used() -> None:
    decoder = target()
    steps = serial(PROMPT, drafter_of("perfect", 0), decoder, GumbelSampler(SamplingParams()), FixedLength(3))
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
    sequence = np.concatenate([PROMPT, np.array(draft, np.int32)])
    greedy = GumbelSampler(SamplingParams())
    assert accept(sequence, len(draft), one_hot(*picked), greedy).tolist() == emitted
