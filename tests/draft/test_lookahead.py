"""Lookahead decoding: the text is that of plain decoding, and what repeats is foreseen."""

from itertools import islice

import numpy as np
import pytest
from double import tree_logits
from hypothesis import given
from hypothesis import strategies as st
from pass_times import CPU, GPU
from table_decoder import TableDecoder
from table_runs import PROMPT, VOCAB, sampling_params, target, tokens_of

from edgespec import SamplingParams
from edgespec.decoding.acceptance import equality
from edgespec.decoding.sampling import GumbelSampler
from edgespec.decoding.scheduler import Block, DraftPolicy, Plain, speculative_decode
from edgespec.decoding.tree import Tree
from edgespec.draft.acceptance_rates import AcceptanceRates
from edgespec.draft.costs import PassCosts, pass_costs
from edgespec.draft.drafter import DraftRequest
from edgespec.draft.lookahead import SMALLEST, Lookahead, NgramTable, Window, best_window, window_bucket
from edgespec.draft.measured import FixedLength, MeasuredPolicy
from edgespec.types import TokenIds, append

GREEDY = GumbelSampler(SamplingParams())
windows = st.builds(Window, st.integers(1, 7), st.integers(2, 5), st.integers(1, 6))


def depth_of(window: Window) -> int:
    """Depth of its deepest node below the last committed token."""
    return max(window.num_columns + window.size - 3, window.size - 1)


def blocks(policy: DraftPolicy, sampler: GumbelSampler, num_blocks: int, **context: int) -> list[Block]:
    return list(islice(speculative_decode(PROMPT, target(**context), sampler, policy), num_blocks))


@pytest.mark.slow
@given(params=sampling_params, window=windows)
def test_lookahead_gives_the_tokens_of_plain_decoding(params: SamplingParams, window: Window) -> None:
    sampler = GumbelSampler(params, len(PROMPT))
    plain = tokens_of(blocks(Plain(), sampler, 60))
    found = blocks(FixedLength([Lookahead(window)], depth_of(window)), sampler, 60)
    assert tokens_of(found)[:60] == plain
    assert all(block.num_draft < window.width for block in found)


@pytest.mark.parametrize("window", [Window(1, 2, 1), Window(4, 3, 4), Window(7, 5, 3)])
def test_lookahead_fills_the_context_and_ends(window: Window) -> None:
    sampler = GumbelSampler(SamplingParams(temperature=1.0, seed=4))
    plain = tokens_of(blocks(Plain(), sampler, 80, context_length=20))
    policy = FixedLength([Lookahead(window)], depth_of(window))
    assert tokens_of(blocks(policy, sampler, 80, context_length=20)) == plain


def one_draft(lookahead: Lookahead, tokens: TokenIds) -> Tree:
    return lookahead.draft(tokens, DraftRequest(24), GREEDY)


@given(window=windows)
def test_window_is_a_chain_with_columns_hanging_on_it(window: Window) -> None:
    lookahead = Lookahead(window)
    draft = one_draft(lookahead, np.arange(1, 2, dtype=np.int32))  # nothing to guess from
    assert draft.parents is not None
    depths = sorted(draft.depths)
    places = [level + i for level in range(window.size - 1) for i in range(window.num_columns)]
    assert depths == sorted(places)[1:]
    assert max(depths, default=0) <= depth_of(window)


@given(window=windows, num_tokens=st.integers(1, 9))
def test_nothing_lies_deeper_than_guesses_of_a_given_length(window: Window, num_tokens: int) -> None:
    narrowed = window.with_guesses_of(num_tokens)
    assert (depth_of(narrowed), narrowed.size) == (num_tokens, num_tokens + 1)


def test_rows_behind_the_window_become_ngrams() -> None:
    """On a language that counts, what is learned of any guess is what follows it."""
    lookahead, tokens = Lookahead(Window(3, 3, 2)), np.array([7, 3, 9], np.int32)
    for _ in range(3):
        draft = one_draft(lookahead, tokens)
        fed = append(tokens[-1:], draft.tokens)
        lookahead.learn(tokens, draft, np.eye(200, dtype=np.float32)[fed + 1])
        tokens = append(tokens, tokens[-1:] + 1)
    right = [
        token for token in range(200) if (token + 1, token + 2) in dict(lookahead._ngrams.continuations(token))
    ]
    assert len(right) >= 2


def test_table_holds_the_latest_ngrams_and_counts() -> None:
    table = NgramTable(2)
    for tail in ((1, 2), (3, 4), (1, 2), (5, 6)):
        table.add((9, *tail))
    assert table.continuations(9) == [((5, 6), 1), ((1, 2), 2)]
    assert table.continuations(8) == []


def test_guesses_that_begin_alike_share_nodes() -> None:
    lookahead = Lookahead(Window(1, 3, 4))
    draft = one_draft(lookahead, np.array([1, 5, 6, 1, 5, 7, 1, 8, 9, 1], np.int32))
    assert draft.parents is not None
    guessed = [(int(token), parent) for token, parent in zip(draft.tokens, draft.parents, strict=True)][:5]
    assert guessed == [(8, -1), (9, 0), (5, -1), (7, 2), (6, 2)]


def test_repeating_text_is_foreseen() -> None:
    class Cycle(TableDecoder):
        def _row(self, tokens: TokenIds) -> np.ndarray:
            return np.eye(VOCAB, dtype=np.float32)[(int(tokens[-1]) + 1) % VOCAB]

    policy = FixedLength([Lookahead(Window(5, 4, 3))], 20)
    found = list(islice(speculative_decode(PROMPT, Cycle(VOCAB, seed=0), GREEDY, policy), 60))
    assert len(tokens_of(found[10:])) / 50 > 3


@pytest.mark.parametrize(("passes", "fits"), [(CPU, False), (GPU, True)], ids=["cpu", "gpu"])
def test_window_fits_where_rows_are_cheap(passes: dict[int, float], fits: bool) -> None:
    window = best_window(pass_costs(passes))
    assert (window is not None) == fits
    assert SMALLEST.width < 12


def rows_cost(share: float) -> PassCosts:
    """Costs of passes whose rows beyond the first cost a share of a step each."""
    return pass_costs({width: 1.0 + share * (width - 1) for width in (1, 2, 4, 8, 16)})


@pytest.mark.parametrize(
    ("share", "wanted"),
    [(0.0, Window(7, 4, 7)), (0.004, Window(5, 3, 5)), (0.03, Window(3, 3, 2)), (0.05, None), (0.25, None)],
)
def test_window_is_as_wide_as_rows_are_cheap(share: float, wanted: Window | None) -> None:
    assert best_window(rows_cost(share)) == wanted


def test_rows_of_an_a100_are_too_dear_for_it() -> None:
    """2, 4, 8 and 16 rows by ONNX Runtime's table of quantised matrices, summed over a Qwen3-8B."""
    assert best_window(pass_costs({1: 1.0, 2: 1.19, 4: 1.39, 8: 2.0, 16: 3.3})) is None


def test_what_a_window_has_yielded_counts_if_it_is_more_than_what_most_texts_yield() -> None:
    window = Window(7, 4, 7)
    key = ("lookahead, run", window_bucket(window))
    assert best_window(rows_cost(0.03), {key: (130.0, 200.0)}) == window  # 2.86 tokens a pass of 2.23 steps
    assert best_window(rows_cost(0.03), {key: (20.0, 30.0)}) == SMALLEST, "too few to count"
    assert best_window(rows_cost(0.03), {key: (5.0, 200.0)}) == SMALLEST, "other texts may yield more"


def test_rounds_are_counted_for_the_window_that_they_ran() -> None:
    """So that the next load can choose by them."""
    window = Window(5, 3, 5)
    costs = rows_cost(0.01)
    rates = AcceptanceRates()
    policy = MeasuredPolicy([Lookahead(window)], costs, rates)
    tokens, decoder = PROMPT, TableDecoder(VOCAB, seed=1)
    for _ in range(200):
        round = policy.propose(tokens, 100, GREEDY)
        logits = tree_logits(decoder, tokens, round.draft.tokens, round.draft.parents or ())
        emitted = equality(tokens, round.draft, logits, GREEDY)
        policy.observe(round, logits, emitted, costs.pass_s(len(round.draft.tokens) + 1))
        tokens = append(tokens, emitted)
    counted = {bucket for source, bucket in rates.snapshot() if source == "lookahead, run" and bucket >= 0}
    assert counted == {window_bucket(window)}


def near_cycle(seed: int, seconds_ms: dict[int, float], num_rounds: int) -> tuple[float, int]:
    """Speed relative to plain decoding, by made-up costs, and rounds in which lookahead was run."""

    class Song(TableDecoder):
        """Verses that begin with a token of chance and go on by rule."""

        def _row(self, tokens: TokenIds) -> np.ndarray:
            if len(tokens) % 6 == 0:
                return super()._row(tokens)
            return np.eye(VOCAB, dtype=np.float32)[(5 * int(tokens[-1]) + 1) % VOCAB]

    costs = pass_costs({width: taken / 1e3 for width, taken in seconds_ms.items()})
    window = best_window(costs) or SMALLEST
    policy = MeasuredPolicy([Lookahead(window)], PassCosts(dict(costs.ratios)), AcceptanceRates())
    tokens, decoder, seconds, num_run = PROMPT, Song(VOCAB, seed=seed), 0.0, 0
    for _ in range(num_rounds):
        round = policy.propose(tokens, 100, GREEDY)
        draft = round.draft
        logits = tree_logits(decoder, tokens, draft.tokens, draft.parents or ())
        emitted = equality(tokens, draft, logits, GREEDY)
        taken_s = costs.pass_s(len(draft.tokens) + 1)
        policy.observe(round, logits, emitted, taken_s)
        tokens, seconds, num_run = append(tokens, emitted), seconds + taken_s, num_run + bool(len(draft.tokens))
    return (len(tokens) - len(PROMPT)) / seconds * costs.pass_s(1), num_run


def test_policy_turns_to_lookahead_by_itself_where_rows_are_cheap() -> None:
    speed, num_run = near_cycle(1, {width: 22 + 0.2 * (width - 1) for width in range(1, 60)}, 300)
    assert speed > 1.5
    assert num_run > 250


def test_lookahead_costs_next_to_nothing_where_rows_are_dear() -> None:
    speed, num_run = near_cycle(1, {width: 22 + 12 * (width - 1) for width in range(1, 60)}, 1500)
    assert speed > 0.97
    assert num_run < 100
