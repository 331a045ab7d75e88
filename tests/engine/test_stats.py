"""The counters of an answer: what must hold between them whatever drafts, decides and stops."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_decoder import TableDecoder
from table_runs import KINDS, PROMPT, VOCAB, drafters_of, sampling_params

from edgespec.decoding.acceptance import Acceptance, equality, rejection
from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.scheduler import Block, speculative_decode
from edgespec.decoding.tree import Tree
from edgespec.draft.acceptance_rates import AcceptanceRates
from edgespec.draft.costs import Gain, PassCosts
from edgespec.draft.measured import FixedLength, MeasuredPolicy
from edgespec.engine.answer_passes import TokenStop
from edgespec.engine.answers import Stats, Tally, usage_of, verdicts
from edgespec.setup.usage import Usage
from edgespec.types import TokenIds


def stats_of(tally: Tally) -> Stats:
    return tally.stats(drafter="d", draft_length="auto", target_device="cpu", drafter_device=None)


@settings(max_examples=60)
@given(
    params=sampling_params,
    kind=st.sampled_from([kind for kind in KINDS if kind != "cascade"]),
    length=st.one_of(st.integers(0, 7), st.none()),
    rule=st.sampled_from([equality, rejection]),
    table=st.integers(0, 2**32),
    max_tokens=st.integers(1, 40),
    ends=st.sets(st.integers(0, VOCAB - 1), max_size=2),
)
def test_counts_agree_with_each_other(
    params: SamplingParams,
    kind: str,
    length: int | None,
    rule: Acceptance,
    table: int,
    max_tokens: int,
    ends: set[int],
) -> None:
    sampler, drafters, whole = GumbelSampler(params, len(PROMPT)), drafters_of(kind, table), rule is rejection
    policy = (
        MeasuredPolicy(drafters, PassCosts(), AcceptanceRates(), with_distributions=whole)
        if length is None
        else FixedLength(drafters, length, with_distributions=whole)
    )
    tally, stop, emitted, last = Tally(), TokenStop(ends, max_tokens), 0, 0
    blocks = speculative_decode(
        PROMPT, TableDecoder(VOCAB, seed=table, context_length=40), sampler, policy, rule, max_tokens
    )
    for block in islice(blocks, 60):
        kept, reason = stop.cut(block.tokens)
        tally.add(block, len(kept))
        emitted, last = emitted + len(kept), len(block.tokens)
        if reason:
            break
    stats = stats_of(tally)
    assert stats.num_accepted <= stats.num_verified <= stats.num_drafted
    assert stats.num_corrections + stats.num_bonuses == stats.passes
    assert stats.num_verified == stats.num_accepted + stats.num_corrections
    assert stats.num_emitted == emitted
    assert 0 <= stats.num_accepted + stats.passes - stats.num_emitted <= last
    for name, count in (
        ("rounds", stats.passes),
        ("drafted", stats.num_drafted),
        ("verified", stats.num_verified),
        ("accepted", stats.num_accepted),
    ):
        assert sum(source[name] for source in stats.sources.values()) == count
    assert all(0 <= share <= 1 for share in stats.acceptance_by_position)


def test_usage_has_the_time_that_a_known_gain_saved() -> None:
    stats = replace(stats_of(Tally(passes=2, tokens=21, decode_tokens=20, decode_s=4.0)), num_accepted=8)
    assert usage_of(stats) == Usage(1, 1, 21, 8, 4.0, 0.0)  # nothing was drafted, so that nothing was saved
    drafted = replace(stats, num_drafted=9)
    assert usage_of(drafted) == Usage(1, 0, 21, 8, 0.0, 0.0)
    assert usage_of(replace(drafted, gain=Gain(1.5))) == Usage(1, 1, 21, 8, 4.0, 2.0)
    assert usage_of(stats_of(Tally())) == Usage(1, 1)


def block(draft: Tree, *emitted: int) -> Block:
    return Block(np.array(emitted, np.int32), draft, np.zeros((0, 0), np.float32), 0.1, 0.1)


# 5 ─ 6 and 7 ─ (8, 9 ─ 4)
TREE = Tree(np.array([5, 6, 7, 8, 9, 4], np.int32), parents=(-1, 0, -1, 2, 2, 4), source="tree")
CHAIN = Tree(np.array([5, 6, 7], np.int32), source="chain")


@pytest.mark.parametrize(
    ("draft", "emitted", "verdict"),
    [
        (CHAIN, [5, 6, 7, 8], (3, False)),
        (CHAIN, [5, 9], (2, True)),
        (CHAIN, [9], (1, True)),
        (Tree(np.zeros(0, np.int32)), [9], (0, False)),
        (TREE, [7, 9, 4, 11], (5, False)),
        (TREE, [7, 1], (4, True)),
        (TREE, [5, 6, 1], (3, False)),
        (TREE, [1], (2, True)),
    ],
)
def test_verdicts_are_on_what_hangs_on_the_kept(draft: Tree, emitted: TokenIds, verdict: tuple[int, bool]) -> None:
    assert verdicts(draft, np.array(emitted, np.int32)) == verdict


def test_positions_of_a_tree_are_depths() -> None:
    tally = Tally()
    tally.add(block(TREE, 7, 9, 11), 3)
    tally.add(block(CHAIN, 5, 6, 7, 11), 4)
    stats = stats_of(tally)
    assert stats.acceptance_by_position == (1.0, 1.0, 0.5)
    assert (stats.num_drafted, stats.num_accepted, stats.num_corrections, stats.num_bonuses) == (9, 5, 1, 1)
    assert stats.acceptance_rate == 5 / 9


@pytest.mark.parametrize(
    ("num_joined", "waited_s", "is_alone"),
    [(0, 0.0, True), (0, 60 * 40e-6, True), (0, 0.1, False), (1, 0.0, False)],
    ids=["no queue", "an empty queue", "waits", "a pass with another text"],
)
def test_an_answer_has_a_gain_where_its_passes_ran_alone(num_joined: int, waited_s: float, is_alone: bool) -> None:
    assert Tally(decode_s=2.0).was_alone(num_joined, waited_s) is is_alone
