"""Compare an exported model with its source: numbers, and a verdict on them.

A wrong graph is told from honest rounding in three steps. What was written must be the source's weights to the
rounding of their form (weight_errors). The graph with activations in floats must give the logits of those weights
to the rounding of floats, however a text is cut. What the precision then loses against the source is a loss, which
is measured, and refused where it is large.
"""

from collections.abc import Sequence

import numpy as np

from edgespec.decoding.decoder import Decoder
from edgespec.decoding.logprobs import log_softmax, negative_log_likelihood
from edgespec.errors import ExportMismatch, PrecisionLoss
from edgespec.export.written import WeightError
from edgespec.manifest import Check, Structure
from edgespec.system.tables import read_table
from edgespec.types import Logits, TokenIds

TEXT: str = read_table(__file__, "check_text.toml")["text"]
# The loss allowed for each precision, a divergence; real models stay well below it.
_DIVERGENCE = {"fp32": 1e-4, "fp16": 1e-3, "source": 0.1, "int8": 0.1, "int4": 0.25, "w8a16": 0.1}
# One-row passes of a check; their logits differ by about equal amounts.
NUM_STEPS = 8
_PIECE = 32  # tokens a pass; rows of a large vocabulary are many megabytes
# Relative noise on the embedding, 256 times that of rounding floats: it shows how much a model enlarges errors.
# What all layers round together was 0.02 (random weights), 0.15 (Gemma 3 270M) and 0.21 (SmolLM2-135M) of what it
# does, and in half floats, which are 8192 times as coarse, 50 of it.
NOISE = 2.0**-16
_FLOAT_MARGIN, _HALF_MARGIN = 4.0, 1024.0
# The largest error of a row may exceed by this what rounding did to others.
_ROUNDING_MARGIN = 2.0
_LEAST = 1e-3  # a difference of logits that no text shows
_LEAST_SHARE = 2e-5  # of their spread


def compare(decoder: Decoder, tokens: TokenIds, reference: Logits, written: Logits | None = None) -> Check:
    """Run the exported model in pieces, after a rewind, and at once.

    The decoder has an empty cache. reference holds the source's logits for tokens, [num_tokens, vocab_size];
    written those of the weights as they were written, for some of the first tokens.
    """
    num_tokens, half = len(tokens), len(tokens) // 2
    written = reference if written is None else written
    nll, divergence, largest, agreeing, rounding = [], [], [], [], [0.0]
    kept: dict[int, Logits] = {}  # the rows before a position
    for start in range(0, num_tokens, _PIECE):
        stop = min(start + _PIECE, num_tokens)
        rows, wanted = decoder.logits(tokens[:stop], stop - start), reference[start:stop]
        largest.append(_difference(rows, wanted))
        if len(own := written[start:stop]):
            rounding.append(_difference(rows[: len(own)], own))
        agreeing.append(rows.argmax(axis=1) == wanted.argmax(axis=1))
        divergence += [_divergence(*pair) for pair in zip(wanted, rows, strict=True)]
        following = tokens[start + 1 : stop + 1]
        nll.append(negative_log_likelihood(rows[: len(following)], following))
        kept |= {at: rows[at - start - 1].copy() for at in {half, num_tokens} if start < at <= stop}
    return Check(
        num_tokens=num_tokens,
        reference_nll=float(negative_log_likelihood(reference[:-1], tokens[1:]).mean()),
        nll=float(np.concatenate(nll).mean()),
        divergence=float(np.mean(divergence)),
        largest_difference=max(largest),
        agreement=float(np.concatenate(agreeing).mean()),
        pieces_difference=_recut_difference(decoder, tokens, kept[half], kept[num_tokens]),
        rounding_difference=max(rounding),
    )


def _recut_difference(decoder: Decoder, tokens: TokenIds, middle: Logits, last: Logits) -> float:
    """The largest difference of a logit to the rows in the middle and at the end, after a rewind and at once."""
    half = len(tokens) // 2
    astray = np.concatenate([tokens[: half // 2], tokens[:7]])
    decoder.logits(astray[: len(tokens)], 1)
    rewound = decoder.logits(tokens[:half], 1)[0].copy()
    decoder.logits(np.array([tokens[0] - 1 if tokens[0] else 1], np.int32), 1)
    at_once = decoder.logits(tokens, 1)[0]
    return max(_difference(rewound, middle), _difference(at_once, last))


def compare_structure(
    decoder: Decoder, tokens: TokenIds, written: Logits, noisy: Logits, *, is_half: bool = False
) -> Structure:
    """Compare a graph with activations in floats with the logits of the weights that it holds.

    Two passes give every row, for the weights are widened to floats in each, and some rows are in both: at once
    from an empty cache, and after half of the text, once the cache was rewound over tokens that do not follow it.

    noisy: The logits of some of the first tokens with NOISE on the embedding: how much a model enlarges small
        errors follows from them.

    Returns:
        Differences as shares of the logits' spread.
    """
    num_tokens, half = len(written), len(written) // 2
    seen = min(num_tokens, half + max(1, num_tokens // 6))
    astray = np.concatenate([tokens[:seen], tokens[:7]])[: len(tokens)]
    first = decoder.logits(astray, len(astray))[:seen].copy()
    second = decoder.logits(tokens[:num_tokens], num_tokens - half)
    rows = np.concatenate([first[:half], second])
    spread = _spread(written)
    margin = _HALF_MARGIN if is_half else _FLOAT_MARGIN
    enlarged = _rms(noisy - written[: len(noisy)]) / _spread(written[: len(noisy)])
    return Structure(
        difference=_rms(rows - written) / spread,
        allowed=margin * enlarged + _LEAST_SHARE,
        pieces_difference=_difference(first[half:], second[: seen - half]) / spread,
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


def judge(check: Check, precision: str, wrong: Sequence[WeightError] = ()) -> None:
    """Refuse an export that is not what its source is.

    Raises:
        ExportMismatch: Weights were written wrongly, or the graph computes something else.
        PrecisionLoss: The export is right, but its precision loses more than it may.
    """
    if wrong:
        worst = max(wrong, key=lambda one: one.found / one.allowed)
        raise ExportMismatch(
            f"matrix {worst.role} was written with an error of {worst.found:.3g} of its size, and rounding it to "
            f"{precision} explains {worst.allowed:.3g}; nothing was installed. {_REPORT}"
        )
    if (structure := check.structure) is not None:
        for found, what in (
            (structure.difference, "than its weights say"),
            (structure.pieces_difference, "when the text is read in pieces"),
        ):
            if not found <= structure.allowed:
                raise ExportMismatch(
                    f"the graph gives other logits {what}: with activations in floats they differ by {found:.3g} "
                    f"of their spread, and rounding explains {structure.allowed:.3g}; nothing was installed. "
                    f"{_REPORT}"
                )
    allowed = _ROUNDING_MARGIN * (check.rounding_difference or 0.0) + _LEAST
    if not check.pieces_difference <= allowed:
        raise ExportMismatch(
            "the exported model gives other logits when a text is read in pieces (by "
            f"{check.pieces_difference:.3g}, where rounding in {precision} explains {allowed:.3g}); "
            f"nothing was installed. {_REPORT}"
        )
    if not check.divergence <= _DIVERGENCE[precision]:
        raise PrecisionLoss(
            f"the exported model diverges from its source by {check.divergence:.3g} nats a token, {precision} "
            f"may by {_DIVERGENCE[precision]} ({check.nll:.4f} nats a token, the source has "
            f"{check.reference_nll:.4f}); nothing was installed",
            precision,
        )


_REPORT = "This is a fault of edgespec or of ONNX Runtime, not of the precision: report this model"


def _rms(values: Logits) -> float:
    return float(np.sqrt(np.mean(np.square(values), dtype=np.float64)))


def _spread(logits: Logits) -> float:
    """How far the logits of a row lie from their mean; what is added to all of them changes no text."""
    return _rms(logits - logits.mean(axis=1, keepdims=True))


def _difference(some: Logits, others: Logits) -> float:
    return float(np.abs(some - others).max())


def _divergence(reference: Logits, row: Logits) -> float:
    """Kullback-Leibler divergence of softmax(row) from softmax(reference), in nats."""
    expected, found = log_softmax(reference), log_softmax(row)
    return float(np.exp(expected) @ (expected - found))
