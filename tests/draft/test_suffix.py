import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.tree import Tree
from edgespec.draft import suffix
from edgespec.draft.drafter import DraftRequest
from edgespec.draft.suffix import SuffixAutomaton, SuffixDrafter, follower_bucket
from edgespec.types import TokenIds

GREEDY = GumbelSampler(SamplingParams())
TEXTS = st.lists(st.integers(0, 3), max_size=40) | st.lists(st.integers(0, 1), max_size=40)


def ids(tokens: list[int]) -> TokenIds:
    return np.array(tokens, np.int32)


def automaton(tokens: list[int]) -> SuffixAutomaton:
    text = SuffixAutomaton()
    text.extend(tokens)
    return text


def ends_of(context: list[int], tokens: list[int]) -> list[int]:
    """Where context ends in tokens, its last token always being followed."""
    length = len(context)
    return [end for end in range(length - 1, len(tokens) - 1) if tokens[end + 1 - length : end + 1] == context]


def longest_match(tokens: list[int]) -> tuple[int, list[int]]:
    """Length of the longest suffix that occurred earlier, and where it ended."""
    for length in range(len(tokens) - 1, 0, -1):
        if ends := ends_of(tokens[-length:], tokens):
            return length, ends
    return 0, []


def counts_after(ends: list[int], tokens: list[int]) -> dict[int, int]:
    found = [tokens[end + 1] for end in ends]
    return {token: found.count(token) for token in found}


def followers(text: SuffixAutomaton) -> dict[int, int]:
    """How often each token followed the longest match, as the automaton counts."""
    state = text._link[text._last]
    targets = [target for key, target in text._targets.items() if key >> 32 == state] + [text._edge[state]]
    return {text._token[target]: text._count[target] for target in targets} if state > 0 else {}


def expect_oracle(text: SuffixAutomaton, tokens: list[int]) -> None:
    """Everything that the automaton says of the longest match, computed anew."""
    length, ends = longest_match(tokens)
    assert len(text) == len(tokens)
    assert text.match_length == length
    assert followers(text) == (counts_after(ends, tokens) if length else {})


def expect_guesses(guesses: Tree, tokens: list[int]) -> None:
    """Each guess is what most often followed the context before it, and of equal ones the most recent."""
    length, _ = longest_match(tokens)
    context = tokens[len(tokens) - length :]
    for i, (guess, bucket) in enumerate(zip(guesses.tokens.tolist(), guesses.buckets, strict=True)):
        while not (ends := ends_of(context, tokens)):
            context = context[1:]
        counts = counts_after(ends, tokens)
        best = [token for token, count in counts.items() if count == max(counts.values())]
        assert guess == next(tokens[end + 1] for end in reversed(ends) if tokens[end + 1] in best)
        assert bucket == follower_bucket(length + i, counts[guess], is_unanimous=len(counts) == 1)
        context = [*context, guess]


def test_it_continues_the_example_of_its_docstring() -> None:
    text = automaton([1, 2, 3, 1, 2])
    assert (text.match_length, followers(text)) == (2, {3: 1})
    assert text.draft(4, "suffix").tokens.tolist() == [3, 1, 2, 3]


@given(TEXTS)
def test_every_prefix_has_the_match_of_a_plain_search(tokens: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix, "_MAX_COUNTED", 1 << 20)
        text = SuffixAutomaton()
        for i, token in enumerate(tokens):
            text.extend([token])
            expect_oracle(text, tokens[: i + 1])


@given(TEXTS, st.integers(0, 40))
def test_guesses_are_what_most_often_followed(tokens: list[int], num: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix, "_MAX_COUNTED", 1 << 20)
        guesses = automaton(tokens).draft(num, "suffix")
    assert len(guesses.tokens) == (num if longest_match(tokens)[0] else 0)
    assert guesses.source == ("suffix" if len(guesses.tokens) else "none")
    expect_guesses(guesses, tokens)


@given(TEXTS, st.integers(1, 3))
def test_few_counted_contexts_leave_the_match_right_and_counts_no_higher(tokens: list[int], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix, "_MAX_COUNTED", most)
        text = automaton(tokens)
    length, ends = longest_match(tokens)
    assert text.match_length == length
    counts, found = counts_after(ends, tokens) if length else {}, followers(text)
    assert found.keys() == counts.keys()
    assert all(1 <= found[token] <= counts[token] for token in counts)


class Memo(RuleBasedStateMachine):
    """A drafter over a text that is extended, cut, changed and left, against a search in the text alone."""

    def __init__(self) -> None:
        super().__init__()
        self.drafter = SuffixDrafter()
        self.tokens: list[int] = []

    @rule(more=st.lists(st.integers(0, 2), min_size=1, max_size=8))
    def extend(self, more: list[int]) -> None:
        self.tokens += more

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, len(self.tokens) - 1))
        self.tokens += self.tokens[start : start + 8]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def diverge(self, data: st.DataObject) -> None:
        position = data.draw(st.integers(0, len(self.tokens) - 1))
        self.tokens = [*self.tokens[:position], 3]

    @rule()
    def restart(self) -> None:
        self.tokens = []

    @rule(num=st.integers(0, 6))
    def request(self, num: int) -> None:
        draft = self.drafter.draft(ids(self.tokens), DraftRequest(num), GREEDY)
        assert draft.tokens.dtype == np.int32
        assert len(draft.tokens) == len(draft.buckets) == (num if longest_match(self.tokens)[0] else 0)
        assert draft.tokens.tolist() == automaton(self.tokens).draft(num, "suffix").tokens.tolist()

    @invariant()
    def the_first_guess_followed_the_longest_match(self) -> None:
        _, ends = longest_match(self.tokens)
        first = self.drafter.draft(ids(self.tokens), DraftRequest(1), GREEDY).tokens.tolist()
        assert set(first) <= {self.tokens[end + 1] for end in ends}


TestMemo = Memo.TestCase
TestMemo.settings = settings(max_examples=60, stateful_step_count=30)


def test_periodic_text_goes_on_periodically() -> None:
    draft = SuffixDrafter().draft(ids([1, 2, 1, 2]), DraftRequest(7), GREEDY)
    assert draft.tokens.tolist() == [1, 2, 1, 2, 1, 2, 1]


def test_one_token_repeated_goes_on() -> None:
    assert SuffixDrafter().draft(ids([5, 5]), DraftRequest(3), GREEDY).tokens.tolist() == [5, 5, 5]


def test_a_text_without_repetition_has_no_guess() -> None:
    for tokens in ([], [7], [1, 2, 3]):
        draft = SuffixDrafter().draft(ids(tokens), DraftRequest(5), GREEDY)
        assert (draft.tokens.tolist(), draft.buckets) == ([], ())


def test_the_more_frequent_continuation_goes_before_the_more_recent() -> None:
    assert SuffixDrafter().draft(ids([1, 8, 1, 8, 1, 9, 1]), DraftRequest(1), GREEDY).tokens.tolist() == [8]
    assert SuffixDrafter().draft(ids([1, 8, 1, 9, 1]), DraftRequest(1), GREEDY).tokens.tolist() == [9]


@pytest.mark.parametrize(
    ("length", "num_seen", "is_unanimous", "wanted"),
    [(1, 1, True, 1), (1, 5, False, 0), (2, 2, True, 5), (4, 1, True, 7), (5, 1, True, 10), (900, 3, True, 17)],
)
def test_evidence_is_the_length_of_the_context_and_the_agreement_of_counts(
    length: int, num_seen: int, is_unanimous: bool, wanted: int
) -> None:
    assert follower_bucket(length, num_seen, is_unanimous=is_unanimous) == wanted


def test_evidence_grows_along_the_draft() -> None:
    draft = SuffixDrafter().draft(ids([1, 2, 3, 4, 5, 6, 7, 8, 9, 1]), DraftRequest(6), GREEDY)
    assert draft.buckets == (1, 4, 7, 7, 10, 10)


@pytest.mark.parametrize(
    "num_kinds", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(50, marks=pytest.mark.slow), 49152]
)
def test_memory_stays_below_200_bytes_a_token(num_kinds: int) -> None:
    tokens = np.random.default_rng(0).integers(0, num_kinds, 8_000).tolist()
    tracemalloc.start()
    text = automaton(tokens)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(text) == len(tokens)
    assert peak_bytes < 200 * len(tokens)
