"""Answers that have to match a format: always valid, and the same whatever drafts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec import Engine, SamplingParams, load

pytestmark = pytest.mark.usefixtures("one_template_process")

PROMPT = "in the an"
SAMPLED = SamplingParams(temperature=1.0, seed=5)
CUT = SamplingParams(temperature=0.9, seed=3, top_k=20, top_p=0.9, frequency_penalty=0.3)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["alpha", "beta"]},
        "points": {"type": "array", "items": {"type": "number"}, "minItems": 1},
    },
    "required": ["name", "kind", "points"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Iterator[Engine]:
    with load(tiny_model, deterministic=True, drafter="none") as engine:
        yield engine


@pytest.fixture(scope="module", params=["suffix", "suffix-fixed", "lookahead", "serial", "pipelined"])
def drafting(request: pytest.FixtureRequest, tiny_model: Path, tiny_drafter: Path) -> Iterator[Engine]:
    """Engines that draft from the text, in trees, and with a model between passes and beside them."""
    options: dict[str, Any] = {"drafter": request.param.partition("-")[0]}
    if request.param in ("serial", "pipelined"):
        options = {"drafter": str(tiny_drafter), "schedule": request.param}
    if request.param != "suffix":
        options["draft_length"] = 4
    with load(tiny_model, deterministic=True, **options) as engine:
        yield engine


def require_valid(text: str) -> None:
    found = json.loads(text)
    assert [*found] == ["name", "kind", "points"]
    assert isinstance(found["name"], str)
    assert found["kind"] in ("alpha", "beta")
    assert found["points"]
    assert all(isinstance(point, (int, float)) for point in found["points"])


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED, CUT])
@pytest.mark.parametrize("max_tokens", [50, 120])
def test_a_constrained_answer_is_valid_and_the_same_whatever_drafts(
    plain: Engine, drafting: Engine, sampling: SamplingParams, max_tokens: int
) -> None:
    wanted = plain.generate(PROMPT, sampling=sampling, max_tokens=max_tokens, response_format=FORMAT)
    assert wanted.finish_reason == "stop"
    require_valid(wanted.text)
    drafted = drafting.generate(PROMPT, sampling=sampling, max_tokens=max_tokens, response_format=FORMAT)
    assert (drafted.text, drafted.token_ids) == (wanted.text, wanted.token_ids)
    assert "grammar" in drafted.origins
