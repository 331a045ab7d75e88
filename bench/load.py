"""Several requests at once on one model: tokens a second together, and passes until a short one has a token.

    python bench/load.py MODEL [--requests 1,2,4,8] [--drafter auto] [--prompts FILE] [--no-deterministic]

Each number of requests is answered in three ways, alternately: one after another, by turns of passes, and in
passes that run as one. Every text is compared with that of its request alone. MODEL is as `edgespec.load` takes
it.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from command_line import command_line

from edgespec import Engine, load
from edgespec.engine.answer_stream import AnswerStream

_PROMPTS = Path(__file__).with_name("prompts.jsonl")
_MAX_TOKENS = (32, 96, 64, 128)  # of the requests in turn
_WAYS = ("after another", "turns", "as one")
_LONG_TOKENS = 200


class Request(NamedTuple):
    """A prompt and the most tokens of its answer."""

    prompt: str
    max_tokens: int


class Outcome(NamedTuple):
    """What several requests took together, and their tokens."""

    seconds: float
    tokens: tuple[tuple[int, ...], ...]
    num_passes: int

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))


def read_requests(path: Path, num: int) -> list[Request]:
    """Requests of mixed lengths, from the first turns of a file of prompts; it begins again at its end."""
    with path.open(encoding="utf-8") as lines:
        prompts = [str(json.loads(line)["turns"][0]) for line in lines if line.strip()]
    return [Request(prompts[i % len(prompts)], _MAX_TOKENS[i % len(_MAX_TOKENS)]) for i in range(num)]


def open_joined(model: str, max_parallel: int, options: dict[str, Any]) -> Engine:
    """An engine whose passes can run as one from the first on."""
    engine = load(model, max_parallel=max_parallel, **options)
    if max_parallel > 1:
        caches = engine._caches
        caches.give(1, np.array(engine.encode("", None)[:1], np.int32))
        if not queue_of(engine)._joiner.wait():
            print("passes of several answers cannot run as one here", file=sys.stderr)
    return engine


def queue_of(engine: Engine) -> Any:
    """The queue of passes of an engine that has made more than one cache."""
    return engine.target._passes.queue  # type: ignore[attr-defined]


@contextmanager
def way_of(engine: Engine, way: str) -> Iterator[int]:
    """Serve requests one after another, by turns, or as one; gives how many are asked at once."""
    if engine.max_parallel == 1:
        yield 1
        return
    queue = queue_of(engine)
    joiner, queue._joiner = queue._joiner, queue._joiner if way == "as one" else None
    try:
        yield 1 if way == "after another" else engine.max_parallel
    finally:
        queue._joiner = joiner


def answer(engine: Engine, request: Request) -> tuple[int, ...]:
    return engine.generate(request.prompt, max_tokens=request.max_tokens, temperature=0.0).token_ids


def run(engine: Engine, requests: Sequence[Request], way: str) -> Outcome:
    """Answer requests in a way."""
    with way_of(engine, way) as num_at_once, ThreadPoolExecutor(min(num_at_once, len(requests))) as pool:
        queue = queue_of(engine)
        before, started = queue.num_passes if queue else 0, perf_counter()
        tokens = tuple(pool.map(lambda request: answer(engine, request), requests))
        num_passes = (queue.num_passes if queue else 0) - before
        return Outcome(perf_counter() - started, tokens, num_passes)


def passes_to_first_token(engine: Engine, requests: Sequence[Request], way: str) -> int:
    """Passes that end until a short request has its first token, beside three long ones in the middle."""
    with way_of(engine, way):
        long = [engine.stream(each.prompt, max_tokens=_LONG_TOKENS, temperature=0.0) for each in requests[:3]]
        for stream in long:
            next(stream)
        short = engine.stream("Why?", max_tokens=1, temperature=0.0)
        list(short)
        for stream in long:
            stream.close()
        return waited_passes(short)


def waited_passes(stream: AnswerStream) -> int:
    return stream._reading.ticket.caller.waited_passes


def report(
    model: str, counts: Sequence[int], num_rounds: int, options: dict[str, Any], prompts: Path = _PROMPTS
) -> bool:
    """Print the figures; returns whether every text is that of its request alone."""
    requests = read_requests(prompts, max(counts, default=0) + 3)
    with load(model, max_parallel=1, **options) as engine:
        alone = [answer(engine, request) for request in requests[: max(counts)]]
        is_deterministic = engine.is_deterministic
    all_equal = True
    print(f"{model}: deterministic {is_deterministic}, {num_rounds} rounds, medians of total tokens/s")
    print(
        "| requests | " + " | ".join(_WAYS) + " | as one / turns | as one / after another | passes | texts equal |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for count in counts:
        with open_joined(model, max(2, count), options) as engine:
            outcomes: dict[str, list[Outcome]] = {way: [] for way in _WAYS}
            for _ in range(num_rounds):
                for way in _WAYS:
                    outcomes[way].append(run(engine, requests[:count], way))
            speeds = {
                way: median(each.num_tokens / each.seconds for each in made) for way, made in outcomes.items()
            }
            passes = "/".join(str(outcomes[way][-1].num_passes) for way in _WAYS)
            equal = sum(
                tokens == wanted
                for made in outcomes.values()
                for each in made
                for tokens, wanted in zip(each.tokens, alone, strict=False)
            )
            total = count * num_rounds * len(_WAYS)
            all_equal &= equal == total
            ratios = (speeds["as one"] / speeds[way] for way in ("turns", "after another"))
            print(
                f"| {count} | "
                + " | ".join(f"{speeds[way]:.1f}" for way in _WAYS)
                + " | "
                + " | ".join(f"{ratio:.2f}" for ratio in ratios)
                + f" | {passes} | {equal} of {total} |",
                flush=True,
            )
    with open_joined(model, 4, options) as engine:
        found = {way: passes_to_first_token(engine, requests, way) for way in _WAYS[1:]}
    print("passes until a short request beside three long ones has its first token:", found)
    return all_equal or not is_deterministic


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model")
    parser.add_argument("--requests", default="1,2,4,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--prompts", type=Path, default=_PROMPTS)
    parser.add_argument("--no-deterministic", action="store_true")
    asked = parser.parse_args()
    options: dict[str, Any] = {"drafter": asked.drafter, "offline": True}
    if asked.no_deterministic:
        options["deterministic"] = False
    if not report(
        asked.model, [int(each) for each in asked.requests.split(",")], asked.rounds, options, asked.prompts
    ):
        sys.exit("a text differs from that of its request alone")


if __name__ == "__main__":
    main()
