"""NVIDIA cards by what passes took on them: drafts from the text lose in no category; in virtual time."""

from pathlib import Path

import numpy as np
import pytest
import replay

# SmolLM2-135M's own answers to three prompts of each category of Spec-Bench; each numbers its tokens anew.
ANSWERS = replay.read_answers(Path(__file__).with_name("smollm2_answers.jsonl"), None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("card", "is_sampled"),
    [
        *((card, False) for card in replay.CARDS_MS if "fpA_intB" not in card),  # which is off
        *((card, True) for card in ("SmolLM2 int4", "1.5B int4")),
    ],
)
def test_no_category_loses_on_a_card(card: str, is_sampled: bool) -> None:
    """At first use each width took 50 ms more, and auto was 0.61 of plain decoding."""
    played = replay.play_padded_card(card, ANSWERS, 0.02, is_sampled)
    # Gains are over a pass of one row; where passes are padded, plain decoding may be faster than that.
    means = replay.category_means(ANSWERS, played.found)
    assert len(means) == 13
    assert min(means.values()) >= max(1.0, played.plain)
    assert np.mean(list(means.values())) >= 1.3


@pytest.mark.slow
def test_first_uses_of_widths_are_what_made_drafting_lose() -> None:
    played = replay.play_card("SmolLM2 fp16", ANSWERS, 0.02)
    assert min(replay.category_means(ANSWERS, played.found).values()) < 0.8
