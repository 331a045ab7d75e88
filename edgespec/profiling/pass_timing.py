"""Times passes of a decoder that nothing is known of, in about a second."""

from time import perf_counter

import numpy as np

from edgespec.decoders import Decoder
from edgespec.policy.costs import PassCosts, pass_costs
from edgespec.types import append

_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
_PAST_TOKENS = 64
_MEASURE_S = 1.0
_ROUNDS = (2, 7)  # at least and at most


def measure_passes(decoder: Decoder) -> PassCosts:
    """Run passes of several widths alternately for about a second; the fastest of each counts."""
    past = np.arange(min(_PAST_TOKENS, decoder.context_length // 2), dtype=np.int32) % decoder.vocab_size
    widths = [width for width in _WIDTHS if len(past) + width <= decoder.context_length]
    taken_s: dict[int, float] = {}
    started = perf_counter()
    for i in range(_ROUNDS[1] + 1):
        if i > _ROUNDS[0] and perf_counter() - started > _MEASURE_S:
            break
        for width in widths:
            # Another token after the same past each time, so that the cache serves the past alone.
            new = (np.arange(width, dtype=np.int32) + len(past) + i + 1) % decoder.vocab_size
            begun = perf_counter()
            decoder.logits(append(past, new), width)
            if i:  # the first round warms up
                taken_s[width] = min(taken_s.get(width, np.inf), perf_counter() - begun)
    return pass_costs(taken_s)
