import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from table_decoder import TableDecoder

from edgespec.decoding.decoder import ForwardingDecoder, Pass, Rows
from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.tree import NO_DRAFT, Tree
from edgespec.draft.drafter import Drafter, DraftRequest
from edgespec.draft.model_drafter import ModelDrafter
from edgespec.draft.ngram import NgramDrafter
from edgespec.draft.speculation import Speculation
from edgespec.system.cancel import Flag
from edgespec.types import Logits, Sampler, TokenIds

GREEDY = GumbelSampler(SamplingParams())


def ids(*tokens: int) -> TokenIds:
    return np.array(tokens, np.int32)


def guess(drafter: Drafter, tokens: TokenIds, num_tokens: int) -> list[int]:
    draft = drafter.draft(tokens, DraftRequest(num_tokens), GREEDY)
    assert len(draft.buckets) == len(draft.tokens) <= num_tokens
    return [int(token) for token in draft.tokens]


def naive_lookup(tokens: list[int], num_tokens: int, shortest: int, longest: int) -> list[int]:
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                return tokens[start + length :][:num_tokens]
    return []


def test_ngram_continues_the_example_of_its_docstring() -> None:
    assert guess(NgramDrafter(min_match=1), ids(1, 2, 3, 1, 2), 3) == [3, 1, 2]


def test_ngram_without_a_match_has_no_guess() -> None:
    assert guess(NgramDrafter(), ids(1, 2, 3, 4), 5) == []


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
    found = guess(drafter, np.array(tokens, np.int32), num_tokens)
    assert found == naive_lookup(tokens, num_tokens, shortest, shortest + more)


def test_model_drafter_runs_a_pass_for_each_token() -> None:
    decoder, tokens = TableDecoder(20, seed=1), ids(1, 2, 3)
    guess(ModelDrafter(decoder, 20), tokens, 4)
    assert decoder.num_fed == len(tokens) + 3


def test_model_drafter_decodes_greedily_with_the_given_sampler() -> None:
    decoder = TableDecoder(20, seed=1)
    tokens = ids(1, 2, 3)
    wanted = []
    for _ in range(4):
        wanted.append(int(decoder.logits(np.append(tokens, np.array(wanted, np.int32)), 1)[0].argmax()))
    assert guess(ModelDrafter(decoder, 20), tokens, 4) == wanted


def test_model_drafter_stops_at_its_own_context() -> None:
    decoder = TableDecoder(20, seed=1, context_length=5)
    assert len(guess(ModelDrafter(decoder, 20), ids(1, 2, 3), 9)) == 2
    assert len(guess(ModelDrafter(decoder, 20), np.zeros(8, np.int32), 9)) == 0


def test_model_drafter_never_proposes_a_token_that_the_target_lacks() -> None:
    assert max(guess(ModelDrafter(TableDecoder(50, seed=1), vocab_size=7), ids(1), 40)) < 7


def test_cancelled_model_drafter_returns_at_once() -> None:
    cancel = Flag()
    cancel.set()
    asked = DraftRequest(5, cancel=cancel)
    assert ModelDrafter(TableDecoder(20, seed=1), 20).draft(ids(1), asked, GREEDY) == NO_DRAFT


def test_model_drafter_stops_where_its_own_doubt_grows_too_large() -> None:
    drafter = ModelDrafter(TableDecoder(20, seed=1), 20)
    whole = drafter.draft(ids(1, 2), DraftRequest(12), GREEDY)
    lengths = [
        len(drafter.draft(ids(1, 2), DraftRequest(12, min_probability=floor), GREEDY).tokens)
        for floor in (1e-9, 0.01, 0.9)
    ]
    assert len(whole.tokens) == 12
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == 1 < lengths[0]


def test_model_drafter_gives_the_distributions_of_its_tokens() -> None:
    sampler = GumbelSampler(SamplingParams(temperature=1.0, top_k=5, seed=3))
    decoder = TableDecoder(20, seed=1)
    draft = ModelDrafter(decoder, 20).draft(ids(1, 2), DraftRequest(6, with_distributions=True), sampler)
    assert draft.distributions is not None
    assert len(draft.distributions) == 6
    for i, (token, distribution) in enumerate(zip(draft.tokens, draft.distributions, strict=True)):
        prefix = np.append(ids(1, 2), draft.tokens[:i])
        wanted = sampler.distribution(decoder.logits(prefix, 1)[0], prefix)
        assert distribution.ids.tolist() == wanted.ids.tolist()
        assert token in wanted.ids


class _Confident(ForwardingDecoder):
    """A decoder that says how sure it is of each token, and with which texts its drafts began."""

    def __init__(self, chances: list[float], is_ready: bool = True) -> None:
        super().__init__(TableDecoder(8, seed=0))
        self.chances, self.is_ready = chances, is_ready
        self.begun: list[tuple[list[int], int | None]] = []

    def begin(self, tokens: TokenIds, num_tokens: int, max_unread: int | None = None) -> int:
        self.begun.append((tokens.tolist(), num_tokens))
        return min(num_tokens, 4) if self.is_ready else 0

    def run(self, given: Pass) -> Rows:
        tokens = given.tokens
        confidence = self.chances[len(tokens) - len(self.begun[-1][0])]
        rows: Logits = 5 * np.eye(8, dtype=np.float32)[(tokens[-given.num_rows :] + 1) % 8]
        return Rows(rows, confidence=confidence)


def test_chance_of_a_token_is_the_one_that_the_decoder_gives() -> None:
    drafter = ModelDrafter(_Confident([0.9, 0.8, 0.5, 1.0]), 8)
    for least, length in ((0.95, 1), (0.75, 2), (0.7, 3), (0.2, 4)):
        draft = drafter.draft(ids(0), DraftRequest(10, min_probability=least), GREEDY)
        assert draft.tokens.tolist() == [1, 2, 3, 4][:length]


def test_chance_that_a_decoder_gives_behind_a_wrong_guess_is_of_no_token() -> None:
    class Wrong(NgramDrafter):
        def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
            return Tree(ids(7)[: request.num_tokens], (0,) * min(1, request.num_tokens), source="wrong")

    drafter = ModelDrafter(_Confident([0.1] * 4), 8, speculation=Speculation(lambda: [Wrong()], draft_length=1))
    draft = drafter.draft(ids(0), DraftRequest(10, min_probability=0.5), GREEDY)
    assert draft.tokens.tolist() == [1, 2, 3, 4]


def test_draft_is_no_longer_than_the_decoder_can_make_it_and_begins_where_it_is_told() -> None:
    decoder = _Confident([1.0] * 4)
    assert guess(ModelDrafter(decoder, 8), ids(5, 0), 10) == [1, 2, 3, 4]
    assert decoder.begun == [([5, 0], 10)]


def test_decoder_that_cannot_begin_has_no_guess() -> None:
    decoder = _Confident([], is_ready=False)
    assert guess(ModelDrafter(decoder, 8), ids(0), 3) == []
