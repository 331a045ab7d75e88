"""Is the text of speculation that of plain decoding, and where it is not, are two tokens all but tied?

A pass of one token may run other kernels than a wide one and differ from it in the last bits of a logit. That can
turn the choice between two tokens that are nearly tied, and nothing else: a difference with a greater margin than
passes of several widths explain is a defect.

Each text is compared along the plain one: after a difference speculation goes on from the plain prefix, so that
one difference does not hide the next.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from edgespec.acceptance import row_behind
from edgespec.sampling import GumbelSampler, SamplingParams
from edgespec.scheduler import Block, Gate, Plain, serial
from edgespec.types import Decoder, Logits, Row, TokenIds, append

# Widths of passes whose logits are compared to see what widths do, beside that of the pass in question.
_WIDTHS = (1, 2, 4)
_LIKELY = 100
_NUM_REWRITTEN = 64  # tokens before a difference that are read again at several widths


class PlainText(NamedTuple):
    """An answer of plain decoding and the row of logits that each of its tokens was chosen by."""

    tokens: TokenIds  # [num_tokens]
    rows: list[Row]


class Deviation(NamedTuple):
    """Where a pass of speculation chose another token than plain decoding."""

    position: int  # in the answer
    token: int
    row: Row
    width: int  # of the pass, in tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A deviation, measured. Margins are logits of the plain token less those of the other.

    width_difference: how far passes of several widths over a fresh cache, without any speculation, move the
        distance of two likely tokens' logits there, at most.
    """

    prompt: int  # index of the prompt
    gate: str
    position: int
    plain_token: int
    speculative_token: int
    width: int
    narrow_margin: float
    wide_margin: float
    width_difference: float

    @property
    def is_near_tie(self) -> bool:
        return max(abs(self.narrow_margin), abs(self.wide_margin)) <= self.width_difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Tokens of plain decoding that speculation chose as well or differently."""

    num_tokens: int
    differences: tuple[Difference, ...]


def compare(
    target: Decoder,
    prompts: Sequence[TokenIds],
    gates: Callable[[], Mapping[str, Gate]],
    samplings: Sequence[SamplingParams],
    *,
    max_tokens: int,
    ends: Collection[int] = (),
    report: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Compare each prompt's plain answer with what every gate makes of it.

    Args:
        target: The model.
        prompts: Tokens of each prompt.
        gates: Makes gates for one answer, by a name for each.
        samplings: Rules to choose tokens by; each is compared.
        max_tokens: The most tokens of an answer.
        ends: Tokens that end an answer.
        report: Takes a line after each prompt.
    """
    num_tokens, differences = 0, list[Difference]()
    for i, prompt in enumerate(prompts):
        for sampling in samplings:
            sampler = GumbelSampler(sampling, len(prompt))
            plain = plain_text(target, prompt, sampler, max_tokens, ends)
            for name, gate in gates().items():
                num_tokens += len(plain.tokens)
                for found in list(deviations(target, prompt, sampler, gate, plain)):
                    differences.append(_measured(found, target, prompt, plain, i, name))
        report(f"{i + 1} of {len(prompts)} prompts, {len(differences)} differences")
    return Comparison(num_tokens=num_tokens, differences=tuple(differences))


def plain_text(
    target: Decoder, prompt: TokenIds, sampler: GumbelSampler, max_tokens: int, ends: Collection[int]
) -> PlainText:
    tokens, rows = list[int](), list[Row]()
    for block in serial(prompt, target, sampler, Plain(), max_tokens=max_tokens):
        tokens.append(int(block.tokens[0]))
        rows.append(block.logits[0].copy())
        if len(tokens) == max_tokens or tokens[-1] in ends:
            break
    return PlainText(np.array(tokens, np.int32), rows)


def deviations(
    target: Decoder, prompt: TokenIds, sampler: GumbelSampler, gate: Gate, plain: PlainText
) -> Iterator[Deviation]:
    """Where speculation leaves the plain text; it is put back on it each time."""
    position = 0
    while position < len(plain.tokens):
        prefix = append(prompt, plain.tokens[:position])
        for block in serial(prefix, target, sampler, gate, max_tokens=len(plain.tokens) - position):
            wanted = plain.tokens[position : position + len(block.tokens)]
            wrong = np.flatnonzero(block.tokens[: len(wanted)] != wanted)
            if len(wrong):
                at = int(wrong[0])
                position += at
                yield Deviation(position, int(block.tokens[at]), _row(block, at), block.num_draft + 1)
                position += 1
                break
            position += len(wanted)
            if position >= len(plain.tokens):
                return


def _row(block: Block, at: int) -> Row:
    """The row of logits that the token at this place of a block was chosen by."""
    row: int | None = 0
    for token in block.tokens[:at]:
        assert row is not None
        row = row_behind(block.draft, row, int(token))
    return block.logits[row].copy()


def _measured(
    found: Deviation, target: Decoder, prompt: TokenIds, plain: PlainText, index: int, gate: str
) -> Difference:
    token, other = int(plain.tokens[found.position]), found.token
    prefix = append(prompt, plain.tokens[: found.position])
    narrow = plain.rows[found.position]
    return Difference(
        prompt=index,
        gate=gate,
        position=found.position,
        plain_token=token,
        speculative_token=other,
        width=found.width,
        narrow_margin=float(narrow[token] - narrow[other]),
        wide_margin=float(found.row[token] - found.row[other]),
        width_difference=width_difference(target, prefix, {*_WIDTHS, found.width}),
    )


def width_difference(target: Decoder, prefix: TokenIds, widths: Collection[int]) -> float:
    """The most by which two likely tokens' logits behind prefix move against each other over these widths."""
    rows = [row[:1] for row in _fresh_rows(target, prefix, widths)]
    likely = np.argsort(-rows[0][0])[:_LIKELY]
    values = np.concatenate(rows)[:, likely].astype(np.float64)
    distances = values[:, :, None] - values[:, None, :]  # [num_rows, num_likely, num_likely]
    return float(np.ptp(distances, axis=0).max())


def _fresh_rows(target: Decoder, prefix: TokenIds, widths: Collection[int]) -> Iterator[Logits]:
    """Logits behind prefix with its end read in passes of each width, and in one pass, without anything held.

    Not the last pass alone: keys and values differ as well by the width of the pass that wrote them.
    """
    other = (prefix[:1] + 1) % target.vocab_size
    start = max(0, len(prefix) - _NUM_REWRITTEN)
    for width in chain(sorted(width for width in widths if width < len(prefix)), [len(prefix)]):
        target.logits(other, 1)  # nothing is held of the prefix any more
        first = start + (len(prefix) - start) % width
        for stop in range(first, len(prefix), width):
            if stop:
                target.logits(prefix[:stop], 1)
        yield target.logits(prefix, min(width, max(widths)))[-1:].copy()
