"""Answers that are made with the drafters of a pool."""

from itertools import islice

import numpy as np
from imitated_machine import target

from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.scheduler import Block, Plain, speculative_decode
from edgespec.draft.pool import DrafterPool
from edgespec.draft.pool_policy import PoolPolicy
from edgespec.draft.speculation import Speculation

PROMPT = np.array([1, 2, 3, 1, 2], np.int32)


def tokens_of(blocks: list[Block]) -> list[int]:
    return [int(token) for block in blocks for token in block.tokens]


def answer(pool: DrafterPool, length: int | None, num_blocks: int = 60, seed: int = 4) -> list[int]:
    policy = PoolPolicy(pool, Speculation(pool.drafters, length))
    sampler = GumbelSampler(SamplingParams(temperature=0.8, seed=seed), len(PROMPT))
    found = tokens_of(
        list(islice(speculative_decode(PROMPT, target(), sampler, policy, relieve=pool.relieve), num_blocks))
    )
    plain = tokens_of(list(islice(speculative_decode(PROMPT, target(), sampler, Plain()), len(found))))
    assert found == plain
    return found
