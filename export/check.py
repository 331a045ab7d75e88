"""Compare an exported model with its source: numbers, and a verdict on them."""

import numpy as np
import numpy.typing as npt

from edgespec.decoding.likelihood import negative_log_likelihood
from edgespec.errors import ExportMismatch
from edgespec.manifest import Check
from edgespec.types import Decoder, Logits, TokenIds

# English and code, for byte-level and SentencePiece vocabularies alike; 240 tokens and more.
TEXT = '''\
The tide had turned by the time the ferry reached the island, and the passengers waited on deck while two men \
threw ropes to the pier. Nobody was in a hurry. A girl counted the gulls: eleven, twelve, thirteen, then lost her \
place and began again. "How many are there really?" she asked. "As many as you have patience for," said her \
father. The engine slowed, the gate came down with a clatter, and for a moment everyone looked at the same thing: \
a heron, grey and quite still, standing in the shallows as if it had been waiting for them since the morning.

def moving_average(values, width):
    """Mean of each run of `width` neighbouring values."""
    if width < 1:
        raise ValueError(f"width is {width}, wanted at least 1")
    total = sum(values[:width])
    means = [total / width]
    for i in range(width, len(values)):
        total += values[i] - values[i - width]
        means.append(total / width)
    return means
'''

# The divergence allowed for each precision; real models stay well below it.
_DIVERGENCE = {"fp32": 1e-4, "fp16": 1e-3, "source": 0.1, "int8": 0.1, "int4": 0.25, "w8a16": 0.1}
# One-row passes of a check; their logits differ by about equal amounts.
NUM_STEPS = 8
_PIECE = 32  # tokens a pass; rows of a large vocabulary are many megabytes
_SAME_PASS, _SAME_HALF_PASS = 1e-2, 0.5  # logits of one row from passes of other widths


def compare(decoder: Decoder, tokens: TokenIds, reference: Logits) -> Check:
    """Run the exported model in pieces, after a rewind, and at once.

    The decoder has an empty cache; reference holds the source's logits for tokens, [num_tokens, vocab_size].
    """
    num_tokens, half = len(tokens), len(tokens) // 2
    nll, divergence, largest, agreeing = [], [], [], []
    kept: dict[int, Logits] = {}  # the rows before a position
    for start in range(0, num_tokens, _PIECE):
        stop = min(start + _PIECE, num_tokens)
        rows, wanted = decoder.logits(tokens[:stop], stop - start), reference[start:stop]
        largest.append(_difference(rows, wanted))
        agreeing.append(rows.argmax(axis=1) == wanted.argmax(axis=1))
        divergence += [_divergence(*pair) for pair in zip(wanted, rows, strict=True)]
        following = tokens[start + 1 : stop + 1]
        nll.append(negative_log_likelihood(rows[: len(following)], following))
        kept |= {at: rows[at - start - 1].copy() for at in {half, num_tokens} if start < at <= stop}
    astray = np.concatenate([tokens[: half // 2], tokens[:7]])
    decoder.logits(astray[:num_tokens], 1)
    rewound = decoder.logits(tokens[:half], 1)[0].copy()
    decoder.logits(np.array([tokens[0] - 1 if tokens[0] else 1], np.int32), 1)
    at_once = decoder.logits(tokens, 1)[0]
    return Check(
        num_tokens=num_tokens,
        reference_nll=float(negative_log_likelihood(reference[:-1], tokens[1:]).mean()),
        nll=float(np.concatenate(nll).mean()),
        divergence=float(np.mean(divergence)),
        largest_difference=max(largest),
        agreement=float(np.concatenate(agreeing).mean()),
        pieces_difference=max(_difference(rewound, kept[half]), _difference(at_once, kept[num_tokens])),
    )


def one_row_difference(narrow: Decoder, tokens: TokenIds, rows: Logits) -> float:
    """The largest difference of a logit where each token has a pass of its own, as in plain decoding.

    narrow is the exported model, opened without the promise of identical rows; rows are the logits of the last
    tokens from a pass over several, [num_rows, vocab_size].
    """
    before = len(tokens) - len(rows)
    narrow.logits(tokens[:before], 1)
    positions = range(before + 1, len(tokens) + 1)
    return max(_difference(narrow.logits(tokens[:n], 1)[0], row) for n, row in zip(positions, rows, strict=True))


def judge(check: Check, precision: str, *, is_half: bool = False) -> None:
    """Raises ExportMismatch: the divergence exceeds that of the precision, or the cache is wrong."""
    if not check.divergence <= _DIVERGENCE[precision]:
        raise ExportMismatch(
            f"the exported model diverges from its source by {check.divergence:.3g} nats a token, {precision} may "
            f"by {_DIVERGENCE[precision]}; nothing was installed. Try another precision, or report this model"
        )
    if not check.pieces_difference <= (_SAME_HALF_PASS if is_half else _SAME_PASS):
        raise ExportMismatch(
            f"the exported model gives other logits in pieces than at once (by {check.pieces_difference:.3g}); "
            "nothing was installed. Report this model"
        )


def _difference(some: Logits, others: Logits) -> float:
    return float(np.abs(some - others).max())


def _divergence(reference: Logits, row: Logits) -> float:
    """Kullback-Leibler divergence of softmax(row) from softmax(reference), in nats."""
    expected, found = (_log_softmax(values.astype(np.float64)) for values in (reference, row))
    return float(np.exp(expected) @ (expected - found))


def _log_softmax(row: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = row - row.max()
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result
