"""What a head learns from a stream of answers: the share of tokens that it would draft right, with and without.

    python bench/learning.py PAIR --prompts FILE [--max-tokens N] [--block N] [--memory | --without]

PAIR is a pair folder whose drafter is a drafting head; what it learns is deleted at the end. Each line of FILE has
a prompt, and a subject if the stream changes it. Answers are made in order, with a rest behind each in which the
head learns. A line of the table is a block of answers.

Each line has the memory that the process has resident, too: run the same with --without, which learns nothing,
and the difference is what learning takes in all. --memory says what that is: the arrays that learning keeps, and
the most that it has allocated for a while in a rest, by tracemalloc; times are those of a traced program then.
"""

import json
import secrets
import tracemalloc
from dataclasses import fields
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import psutil
from command_line import command_line

from edgespec import load
from edgespec.draft.learned_head import LearnedHead, ShadowCount
from edgespec.setup.pair import learned_files
from edgespec.system.system_info import peak_rss_bytes

_RESIDENT = f"{'resident MB':>12} {'at most':>11}"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("pair", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--block", type=int, default=20, help="answers in a line of the table")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--memory", action="store_true", help="trace what learning allocates")
    how.add_argument("--without", action="store_true", help="learn nothing; says the memory of the process alone")
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.prompts.read_text("utf-8").splitlines() if line.strip()]
    domain = f"bench-{secrets.token_hex(4)}"
    try:
        if options.without:
            _answer(options.pair, lines, options.max_tokens, options.block)
        else:
            _measure(options.pair, domain, lines, options.max_tokens, options.block, is_traced=options.memory)
    finally:
        for file in learned_files(options.pair):
            if file.domain == domain:
                file.forget()


def held_bytes(learned: LearnedHead | None) -> int:
    """What the arrays of rows and corrections take; corrections that are one object count once."""
    if learned is None:
        return 0
    holders = {id(one): one for one in (learned.rows, learned.active, learned.previous, learned.candidate) if one}
    arrays: list[Any] = [getattr(one, field.name) for one in holders.values() for field in fields(one)]
    return sum(each.nbytes for each in arrays if isinstance(each, np.ndarray))


def _answer(pair: Path, lines: list[dict[str, str]], max_tokens: int, block: int) -> None:
    print(f"{'answers':>9} {_RESIDENT}")
    with load(pair, drafter=str(pair)) as engine:
        for number, line in enumerate(lines, 1):
            engine.generate(line["prompt"], max_tokens=max_tokens, temperature=0.0)
            if number % block == 0 or number == len(lines):
                print(f"{number:9} {_resident()}", flush=True)


def _resident() -> str:
    """Memory that the process has resident, now and at most so far."""
    return f"{psutil.Process().memory_info().rss / 1e6:12.1f} {peak_rss_bytes() / 1e6:11.1f}"


def _measure(
    pair: Path, domain: str, lines: list[dict[str, str]], max_tokens: int, block: int, *, is_traced: bool
) -> None:
    print(
        f"{'answers':>9} {'subject':12} {'places':>7} {'without':>8} {'with':>8} {'swaps':>6} {'learning s':>11}"
        f" {'kept MB':>8} {_RESIDENT}" + (f" {'rest MB':>8}" if is_traced else "")
    )
    if is_traced:
        tracemalloc.start()
    with load(pair, drafter=str(pair), learn=domain) as engine:
        learner = engine._drafting.learner
        assert learner is not None, "no head of this pair can learn"
        before, rested_s, most_kept, most_in_rest = ShadowCount(), 0.0, 0, 0
        for number, line in enumerate(lines, 1):
            engine.generate(line["prompt"], max_tokens=max_tokens, temperature=0.0)
            started, allocated = process_time(), tracemalloc.get_traced_memory()[0]
            if is_traced:
                tracemalloc.reset_peak()
            learner.wait()
            rested_s += process_time() - started
            most_in_rest = max(most_in_rest, tracemalloc.get_traced_memory()[1] - allocated)
            learned = learner.learner.learned
            most_kept = max(most_kept, held_bytes(learned))
            if learned is None or (number % block and number < len(lines)):
                continue
            now = learned.tally
            places = max(1, now.num_rows - before.num_rows)
            shares = [(getattr(now, name) - getattr(before, name)) / places for name in ("num_plain", "num_used")]
            subject = line.get("subject", "")
            print(
                f"{number:9} {subject:12} {places:7} {shares[0]:8.1%} {shares[1]:8.1%} {learned.num_swaps:6} "
                f"{rested_s:11.1f} {most_kept / 1e6:8.2f} {_resident()}"
                + (f" {most_in_rest / 1e6:8.2f}" if is_traced else ""),
                flush=True,
            )
            before = now


if __name__ == "__main__":
    main()
