"""NVIDIA cards by what passes took on them: drafts from the text lose in no category; in virtual time."""

from pathlib import Path

import numpy as np
import pytest
import replay

from edgespec.setup.row_proof import MOST_COST

# SmolLM2-135M's own answers to three prompts of each category of Spec-Bench; each numbers its tokens anew.
ANSWERS = replay.read_answers(Path(__file__).with_name("smollm2_answers.jsonl"), None)
FORMS = [card for card in replay.CARDS_MS if "fpA_intB" not in card]  # which is off


@pytest.mark.parametrize("card", replay.CARDS_MS)
def test_prompts_are_read_about_as_fast_in_deterministic_mode(card: str) -> None:
    """They took 9 to 24 times as long in passes of the width that verifies drafts."""
    fast, same, cost = replay.card_shapes(card)
    for num_tokens in replay.PROMPTS:
        fast_ms, same_ms = (replay.prompt_ms(card, each, num_tokens) for each in (fast, same))
        assert same_ms <= (2.8 if num_tokens < 100 else 1.07) * fast_ms
    assert (cost <= MOST_COST) == ("int4" not in card or "fpA" in card)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("card", "is_sampled", "is_deterministic"),
    [
        *((card, False, False) for card in FORMS),
        *((card, True, False) for card in ("SmolLM2 int4", "1.5B int4")),
        *((card, True, True) for card in FORMS if replay.card_shapes(card).is_deterministic),
        *((card, False, True) for card in FORMS if replay.card_shapes(card).is_deterministic),
    ],
)
def test_no_category_loses_on_a_card(card: str, is_sampled: bool, is_deterministic: bool) -> None:
    """At first use each width took 50 ms more, and auto was 0.61 of plain decoding."""
    played = replay.play_padded_card(card, ANSWERS, 0.02, is_sampled, is_deterministic)
    # Gains are over a pass of one row; where passes are padded, plain decoding may be faster or slower than that.
    means = replay.category_means(ANSWERS, played.found)
    assert len(means) == 13
    assert min(means.values()) >= max(1.0, played.plain)
    assert np.mean(list(means.values())) >= 1.3


@pytest.mark.slow
def test_first_uses_of_widths_are_what_made_drafting_lose() -> None:
    played = replay.play_card("SmolLM2 fp16", ANSWERS, 0.02)
    assert min(replay.category_means(ANSWERS, played.found).values()) < 0.8
