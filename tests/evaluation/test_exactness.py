"""The comparison of plain and speculative text: silent where they agree, and it tells ties from defects."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
from double import Double
from table_decoder import TableDecoder
from table_runs import PROMPT, VOCAB, drafters_of

from edgespec.decoding.decoder import Decoder
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.scheduler import DraftPolicy
from edgespec.draft.measured import FixedLength
from edgespec.evaluation.exactness import Comparison, compare
from edgespec.types import Logits, TokenIds

SAMPLINGS = [SamplingParams(), SamplingParams(temperature=0.8, seed=3)]


@dataclass
class Moved(Double):
    """Its rows depend a little on the width of the pass, as those of real kernels do."""

    table: TableDecoder
    by: float
    num_fed: int = 0
    vocab_size: int = VOCAB
    context_length: int = 1 << 20

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        rows = self.table.logits(tokens, num_last)
        noise = np.random.default_rng((num_last, len(tokens))).normal(0, self.by, VOCAB)
        return rows + noise.astype(np.float32)


@dataclass
class Mistaken(Moved):
    """Rows in the middle of a pass are now and then another's, as after a wrong rewind."""

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        rows = self.table.logits(tokens, num_last).copy()
        if num_last > 2 and len(tokens) % 5 == 0:
            rows[1] = rows[1, ::-1]
        return rows


def policies() -> Mapping[str, DraftPolicy]:
    return {
        f"{kind} {length}": FixedLength(drafters_of(kind), length)
        for kind in ("near", "wild")
        for length in (1, 4)
    }


def compared(target: Decoder, samplings: list[SamplingParams], max_tokens: int = 40) -> Comparison:
    prompts = [PROMPT, PROMPT[::-1].copy(), PROMPT[:1]]
    return compare(target, prompts, policies, samplings, max_tokens=max_tokens)


def test_nothing_differs_where_rows_do_not() -> None:
    found = compared(TableDecoder(VOCAB, seed=1), SAMPLINGS)
    assert (found.num_tokens, found.differences) == (3 * 2 * 4 * 40, ())


def test_what_widths_explain_is_a_near_tie() -> None:
    found = compared(Moved(TableDecoder(VOCAB, seed=1), by=0.05), SAMPLINGS[:1])
    assert found.differences
    assert all(difference.is_near_tie for difference in found.differences)
    for difference in found.differences:
        assert difference.margin_of_one >= 0 >= difference.margin_of_wide
        assert difference.plain_token != difference.speculative_token


def test_what_widths_do_not_explain_is_a_defect() -> None:
    found = compared(Mistaken(TableDecoder(VOCAB, seed=1), by=0), SAMPLINGS[:1])
    assert found.differences
    assert not any(difference.is_near_tie for difference in found.differences)
    assert {difference.width_difference for difference in found.differences} == {0.0}


def test_all_differences_along_the_plain_text_are_found() -> None:
    found = compared(Mistaken(TableDecoder(VOCAB, seed=1), by=0), SAMPLINGS[:1], max_tokens=80)
    places = [(each.prompt, each.draft_length, each.position) for each in found.differences]
    assert len(places) == len(set(places)) > 5


@pytest.fixture(scope="module")
def whole() -> Comparison:
    return compare(TableDecoder(VOCAB, seed=1), [PROMPT], policies, SAMPLINGS, max_tokens=40)


@pytest.mark.parametrize("end", range(VOCAB))
def test_texts_end_at_end_tokens(whole: Comparison, end: int) -> None:
    ended = compare(TableDecoder(VOCAB, seed=1), [PROMPT], policies, SAMPLINGS, max_tokens=40, ends={end})
    assert ended.num_tokens <= whole.num_tokens
    assert ended.differences == ()


@dataclass
class Restless(Mistaken):
    """The last token's logit, which is never the largest, depends on the width of the pass by as much as 40."""

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        rows = super().logits(tokens, num_last)
        rows[:, -1] = rows[:, :-1].max(1) - 50 + 20 * (num_last % 3)
        return rows


def test_what_widths_change_elsewhere_excuses_nothing() -> None:
    found = compared(Restless(TableDecoder(VOCAB, seed=1), by=0), SAMPLINGS[:1])
    margins = [max(abs(each.margin_of_one), abs(each.margin_of_wide)) for each in found.differences]
    assert 0 < max(margins) < 40  # by which the last token moves
    assert not any(each.is_near_tie for each in found.differences)
