"""An answer is one text with a drafting head and without, whatever its kind, the schedule and the acceptance."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_heads

from edgespec import SamplingParams, load
from edgespec.errors import UsageError
from edgespec.models.pair import write_pair
from edgespec.types import TokenIds, append

pytestmark = pytest.mark.usefixtures("one_template_process")

PROMPTS = ("the in the an on er in the", "in the an", "an er on the the")
SAMPLED = SamplingParams(temperature=0.7, seed=5)
TARGET = tiny.random_weights()


@pytest.fixture(scope="module")
def texts(tiny_with_states: Path) -> list[TokenIds]:
    """Prompts with the target's own answers, greedy and sampled."""
    found = []
    with load(tiny_with_states, drafter="none") as engine:
        for prompt in PROMPTS:
            for sampling in (SamplingParams(), SAMPLED):
                answer = engine.generate(prompt, sampling=sampling, max_tokens=40)
                found.append(append(engine._encoder.encode(prompt), answer.token_ids))
    return found


@pytest.fixture(scope="module")
def pairs(
    tiny_with_states: Path, texts: list[TokenIds], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Pair folders by the kind of head; the heads know some of the target's texts."""
    folders = {kind: tmp_path_factory.mktemp("pairs") / kind for kind in ("recurrent", "steps")}
    for kind, folder in folders.items():
        shutil.copytree(tiny_with_states, folder / "target")
        if kind == "recurrent":
            weights = tiny_heads.fit_recurrent(TARGET, tiny_heads.recurrent_weights(1), texts)
            tiny_heads.write_recurrent(folder / "drafter", tiny_with_states, weights, name="eagle")
        else:
            weights = tiny_heads.fit_steps(TARGET, tiny_heads.step_weights(1), texts)
            tiny_heads.write_steps(folder / "drafter", tiny_with_states, weights, name="speculator")
        write_pair(folder)
    return folders


def answers(folder: Path, **options: Any) -> tuple[list[tuple[int, ...]], int, int]:
    """Greedy and sampled answers, and how many tokens were drafted and accepted."""
    with load(folder, **options) as engine:
        found = [
            engine.generate(prompt, sampling=sampling, max_tokens=40)
            for prompt in PROMPTS
            for sampling in (SamplingParams(), SAMPLED)
        ]
    drafted, accepted = (
        sum(getattr(each.stats, name) for each in found) for name in ("num_drafted", "num_accepted")
    )
    return [each.token_ids for each in found], drafted, accepted


@pytest.fixture(scope="module")
def plain(tiny_with_states: Path) -> list[tuple[int, ...]]:
    return answers(tiny_with_states, drafter="none", deterministic=True)[0]


@pytest.mark.parametrize("length", [3, "auto"])
@pytest.mark.parametrize("schedule", ["serial", "pipelined", "hedged"])
@pytest.mark.parametrize("kind", ["recurrent", "steps"])
def test_one_text_whatever_the_schedule(
    pairs: dict[str, Path], plain: list[tuple[int, ...]], kind: str, schedule: str, length: int | str
) -> None:
    if (kind, schedule) == ("steps", "hedged"):
        with pytest.raises(UsageError, match="speculator has no tree graph for its device"):
            load(pairs[kind], schedule=schedule, drafter=str(pairs[kind]))
        return
    found, drafted, accepted = answers(
        pairs[kind], drafter=str(pairs[kind]), schedule=schedule, draft_length=length, deterministic=True
    )
    assert found == plain
    if length == 3:
        assert accepted > drafted / 4 > 10


@pytest.mark.parametrize("kind", ["recurrent", "steps"])
def test_rejection_sampling_gives_one_text_each_time(pairs: dict[str, Path], kind: str) -> None:
    options: dict[str, Any] = {"acceptance": "rejection", "draft_length": 3, "deterministic": True}
    first, *others = (
        answers(pairs[kind], drafter=str(pairs[kind]), schedule=schedule, **options)
        for schedule in ("serial", "serial", "pipelined")
    )
    assert first[2] > 20
    assert [each[0] for each in others] == [first[0]] * 2
