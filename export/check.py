"""Whether an exported model says what its source says: numbers, and a verdict on them."""

import numpy as np
import numpy.typing as npt

from edgespec.errors import ExportMismatch
from edgespec.manifest import Check
from edgespec.scoring import negative_log_likelihood
from edgespec.types import Decoder, Logits, TokenIds

# English and code, for byte-level and SentencePiece vocabularies alike; some 190 tokens.
TEXT = '''\
The tide had turned by the time the ferry reached the island, and the passengers waited on deck while two men \
threw ropes to the pier. Nobody was in a hurry. A girl counted the gulls: eleven, twelve, thirteen, then lost her \
place and began again. "How many are there really?" she asked. "As many as you have patience for," said her father.

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

# Divergence that an export may have, by precision; what the formats have on real models is well below.
_DIVERGENCE = {"fp32": 1e-4, "fp16": 1e-3, "source": 0.1, "int8": 0.1, "int4": 0.5}
_SAME_PASS, _SAME_HALF_PASS = 1e-2, 0.5  # logits of one row from passes that were cut otherwise


def compare(decoder: Decoder, tokens: TokenIds, reference: Logits) -> Check:
    """Run the exported model in one pass, in pieces, and after a wrong turn.

    Args:
        decoder: The exported model, with an empty cache.
        tokens: [num_tokens].
        reference: Logits of the source for the same tokens, [num_tokens, vocab_size].
    """
    whole = decoder.logits(tokens, len(tokens)).copy()
    half = len(tokens) // 2
    astray = np.concatenate([tokens[:half], tokens[:7]])
    decoder.logits(astray, 1)
    pieces = [decoder.logits(tokens[: half + width], width).copy() for width in (3, 5)]
    expected = [whole[half : half + 3], whole[half : half + 5]]
    return Check(
        num_tokens=len(tokens),
        reference_nll=float(negative_log_likelihood(reference[:-1], tokens[1:]).mean()),
        nll=float(negative_log_likelihood(whole[:-1], tokens[1:]).mean()),
        divergence=float(np.mean([_divergence(*rows) for rows in zip(reference, whole, strict=True)])),
        largest_difference=float(np.abs(whole - reference).max()),
        agreement=float((whole.argmax(axis=1) == reference.argmax(axis=1)).mean()),
        pieces_difference=max(
            float(np.abs(piece - rows).max()) for piece, rows in zip(pieces, expected, strict=True)
        ),
    )


def judge(check: Check, precision: str, *, is_half: bool = False) -> None:
    """Raises ExportMismatch: the export loses more than its precision explains, or its cache is wrong."""
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


def _divergence(reference: Logits, row: Logits) -> float:
    """Kullback-Leibler divergence of softmax(row) from softmax(reference), in nats."""
    expected, found = (_log_softmax(values.astype(np.float64)) for values in (reference, row))
    return float(np.exp(expected) @ (expected - found))


def _log_softmax(row: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = row - row.max()
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result
