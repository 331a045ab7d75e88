"""What an engine over a pair folder answers, and how much of it was drafted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgespec import SamplingParams, load

SAMPLED = SamplingParams(temperature=0.7, seed=5)


def answers(prompts: Sequence[str], folder: Path, **options: Any) -> tuple[list[tuple[int, ...]], int, int]:
    """Greedy and sampled answers, and how many tokens were drafted and accepted."""
    with load(folder, **options) as engine:
        found = [
            engine.generate(prompt, sampling=sampling, max_tokens=40)
            for prompt in prompts
            for sampling in (SamplingParams(), SAMPLED)
        ]
    drafted, accepted = (
        sum(getattr(each.stats, name) for each in found) for name in ("num_drafted", "num_accepted")
    )
    return [each.token_ids for each in found], drafted, accepted
