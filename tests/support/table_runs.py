"""Schedules over table models: drafters of every kind, right and wrong, and sampling of every kind."""

from itertools import islice

import numpy as np
from hypothesis import strategies as st
from table_decoder import TableDecoder

from edgespec.config.drafter_names import TEXT
from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.scheduler import Block, DraftPolicy, speculative_decode
from edgespec.decoding.tree import Tree
from edgespec.draft.acceptance_rates import AcceptanceRates
from edgespec.draft.costs import PassCosts
from edgespec.draft.drafter import Drafter, DrafterCan, DraftRequest
from edgespec.draft.measured import FixedLength, MeasuredPolicy
from edgespec.draft.model_drafter import ModelDrafter
from edgespec.draft.ngram import NgramDrafter
from edgespec.draft.speculation import Speculation
from edgespec.draft.suffix import SuffixDrafter
from edgespec.draft.text_source import make_text_drafters
from edgespec.types import Logits, Sampler, TokenIds

VOCAB = 12
PROMPT = np.array([1, 2, 3, 1, 2], np.int32)


class WildDrafter(Drafter):
    """Random guesses of random length, right only by luck."""

    name = "wild"
    can = DrafterCan()

    def __init__(self, seed: int, *, is_free: bool = True) -> None:
        self.can = DrafterCan(is_free=is_free)
        self._rng = np.random.default_rng(seed)

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        size = int(self._rng.integers(0, request.num_tokens + 1))
        guess = self._rng.integers(0, VOCAB, size).astype(np.int32)
        return Tree(guess, (0,) * size, source=self.name)

    def learn(self, tokens: TokenIds, draft: Tree, logits: Logits) -> None:
        assert logits.shape == (len(draft.tokens) + 1, VOCAB)


class WildTrees(Drafter):
    """Random trees, some of whose nodes are right."""

    name = "wild trees"

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        size = int(self._rng.integers(0, 3 * request.num_tokens + 1))
        parents = tuple(int(self._rng.integers(-1, node)) for node in range(size))
        if Tree(np.zeros(size, np.int32), parents=parents).depth > request.num_tokens:
            return Tree(np.zeros(0, np.int32))
        return Tree(self._rng.integers(0, VOCAB, size).astype(np.int32), (0,) * size, parents, source=self.name)

    def learn(self, tokens: TokenIds, draft: Tree, logits: Logits) -> None:
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
        **{name: make_text_drafters({name}, None) for name in TEXT},
        "near": [ModelDrafter(near(), VOCAB)],
        "far": [ModelDrafter(TableDecoder(VOCAB, seed=3), VOCAB)],
        "wild": [WildDrafter(seed)],
        "wild and paid": [WildDrafter(seed, is_free=False)],
        "several": [NgramDrafter(), SuffixDrafter(), ModelDrafter(near(), VOCAB)],
        "cascade": [ModelDrafter(near(), VOCAB, speculation=Speculation(lambda: [inner]))],
        "perfect": [ModelDrafter(target(), VOCAB)],
    }
    return drafters[kind]


KINDS = [*TEXT, "near", "far", "wild", "wild and paid", "several", "cascade", "perfect"]


def policy_of(kind: str, length: int | None, seed: int = 0) -> DraftPolicy:
    drafters = drafters_of(kind, seed)
    return (
        MeasuredPolicy(drafters, PassCosts(), AcceptanceRates())
        if length is None
        else FixedLength(drafters, length)
    )


def blocks(policy: DraftPolicy, sampler: GumbelSampler, num_blocks: int = 80, **context: int) -> list[Block]:
    return list(islice(speculative_decode(PROMPT, target(**context), sampler, policy), num_blocks))


def tokens_of(blocks: list[Block]) -> list[int]:
    return [int(token) for block in blocks for token in block.tokens]


def none_twice_in_four(answer: TokenIds) -> np.ndarray:
    """A mask that depends on the prefix: a token may not come again within four."""
    allowed = np.ones(VOCAB, np.bool_)
    allowed[answer[-3:]] = False
    return allowed


masks = st.sampled_from([None, none_twice_in_four])
sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.5]),
    top_k=st.sampled_from([0, 3, 7]),
    top_p=st.sampled_from([1.0, 0.9, 0.5]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.2]),
    logit_bias=st.sampled_from([{}, {2: -100, 5: 1.5}]),
    seed=st.integers(0, 2**64 - 1),
)
