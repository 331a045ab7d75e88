"""On the real default model: one text in deterministic mode, whatever drafts and how far."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec import Engine, SamplingParams, load

pytestmark = pytest.mark.model

PROMPTS = [
    "Write a Python function that counts the words of a text, then explain each line of the function.",
    "Repeat this sentence three times: the quick brown fox jumps over the lazy dog.",
]
SAMPLINGS = {"greedy": SamplingParams(), "sampled": SamplingParams(temperature=0.8, seed=7, top_p=0.95)}
# All of them for a model; what drafts from the text shares its passes with the others. Nearly all that int4 drafts
# is accepted, since the file has these bits; int8 is rounded anew, and wrong now and then. "auto", and int4 of a
# length that is chosen, are in test_by_default.
LENGTHS: dict[str, tuple[int | str, ...]] = {
    "ngram": (8, "auto"),
    "suffix": (2, "auto"),
    "lookahead": (2, "auto"),
    "self": (4, "auto"),
    "int4": (1, 8),
    "int8": (3, "auto"),
}
Texts = dict[tuple[str, str], tuple[int, ...]]


def texts_of(engine: Engine) -> Texts:
    return {
        (prompt, name): engine.generate(prompt, sampling=sampling, max_tokens=32).token_ids
        for prompt in PROMPTS
        for name, sampling in SAMPLINGS.items()
    }


@pytest.fixture(scope="module")
def model(smollm2_with_self: Path) -> Path:
    return smollm2_with_self


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[Texts]:
    with load(model, drafter="none", deterministic=True) as engine:
        yield texts_of(engine)


@pytest.mark.parametrize(
    ("drafter", "length"), [(drafter, length) for drafter, lengths in LENGTHS.items() for length in lengths]
)
def test_one_text_whatever_drafts_and_how_far(
    model: Path, smollm2_int4: Path, smollm2_int8: Path, plain: Texts, drafter: str, length: int | str
) -> None:
    named = {"int4": str(smollm2_int4), "int8": str(smollm2_int8)}.get(drafter, drafter)
    with load(model, drafter=named, draft_length=length, deterministic=True) as engine:
        assert texts_of(engine) == plain


@pytest.mark.parametrize("length", [3, "auto"])
@pytest.mark.parametrize("schedule", ["serial", "pipelined", "hedged"])
def test_one_text_whatever_the_schedule(
    model: Path, smollm2_int4: Path, plain: Texts, schedule: str, length: int | str
) -> None:
    """Each model in a lane of its own, with one thread."""
    with load(
        model,
        drafter=str(smollm2_int4),
        draft_length=length,
        schedule=schedule,
        num_threads=1,
        deterministic=True,
    ) as engine:
        assert texts_of(engine) == plain
        answer = engine.generate(PROMPTS[0], max_tokens=32)
    assert answer.token_ids == plain[PROMPTS[0], "greedy"]
    if length == 3:
        assert answer.stats.schedule == schedule
        assert (answer.stats.overlap > 0) == (schedule != "serial")


def test_by_default_the_text_is_that_of_no_drafter_and_repeats(
    model: Path, smollm2_int4: Path, plain: Texts
) -> None:
    for drafter in ("none", "auto", str(smollm2_int4)):
        with load(model, drafter=drafter) as engine:
            assert engine.is_deterministic
            assert texts_of(engine) == plain


@pytest.mark.parametrize("length", [4, "auto"])
def test_exact_has_the_text_of_passes_of_one_token(model: Path, length: int | str) -> None:
    """Without deterministic mode, where about one token in five is a near-tie."""
    with load(model, drafter="none", deterministic=False) as engine:
        plain = [engine.generate(prompt, max_tokens=40).token_ids for prompt in PROMPTS]
    with load(model, drafter="suffix", draft_length=length, deterministic=False, exact=True) as engine:
        answers = [engine.generate(prompt, max_tokens=40) for prompt in PROMPTS]
    assert [answer.token_ids for answer in answers] == plain
    if length == 4:
        assert sum(answer.stats.num_redecided for answer in answers) > 0
