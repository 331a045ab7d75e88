"""A grammar as the constraint of one answer: masks, forced tokens, and the way to the end."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from edgespec.grammar.compile import GrammarCompiler
from edgespec.grammar.constraint import GrammarConstraint
from edgespec.grammar.response_format import read_format
from edgespec.tokenization.tokenizer import Tokenizer
from edgespec.types import TokenIds

END = 2
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
        "home": {
            "type": "object",
            "properties": {"street_name": {"type": "string"}, "code": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street_name", "code"],
        },
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler(tiny_model: Path) -> GrammarCompiler:
    return GrammarCompiler(tiny_model / "tokenizer.json", tiny.VOCAB, (END, 0))


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model / "tokenizer.json")


def constraint_of(compiler: GrammarCompiler, stated: dict[str, Any], max_tokens: int = 500) -> GrammarConstraint:
    wanted = read_format(stated)
    assert wanted
    return GrammarConstraint(compiler.compile(wanted), max_tokens)


def schema(stated: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": stated}}


def allowed(constraint: GrammarConstraint, answer: TokenIds) -> set[int]:
    bias = constraint.bias(answer)
    assert bias is not None
    return {*np.flatnonzero(bias == 0).tolist()}


def answer_at_random(constraint: GrammarConstraint, rng: np.random.Generator, most: int = 600) -> TokenIds:
    """An answer of tokens that may follow and leave room, chosen at random."""
    answer = np.zeros(0, np.int32)
    while len(answer) < most and END not in answer:
        choices = rng.permutation(sorted(allowed(constraint, answer)))
        token = next(
            (int(each) for each in choices[:8] if constraint.leaves_room(answer, int(each))),
            None,
        )
        answer = np.append(answer, np.int32(constraint.way_out(answer) if token is None else token))
    return answer


def text_of(answer: TokenIds, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(answer.tolist())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("max_tokens", [75, 90, 200])
def test_an_answer_that_nears_its_limit_ends_validly(
    compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int, max_tokens: int
) -> None:
    constraint = constraint_of(compiler, schema(PERSON), max_tokens)
    answer = answer_at_random(constraint, np.random.default_rng(seed))
    assert len(answer) <= max_tokens
    found = json.loads(text_of(answer, tokenizer))
    assert {*PERSON["required"]} <= {*found}  # type: ignore[misc]
