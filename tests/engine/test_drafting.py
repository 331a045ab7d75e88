"""Drafts that a request chooses for itself, and those of a predicted text: they change no text."""

from pathlib import Path

import numpy as np
import pytest

from edgespec import Drafting, Engine, SamplingParams, UsageError, load
from edgespec.decoding.sampling import GumbelSampler
from edgespec.draft.answer_cache import PredictionDrafter
from edgespec.draft.drafter import DraftRequest

SAMPLED = SamplingParams(temperature=0.8, seed=11)
PROMPT = "in the in the in the an"


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return load(tiny_model, deterministic=True, drafter="suffix+ngram")


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "drafting",
    [
        Drafting(drafters=()),
        Drafting(drafters=["ngram"], draft_length=2),
        Drafting(draft_length=5),
        Drafting(prediction="in the in the an other", draft_length=4),
        Drafting(drafters=(), prediction="the"),
    ],
    ids=["plain", "ngram", "long", "prediction", "prediction alone"],
)
def test_text_does_not_depend_on_who_drafts(engine: Engine, drafting: Drafting, sampling: SamplingParams) -> None:
    wanted = engine.generate(PROMPT, sampling=sampling, max_tokens=40)
    found = engine.generate(PROMPT, sampling=sampling, max_tokens=40, drafting=drafting)
    assert found.token_ids == wanted.token_ids
    assert (found.text, found.finish_reason) == (wanted.text, wanted.finish_reason)


def test_stats_name_the_drafters_that_were_chosen(engine: Engine) -> None:
    assert engine.open_drafters == ("ngram", "suffix")
    stats = engine.generate(PROMPT, max_tokens=10, drafting=Drafting(drafters=["ngram"], draft_length=2)).stats
    assert (stats.drafter, stats.draft_length) == ("ngram", "2")
    stats = engine.generate(PROMPT, max_tokens=10, drafting=Drafting(drafters=())).stats
    assert (stats.drafter, stats.num_drafted) == ("none", 0)
    assert "no drafter is in use" in stats.undrafted
    assert engine.generate(PROMPT, max_tokens=10).stats.drafter == "ngram+suffix"


def test_an_answer_that_was_predicted_takes_a_fraction_of_the_passes(engine: Engine) -> None:
    prompt = np.array(engine.encode(PROMPT), np.int32)
    wanted = engine.generate(PROMPT, max_tokens=40)
    drafter = PredictionDrafter(prompt, np.array(wanted.token_ids, np.int32))
    tokens, passes = list(prompt.tolist()), 0
    while len(tokens) < len(prompt) + 40:
        draft = drafter.draft(np.array(tokens, np.int32), DraftRequest(8), GumbelSampler(SamplingParams()))
        rest = wanted.token_ids[len(tokens) - len(prompt) :]
        agreed = next(
            (i for i, pair in enumerate(zip(draft.tokens, rest, strict=False)) if pair[0] != pair[1]), None
        )
        tokens += rest[: (len(draft.tokens) if agreed is None else agreed) + 1]
        passes += 1
    assert passes <= 8


def test_a_prediction_drafts_its_beginning_and_finds_its_place_again() -> None:
    def draft(*tokens: int) -> list[int]:
        drafter = PredictionDrafter(np.array([1, 2], np.int32), np.array([3, 4, 5], np.int32))
        found = drafter.draft(np.array(tokens, np.int32), DraftRequest(8), GumbelSampler(SamplingParams()))
        return [int(token) for token in found.tokens]

    assert draft(1, 2) == [3, 4, 5]
    assert draft(1, 2, 9, 4) == [5]
    assert draft(1, 2, 9) == []
    assert draft(1, 2, 3, 4, 5) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"drafters": "suffix"},
        {"drafters": [1]},
        {"draft_length": 0},
        {"draft_length": 25},
        {"draft_length": True},
        {"prediction": 7},
    ],
)
def test_values_that_cannot_be_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(fields))):
        Drafting(**fields)  # type: ignore[arg-type]


def test_drafters_that_are_not_open_are_refused_with_those_that_are(engine: Engine) -> None:
    with pytest.raises(UsageError, match="no drafter 'big' is open; open are: ngram, suffix"):
        engine.stream(PROMPT, drafting=Drafting(drafters=["big"]))


def test_a_prediction_of_any_length_is_taken(engine: Engine) -> None:
    found = engine.generate("the", max_tokens=3, drafting=Drafting(prediction="in the an " * 100_000))
    assert found.token_ids == engine.generate("the", max_tokens=3).token_ids
