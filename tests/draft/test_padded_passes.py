"""Where passes are padded, several widths are one pass: nothing that is seen makes them differ."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import decoder
from hypothesis import given, settings
from hypothesis import strategies as st
from table_decoder import TableDecoder

from edgespec.decoding.decoder import EVEN_WIDTHS, Can
from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.tree import Tree
from edgespec.draft.acceptance_rates import AcceptanceRates
from edgespec.draft.costs import ContextCosts, PassCosts, run_width
from edgespec.draft.drafter import Drafter, DraftRequest
from edgespec.draft.measured import MeasuredPolicy
from edgespec.draft.speculation import Speculation
from edgespec.setup.measure import complete_profile
from edgespec.setup.profile import Profile
from edgespec.types import Sampler, TokenIds

WIDTHS = range(1, 31)
FAR = ContextCosts.between(128, {1: 0.02, 2: 0.03, 16: 0.05}, 4128, {1: 0.04, 2: 0.08, 16: 0.22})
RATIOS = st.dictionaries(st.integers(2, 40), st.floats(1.0, 9.0), max_size=6)
SEEN = st.lists(st.tuples(st.integers(1, 27), st.floats(1e-4, 1.0)), max_size=12)


def expect_alike(costs: PassCosts, widths: tuple[int, ...] = EVEN_WIDTHS) -> None:
    times_s, known, spreads = costs.pass_times_s(25), costs.known_ratios(), costs.known_spreads()
    assert times_s == [costs.pass_s(width) for width in range(1, 26)]
    for first in range(1, widths[0] + 1):
        assert costs.ratio(first) == 1.0
        assert costs.spread(first) == 0.0
        assert known.get(first, 1.0) == 1.0
    pairs = [(each, each + 1) for each in WIDTHS if run_width(each, widths) == run_width(each + 1, widths)]
    for one, other in pairs:
        assert costs.ratio(one) == costs.ratio(other)
        assert costs.pass_s(one) == costs.pass_s(other)
        assert costs.spread(one) == costs.spread(other)
        assert costs.mean_spread({one: 0.5}) == costs.mean_spread({other: 0.5})
        assert costs.mean_spread({one: 0.25, other: 0.25}) == costs.mean_spread({one: 0.5})
        if one in known and other in known:
            assert known[one] == known[other]
        if one > 1 and one in spreads and other in spreads:
            assert spreads[one] == spreads[other]


@settings(max_examples=60)
@given(
    widths=st.sampled_from([EVEN_WIDTHS, (4, 16), (8, 64), (1, 4, 8, 64)]),
    ratios=RATIOS,
    spread=st.none() | st.floats(0.01, 1.0),
    seen=SEEN,
    length=st.sampled_from([0, 128, 3000]),
)
def test_no_passes_make_two_widths_differ(
    widths: tuple[int, ...],
    ratios: dict[int, float],
    spread: float | None,
    seen: list[tuple[int, float]],
    length: int,
) -> None:
    spreads = dict.fromkeys(ratios, spread) if spread is not None else {}
    costs = PassCosts({1: 1.0} | ratios, None, FAR, length, spreads=spreads, widths=widths)
    expect_alike(costs, widths)
    for width, taken_s in seen:
        costs.observe(width, taken_s)
    expect_alike(costs, widths)
    again = PassCosts(costs.known_ratios(), spreads=costs.known_spreads(), widths=widths)
    expect_alike(again, widths)
    for width in WIDTHS[:25]:
        costs.context_length = 0
        assert abs(again.ratio(width) - costs.ratio(width)) < 1e-9 * costs.ratio(width)


def test_ratios_are_as_unsure_as_elsewhere_where_none_was_measured() -> None:
    assert PassCosts(widths=EVEN_WIDTHS).spread(4) == PassCosts().spread(4)


@settings(max_examples=40)
@given(seen=SEEN)
def test_a_pass_of_either_width_teaches_the_same(seen: list[tuple[int, float]]) -> None:
    odd, even = (PassCosts({1: 1.0, 4: 1.4, 16: 3.0}, widths=EVEN_WIDTHS) for _ in range(2))
    for width, taken_s in seen:
        odd.observe(width - 1 + width % 2, taken_s)
        even.observe(width + width % 2, taken_s)
    assert odd.pass_times_s(25) == even.pass_times_s(25)
    assert odd.known_spreads() == even.known_spreads()


class Padding(TableDecoder):
    """Whose passes are padded."""

    can = Can(widths=EVEN_WIDTHS)


class AsTheyAre(TableDecoder):
    can = Can()


def test_a_profile_measures_one_of_two_widths() -> None:
    kinds = {Padding: True, AsTheyAre: False, TableDecoder: False}
    for kind, is_padded in kinds.items():
        table = kind(9, seed=0)
        profile = complete_profile(None, table, {})
        assert profile.widths == table.can.widths == (EVEN_WIDTHS if is_padded else ())
        assert (2 in profile.passes_s[min(profile.passes_s)]) != is_padded
        if is_padded:
            expect_alike(profile.costs())
            assert profile.pass_s(2, 4096) == profile.pass_s(1, 4096)


def test_a_stored_profile_that_denies_the_padding_is_corrected() -> None:
    """A first profile of a busy machine believed 1.56 for two tokens, and drafts of one were not made."""
    stored = Profile(passes_s={128: {1: 0.01, 2: 0.0156, 4: 0.0182}}, prefill_s=0.001)
    assert stored.costs().ratio(2) == pytest.approx(1.56)
    profile = complete_profile(stored, Padding(9, seed=0), {})
    assert profile.costs().ratio(2) == 1.0
    assert profile.costs().ratio(3) == profile.costs().ratio(4) == 1.82
    refined = profile.with_ratios({1: 1.0, 2: 1.56, 3: 1.5, 4: 1.6})
    assert refined.pass_s(2, 0) == refined.pass_s(1, 0)
    assert refined.pass_s(3, 0) == refined.pass_s(4, 0)
    speculation = Speculation(ratios={1: 1.0, 2: 1.56}, widths=EVEN_WIDTHS)
    assert speculation.costs().ratio(2) == 1.0


class OneGuess(Drafter):
    name = "text"

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        return Tree(np.zeros(request.num_tokens, np.int32), (0,) * request.num_tokens, source=self.name)


def test_the_second_token_of_a_pair_is_drafted_for_nothing() -> None:
    drafted = {}
    for is_padded in (False, True):
        costs = PassCosts({1: 1.0, 2: 1.56, 4: 1.82}, 0.01, widths=EVEN_WIDTHS if is_padded else ())
        policy = MeasuredPolicy([OneGuess()], costs, AcceptanceRates({("text", 0): (5.0, 50.0)}))
        round = policy.propose(np.zeros(4, np.int32), 30, GumbelSampler(SamplingParams()))
        drafted[is_padded] = len(round.draft.tokens)
    assert drafted == {False: 0, True: 1}


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_decoder_says_whether_its_passes_are_padded(
    tiny_model: Path, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, run = decoder(tiny_model, deterministic=deterministic), []
    real = target._passes.run

    def counted(tokens: TokenIds, *args: Any, **kwargs: Any) -> Any:
        run.append(len(tokens) + kwargs.get("num_padded", 0))
        return real(tokens, *args, **kwargs)

    monkeypatch.setattr(target._passes, "run", counted)
    text = np.arange(20, dtype=np.int32)
    for width in (1, 2, 3, 4, 7):
        target.logits(text[:8], 1)
        run.clear()
        target.logits(text[: 8 + width], width)
        assert run == [width + width % 2 if target.can.widths else width]
    assert target.can.widths == (EVEN_WIDTHS if deterministic else ())
