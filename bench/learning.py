"""What a head learns from a stream of answers: the share of tokens that it would draft right, with and without.

    python bench/learning.py PAIR --prompts FILE [--max-tokens N] [--block N]

PAIR is a pair folder whose drafter is a drafting head; what it learns is deleted at the end. Each line of FILE has
a prompt, and a subject if the stream changes it. Answers are made in order, with a rest behind each in which the
head learns. A line of the table is a block of answers.
"""

import json
import secrets
from pathlib import Path
from time import process_time

from command_line import command_line

from edgespec import load
from edgespec.drafters.learned_file import forget, learned_files
from edgespec.drafters.learned_head import Tally


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("pair", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--block", type=int, default=20, help="answers in a line of the table")
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.prompts.read_text("utf-8").splitlines() if line.strip()]
    domain = f"bench-{secrets.token_hex(4)}"
    print(
        f"{'answers':>9} {'subject':12} {'places':>7} {'without':>8} {'with':>8} {'swaps':>6} {'learning s':>11}"
    )
    try:
        _measure(options.pair, domain, lines, options.max_tokens, options.block)
    finally:
        for part in (options.pair, *options.pair.iterdir()):
            for file in learned_files(part):
                if file.domain == domain:
                    forget(file)


def _measure(pair: Path, domain: str, lines: list[dict[str, str]], max_tokens: int, block: int) -> None:
    with load(pair, drafter=str(pair), learn=domain) as engine:
        learner = engine._learner
        assert learner is not None, "no head of this pair can learn"
        before, rested_s = Tally(), 0.0
        for number, line in enumerate(lines, 1):
            engine.generate(line["prompt"], max_tokens=max_tokens)
            started = process_time()
            learner.wait()
            rested_s += process_time() - started
            learned = learner.learner.learned
            if learned is None or (number % block and number < len(lines)):
                continue
            now = learned.tally
            places = max(1, now.num_rows - before.num_rows)
            shares = [(getattr(now, name) - getattr(before, name)) / places for name in ("num_plain", "num_used")]
            subject = line.get("subject", "")
            print(
                f"{number:9} {subject:12} {places:7} {shares[0]:8.1%} {shares[1]:8.1%} {learned.num_swaps:6} "
                f"{rested_s:11.1f}",
                flush=True,
            )
            before = now


if __name__ == "__main__":
    main()
