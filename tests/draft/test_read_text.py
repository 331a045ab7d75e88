"""How much of a text a drafting head reads before its next draft."""

import numpy as np
import pytest

from edgespec.draft.read_text import Reading, ReadText
from edgespec.types import TokenIds

TEXT = np.arange(20_000, dtype=np.int32)


def following(text: ReadText, tokens: TokenIds, num_drafts: int) -> Reading:
    return text.next(tokens, lambda num_tokens: 0.005 * num_tokens, 0.5, num_drafts)


@pytest.mark.parametrize("size", [900, 8300, 20_000])
def test_of_a_long_text_the_end_is_read_and_later_the_rest(size: int) -> None:
    text = ReadText(max_unread=4096)
    assert following(text, TEXT[:size], 1) == Reading(64, 64, 64)
    text.observe(TEXT[:size], Reading(64, 64, 64))
    text.hold(TEXT[:size])
    assert following(text, TEXT[: size - 8], 20) == Reading(1, 1, 64), "a draft went on behind it"
    whole = following(text, TEXT[:size], 1000)
    assert whole == Reading(min(size, 4096), 1)
    text.observe(TEXT[:size], whole)
    assert following(text, TEXT[:size], 1) == Reading(1, 1)


def test_a_text_that_ends_in_what_was_skipped_is_unread() -> None:
    text = ReadText(max_unread=4096)
    text.observe(TEXT[:900], Reading(64, 64, 64))
    text.hold(TEXT[:900])
    for size in (820, 850):
        assert following(text, TEXT[:size], 1) == Reading(64, 64, 64)


def test_a_turn_behind_a_text_that_was_read_is_read_as_a_whole() -> None:
    text = ReadText(max_unread=4096)
    text.hold(TEXT[:1000])
    assert following(text, TEXT[:1300], 1) == Reading(300, 300)


def test_behind_states_that_were_left_out_nothing_more_is_read() -> None:
    text = ReadText(max_unread=4096)
    text.hold(TEXT[:900])
    text.leave_gap()
    assert following(text, TEXT[:1500], 1) == Reading(600, 600)
    assert following(text, TEXT[5000:6000], 1) == Reading(64, 64, 64), "another text has all of its states"
    text.begin_behind(TEXT[:1500])
    assert following(text, TEXT[:1501], 10_000) == Reading(1, 1)


def test_another_text_behind_one_with_a_gap_is_read_from_its_end_by_its_next_drafts_too() -> None:
    text = ReadText(max_unread=4096)
    text.begin_behind(TEXT[:900])
    another = TEXT[5000:6000]
    text.observe(another, following(text, another, 1))
    text.hold(another[:-1])
    assert following(text, another, 1) == Reading(1, 1, 64)


def test_a_model_that_is_no_head_reads_all() -> None:
    assert following(ReadText(), TEXT[:900], 1) == Reading(900, 900)
