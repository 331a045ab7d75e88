"""Structured output: how many answers match their schemas, and tokens a second with and without drafts.

    python bench/structured.py MODEL [--schemas 200] [--max-tokens 200] [--drafter suffix] [--seed 0]
        [--ways plain,drafted,free] [--temperature 0]

Each schema of bench/schemas.py is answered in each way, one right after the other: plain decoding under the
schema, with drafts under the schema, and, as what these are compared with, plain decoding of free text. An answer
counts as valid if jsonschema (pip install jsonschema) accepts it, formats included, and it ended by an end token.
MODEL is as edgespec.load takes it.
"""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import jsonschema
from command_line import command_line, parse_ways
from schemas import Case, make_schemas

from edgespec import Completion, Drafting, Engine, SamplingParams, UsageError, load
from edgespec.engine.answers import join_chunks

WAYS = ("plain", "drafted", "free")


@dataclass(slots=True)
class ShadowCount:
    """The answers of one way; num_tokens and seconds are those behind the first pass, which reads the prompt."""

    num_answers: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    refused: list[str] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)
    origins: Counter[str] = field(default_factory=Counter)

    def add(self, answer: Completion, num_tokens: int, seconds: float) -> None:
        self.num_answers += 1
        self.num_tokens += num_tokens
        self.seconds += seconds
        self.origins.update(answer.origins)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.seconds if self.seconds else 0.0


def fault_of(answer: Completion, schema: dict[str, Any]) -> str | None:
    """Why an answer does not match its schema; None where it does."""
    if answer.finish_reason != "stop":
        return f"it ended by {answer.finish_reason}: {answer.text[:80]!r}"
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    try:
        validator.validate(json.loads(answer.text))
    except ValueError as error:
        return f"it is no JSON ({error}): {answer.text[:80]!r}"
    except jsonschema.ValidationError as error:
        return str(error.message)[:200]
    return None


def answer(engine: Engine, case: Case, way: str, options: dict[str, Any]) -> tuple[Completion, int, float]:
    """An answer in one way, and its tokens and seconds behind the first pass."""
    wanted = None if way == "free" else {"type": "json_schema", "json_schema": {"schema": case.schema}}
    drafting = None if way == "drafted" else Drafting(drafters=())
    with engine.stream(case.prompt, response_format=wanted, drafting=drafting, **options) as stream:
        chunks = [next(stream)]
        started = perf_counter()
        chunks += stream
        seconds = perf_counter() - started
        done = join_chunks(chunks, stream.prompt_tokens)
        return done, len(done.token_ids) - len(chunks[0].token_ids), seconds


def run(
    engine: Engine, cases: Sequence[Case], ways: Sequence[str], options: dict[str, Any], say: Callable[[str], None]
) -> dict[str, ShadowCount]:
    tallies: dict[str, ShadowCount] = defaultdict(ShadowCount)
    for i, case in enumerate(cases):
        for way in ways[:: -1 if i % 2 else 1]:
            tally = tallies[way]
            try:
                found, num_tokens, seconds = answer(engine, case, way, options)
            except UsageError as error:
                tally.refused.append(f"{i} ({case.kind}): {error}")
                continue
            tally.add(found, num_tokens, seconds)
            if way != "free" and (fault := fault_of(found, case.schema)):
                tally.invalid.append(f"{i} ({case.kind}): {fault}")
        say(f"{i + 1}/{len(cases)} {case.kind}")
    return dict(tallies)


def report(tallies: dict[str, ShadowCount]) -> str:
    lines = [f"{'way':10} {'answers':>8} {'valid':>6} {'refused':>8} {'tokens':>8} {'tokens/s':>9} {'to free':>8}"]
    free = tallies["free"].rate if "free" in tallies else 0.0
    for way, tally in tallies.items():
        valid = "-" if way == "free" else str(tally.num_answers - len(tally.invalid))
        ratio = f"{tally.rate / free:.2f}" if free else "-"
        numbers = f"{len(tally.refused):8} {tally.num_tokens:8} {tally.rate:9.1f} {ratio:>8}"
        lines.append(f"{way:10} {tally.num_answers:8} {valid:>6} {numbers}")
    for way, tally in tallies.items():
        if tally.origins:
            shares = {name: round(count / tally.origins.total(), 3) for name, count in tally.origins.most_common()}
            lines.append(f"{way}: tokens from {shares}")
        lines += [f"{way}: schema {each}" for each in (*tally.refused, *tally.invalid)]
    return "\n".join(lines)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("model")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0)
    given = parser.parse_args()
    ways = parse_ways(parser, given.ways, WAYS)
    sampling = SamplingParams(temperature=given.temperature, seed=given.seed)
    options = {"sampling": sampling, "max_tokens": given.max_tokens}
    cases = make_schemas(given.schemas, given.seed)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with load(given.model, drafter=given.drafter, report=say) as engine:
        tallies = run(engine, cases, ways, options, say)
    print(report(tallies))
    return int(any(tally.invalid for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
