"""A device's logits and greedy tokens compared with the CPU's, and whether a difference is only rounding."""

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from edgespec.decoding.decoder import BEST, Decoder, Pass
from edgespec.evaluation.exactness import width_difference
from edgespec.runtimes.device_checks import is_argmax_sound
from edgespec.types import Logits, TokenIds, append

_NUM_PROMPT = 48
# In standard deviations of all logits. Half floats, and activations in 8 bits on the CPU, move a row by one or two
# hundredths.
_TOLERANCE = 0.05
# Rounding moves the distance of two logits by less than this many typical differences of a logit.
_NEAR_TIE = 6


def compare_with_cpu(decoder: Decoder, reference: Decoder, num_tokens: int = 24) -> dict[str, Any]:
    """Compare rows along the device's greedy text, in passes of several widths, and its tokens, with the CPU's.

    The CPU reads that text in one pass, because its passes of the gpu form take about as long at any width
    (docs/log/devices.md).
    """
    prompt = (np.arange(_NUM_PROMPT) * 7919 % min(2048, reference.vocab_size)).astype(np.int32)
    generated = decode_greedily(decoder, prompt, num_tokens)
    text = generated[:-1]
    expected = reference.logits(text, num_tokens).copy()
    by_width = {
        width: compare_rows(_read_in_passes(decoder, text, num_tokens, width), expected) for width in (1, 4, 24)
    }
    differing = np.flatnonzero(expected.argmax(1) != generated[_NUM_PROMPT:])
    chosen = _check_argmax(decoder, text, num_tokens)
    is_right = all(found["verdict"] == "right" for found in [*by_width.values(), chosen] if found)
    return {
        "rows": by_width,
        "chosen": chosen,
        "greedy": {"num_tokens": num_tokens, "first_difference": int(differing[0]) if len(differing) else None},
        "verdict": "right" if is_right else "wrong",
    }


def _check_argmax(decoder: Decoder, text: TokenIds, num_rows: int) -> dict[str, Any] | None:
    """Compare the tokens that the device chooses with its own rows; None where the device does not choose."""
    if not decoder.can.best:
        return None
    rows = decoder.logits(text, num_rows).copy()
    found = decoder.run(Pass(text, num_last=num_rows, wants=BEST)).best
    assert found is not None
    return {
        "verdict": "right" if is_argmax_sound(rows, found) else "wrong",
        "num_rows": num_rows,
        "other": int((found.ids != rows.argmax(1)).sum()),
    }


def decode_greedily(decoder: Decoder, prompt: TokenIds, num_tokens: int) -> TokenIds:
    text = prompt
    for _ in range(num_tokens):
        text = np.append(text, decoder.logits(text, 1)[0].argmax().astype(np.int32))
    return text


def _read_in_passes(decoder: Decoder, text: TokenIds, num_rows: int, width: int) -> Logits:
    """The last rows of a text, [num_rows, vocab_size], read in passes of one width."""
    decoder.logits((text[:1] + 1) % decoder.vocab_size, 1)  # a different text empties the cache
    first = len(text) - num_rows
    stops = range(first + width, len(text) + 1, width)
    return np.concatenate([decoder.logits(text[:stop], width).copy() for stop in stops])


def compare_rows(rows: Logits, expected: Logits) -> dict[str, Any]:
    """Whether rows differ from the expected ones by rounding alone, and where the likeliest token differs.

    Two tokens are a near-tie where their expected logits differ by less than rounding typically moves them. The
    median over all rows is typical, so that one wrong row does not excuse itself.
    """
    difference = (rows - expected).astype(np.float64)
    by_row = np.sqrt(np.square(difference).mean(1))
    near_ties = wrong = 0
    for row, expected_row in zip(rows, expected, strict=True):
        best, other = int(expected_row.argmax()), int(row.argmax())
        if best != other:
            is_near = float(expected_row[best] - expected_row[other]) <= _NEAR_TIE * float(median(by_row))
            near_ties, wrong = near_ties + is_near, wrong + (not is_near)
    largest = float(by_row.max() / expected.std())
    is_right = np.isfinite(largest) and largest < _TOLERANCE and not wrong
    return {
        "verdict": "right" if is_right else "wrong",
        "largest_difference": largest if np.isfinite(largest) else None,  # in standard deviations of all rows
        "num_rows": len(rows),
        "near_ties": near_ties,
        "wrong": wrong,
    }


def compare_texts(
    prompt: Sequence[int] | TokenIds, plain: Sequence[int], speculative: Sequence[int], target: Decoder, width: int
) -> str:
    """Whether two answers are the "same", or a "near-tie" or "different" at the first token that differs.

    Args:
        width: The width of the passes that made the speculative answer.
    """
    differing = [i for i, (one, other) in enumerate(zip(plain, speculative, strict=False)) if one != other]
    if not differing:
        return "same" if len(plain) == len(speculative) else "different"
    first = differing[0]
    prefix = append(prompt, plain[:first])
    row = target.logits(prefix, 1)[0]
    pair = plain[first], speculative[first]
    margin = abs(float(row[pair[0]]) - float(row[pair[1]]))
    is_near = margin <= width_difference(target, prefix, pair, width)
    return f"{'near-tie' if is_near else 'different'} at token {first}"
