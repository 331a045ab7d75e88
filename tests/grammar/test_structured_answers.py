"""Answers that have to match a format: always valid, and the same whatever drafts."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from stuck import engine_of
from table_decoder import TableDecoder

from edgespec import Completion, Drafting, Engine, SamplingParams, UsageError, load
from edgespec.decoding.decoder import LOGITS, Can, Pass, Rows
from edgespec.decoding.tree import Tree
from edgespec.draft.drafter import Drafter, DraftRequest
from edgespec.draft.speculation import Speculation
from edgespec.draft.suffix import SuffixDrafter
from edgespec.types import Sampler, TokenIds

PROMPT = "in the an"
SAMPLED = SamplingParams(temperature=1.0, seed=5)
CUT = SamplingParams(temperature=0.9, seed=3, top_k=20, top_p=0.9, frequency_penalty=0.3)
SAMPLINGS = {"greedy": SamplingParams(), "sampled": SAMPLED, "cut": CUT}
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


@cache
def plain_answer(plain: Engine, sampling: str, max_tokens: int) -> Completion:
    return plain.generate(PROMPT, sampling=SAMPLINGS[sampling], max_tokens=max_tokens, response_format=FORMAT)


@pytest.mark.parametrize(
    ("sampling", "max_tokens"), [("greedy", 50), ("sampled", 70), pytest.param("cut", 50, marks=pytest.mark.slow)]
)
def test_a_constrained_answer_is_valid_and_the_same_whatever_drafts(
    plain: Engine, drafting: Engine, sampling: str, max_tokens: int
) -> None:
    wanted = plain_answer(plain, sampling, max_tokens)
    assert wanted.finish_reason == "stop"
    require_valid(wanted.text)
    drafted = drafting.generate(
        PROMPT, sampling=SAMPLINGS[sampling], max_tokens=max_tokens, response_format=FORMAT
    )
    assert (drafted.text, drafted.token_ids) == (wanted.text, wanted.token_ids)
    assert "grammar" in drafted.origins
    assert {*wanted.origins} == {"target"}


def test_no_row_of_a_pass_goes_without_the_mask(tiny_model: Path) -> None:
    """A drafter that always drafts what may not follow changes nothing, but for the rows that it costs."""

    class Foolish(Drafter):
        name, num_asked = "foolish", 0

        def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
            self.num_asked += 1
            drafted = (tokens[-1] + np.arange(1, 5)) % 250 + 3
            return Tree(drafted.astype(np.int32), (0,) * 4, source=self.name)

    foolish, table = Foolish(), TableDecoder(tiny.VOCAB, seed=3)
    alone = engine_of(tiny_model, table)
    wanted = alone.generate(PROMPT, raw=True, max_tokens=60, sampling=SAMPLED, response_format=FORMAT)
    require_valid(wanted.text)
    for length in (None, 4):
        drafted = engine_of(tiny_model, TableDecoder(tiny.VOCAB, seed=3))
        drafted._drafting = replace(
            drafted._drafting, speculation=Speculation(lambda: [foolish], draft_length=length)
        )
        found = drafted.generate(PROMPT, raw=True, max_tokens=60, sampling=SAMPLED, response_format=FORMAT)
        assert found.token_ids == wanted.token_ids
    assert foolish.num_asked


def test_drafts_of_rejection_sampling_keep_to_the_format(tiny_model: Path, tiny_drafter: Path) -> None:
    options: dict[str, Any] = {"drafter": str(tiny_drafter), "draft_length": 3, "schedule": "serial"}
    with load(tiny_model, acceptance="rejection", **options) as engine:
        for seed in range(2):
            sampling = SamplingParams(temperature=1.0, seed=seed)
            answer = engine.generate(PROMPT, sampling=sampling, max_tokens=60, response_format=FORMAT)
            require_valid(answer.text)
            assert len(answer.token_ids) < 60


def test_exact_answers_keep_to_the_format(plain: Engine, tiny_model: Path) -> None:
    engine = engine_of(tiny_model, TableDecoder(tiny.VOCAB, seed=3))
    wanted = engine.generate(PROMPT, raw=True, max_tokens=50, response_format=FORMAT)
    exact = engine_of(tiny_model, TableDecoder(tiny.VOCAB, seed=3))
    exact._near_tie = 0.5
    exact._drafting = replace(exact._drafting, speculation=Speculation(lambda: [SuffixDrafter()], draft_length=4))
    found = exact.generate(PROMPT, raw=True, max_tokens=50, response_format=FORMAT)
    assert found.token_ids == wanted.token_ids
    require_valid(found.text)


def test_a_greedy_target_that_finds_the_likeliest_token_itself_is_masked_too(tiny_model: Path) -> None:
    class Finding(TableDecoder):
        """It could give the likeliest token alone."""

        can = Can(best=True)

        def run(self, given: Pass) -> Rows:
            assert given.wants is LOGITS, "of which a mask leaves some out"
            return super().run(given)

    answer = engine_of(tiny_model, Finding(tiny.VOCAB, seed=3)).generate(
        PROMPT, raw=True, max_tokens=60, response_format=FORMAT
    )
    assert answer.finish_reason == "stop"
    require_valid(answer.text)


def test_biases_penalties_bans_and_stops_go_together_with_a_format(plain: Engine) -> None:
    wanted = {"type": "regex", "regex": "[abc]{6}"}
    (a,) = plain.tokenize("a")
    sampling = SamplingParams(logit_bias={a: -100}, frequency_penalty=1.0, temperature=1.0, seed=2, top_p=0.5)
    assert set(plain.generate(PROMPT, sampling=sampling, max_tokens=9, response_format=wanted).text) <= {*"bc"}
    answer = plain.generate(PROMPT, banned=["bb", "cc"], max_tokens=9, response_format=wanted, logprobs=2)
    assert re.fullmatch("[abc]{6}", answer.text)
    assert not re.search("bb|cc", answer.text)
    assert len(answer.logprobs) == 6
    stopped = plain.generate(PROMPT, stop="]", max_tokens=60, response_format=FORMAT)
    assert (stopped.finish_reason, "]" in stopped.text) == ("stop", False)


def test_a_ban_of_all_that_may_follow_is_refused(plain: Engine) -> None:
    with pytest.raises(UsageError, match="none that its format allows"):
        plain.generate(PROMPT, banned=["a"], max_tokens=9, response_format={"type": "regex", "regex": "a{3}"})


def test_an_answer_ends_validly_where_the_context_does(plain: Engine) -> None:
    prompt = plain.encode("in the an " * 400)[: plain.context_length - 40]
    answer = plain.generate(prompt, response_format=FORMAT)
    require_valid(answer.text)
    with pytest.raises(UsageError, match="may have 21 tokens here"):
        plain.generate(plain.encode("in the an " * 400)[: plain.context_length - 20], response_format=FORMAT)


def test_a_prefill_is_part_of_what_matches(plain: Engine) -> None:
    answer = plain.generate(PROMPT, prefill='{"name":"in', max_tokens=50, response_format=FORMAT)
    require_valid('{"name":"in' + answer.text)
    with pytest.raises(UsageError, match="beginning of the answer"):
        plain.generate(PROMPT, prefill="Sure!", max_tokens=50, response_format=FORMAT)


def test_a_conversation_keeps_its_format(plain: Engine) -> None:
    conversation = plain.chat(response_format={"type": "regex", "regex": "[xyz]{3}"}, max_tokens=8)
    assert all(re.fullmatch("[xyz]{3}", conversation.say("the in").text) for _ in range(2))


def test_plain_decoding_drafts_nothing_that_is_forced(drafting: Engine) -> None:
    answer = drafting.generate(PROMPT, drafting=Drafting(drafters=()), max_tokens=50, response_format=FORMAT)
    assert {*answer.origins} == {"target"}
    require_valid(answer.text)


def test_the_stats_say_that_the_grammar_drafted(plain: Engine, drafting: Engine) -> None:
    answer = drafting.generate(PROMPT, max_tokens=50, response_format=FORMAT)
    assert answer.stats.drafter.startswith("grammar+")
