"""What a device computes beside what the CPU does: rows, greedy tokens, and whether a difference is rounding."""

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from edgespec.exactness import width_difference
from edgespec.runtimes.soundness import chooses_soundly
from edgespec.types import ArgmaxDecoder, Decoder, Logits, TokenIds

_NUM_READ = 48  # tokens of the prompt behind which rows are compared
# Of the spread of the rows: half floats, and activations in 8 bits on the CPU, move a row by a hundredth or two.
_TOLERANCE = 0.05
_NEAR = 6  # the distance of two logits moves by less than so many typical differences of a logit


def beside_cpu(decoder: Decoder, reference: Decoder, num_tokens: int = 24) -> dict[str, Any]:
    """Rows along the device's greedy text, by passes of several widths, and its tokens, beside the CPU's rows.

    The CPU reads that text at once: its passes of the gpu form take about as long at any width (docs/log.md).
    """
    prompt = (np.arange(_NUM_READ) * 7919 % min(2048, reference.vocab_size)).astype(np.int32)
    own = greedy(decoder, prompt, num_tokens)
    text = own[:-1]
    expected = reference.logits(text, num_tokens).copy()
    by_width = {width: verdict(_rows(decoder, text, num_tokens, width), expected) for width in (1, 4, 24)}
    differing = np.flatnonzero(expected.argmax(1) != own[_NUM_READ:])
    chosen = _chosen(decoder, text, num_tokens)
    is_right = all(found["verdict"] == "right" for found in [*by_width.values(), chosen] if found)
    return {
        "rows": by_width,
        "chosen": chosen,
        "greedy": {"num_tokens": num_tokens, "first_difference": int(differing[0]) if len(differing) else None},
        "verdict": "right" if is_right else "wrong",
    }


def _chosen(decoder: Decoder, text: TokenIds, num_rows: int) -> dict[str, Any] | None:
    """The device's own choice of tokens beside its own rows; None where it does not choose."""
    if not (isinstance(decoder, ArgmaxDecoder) and decoder.has_argmax):
        return None
    rows = decoder.logits(text, num_rows).copy()
    found = decoder.argmax(text, num_rows)
    return {
        "verdict": "right" if chooses_soundly(rows, found) else "wrong",
        "num_rows": num_rows,
        "other": int((found.ids != rows.argmax(1)).sum()),
    }


def greedy(decoder: Decoder, prompt: TokenIds, num_tokens: int) -> TokenIds:
    text = prompt
    for _ in range(num_tokens):
        text = np.append(text, decoder.logits(text, 1)[0].argmax().astype(np.int32))
    return text


def _rows(decoder: Decoder, text: TokenIds, num_rows: int, width: int) -> Logits:
    """Those behind the last tokens of a text, read in passes of a width."""
    decoder.logits((text[:1] + 1) % decoder.vocab_size, 1)  # nothing is held of the text any more
    first = len(text) - num_rows
    stops = range(first + width, len(text) + 1, width)
    return np.concatenate([decoder.logits(text[:stop], width).copy() for stop in stops])


def verdict(rows: Logits, expected: Logits) -> dict[str, Any]:
    """Whether rows are those expected but for rounding, and what differs in the likeliest token.

    Two tokens are a near-tie where the expected row sets them apart by less than rounding typically moves them;
    what is typical is told by all rows, not by the one in question.
    """
    difference = (rows - expected).astype(np.float64)
    by_row = np.sqrt(np.square(difference).mean(1))
    typical = float(median(by_row))
    near_ties = wrong = 0
    for row, wanted in zip(rows, expected, strict=True):
        mine, other = int(wanted.argmax()), int(row.argmax())
        if mine != other:
            is_near = float(wanted[mine] - wanted[other]) <= _NEAR * typical
            near_ties, wrong = near_ties + is_near, wrong + (not is_near)
    apart = float(by_row.max() / expected.std())
    is_right = np.isfinite(apart) and apart < _TOLERANCE and not wrong
    return {
        "verdict": "right" if is_right else "wrong",
        "largest_difference": apart if np.isfinite(apart) else None,  # a row's, in standard deviations of all
        "num_rows": len(rows),
        "near_ties": near_ties,
        "wrong": wrong,
    }


def same_text(prompt: TokenIds, plain: Sequence[int], other: Sequence[int], target: Decoder, width: int) -> str:
    """same; or near-tie or different at the first token that is another.

    Args:
        width: Of the passes of the other.
    """
    apart = [i for i, (one, two) in enumerate(zip(plain, other, strict=False)) if one != two]
    if not apart:
        return "same" if len(plain) == len(other) else "different"
    at = apart[0]
    prefix = np.append(prompt, np.array(plain[:at], np.int32))
    row = target.logits(prefix, 1)[0]
    margin = abs(float(row[plain[at]]) - float(row[other[at]]))
    is_near = margin <= width_difference(target, prefix, {1, 2, width})
    return f"{'near-tie' if is_near else 'different'} at token {at}"
