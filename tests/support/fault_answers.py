"""What the tests of faults ask an engine, and how they join its answers."""

from edgespec import Chunk, SamplingParams

HOT = SamplingParams(temperature=0.8, seed=11)
PROMPT = "the in the an"


def joined(chunks: list[Chunk]) -> tuple[int, ...]:
    return tuple(token for chunk in chunks for token in chunk.token_ids)
