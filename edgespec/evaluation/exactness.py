"""Compares speculative text with plain text, and tells near-ties of two tokens from defects.

A pass of one token may run other kernels than a wide pass and differ from it in the last bits of a logit. That can
change the choice between two tokens that are nearly tied, and nothing else: a difference with a larger margin than
passes of several widths explain is a defect.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from edgespec.decoding.acceptance import row_behind
from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.scheduler import Block, DraftPolicy, Plain, speculative_decode
from edgespec.types import Decoder, Logits, Report, Row, TokenIds, append

# The logits of passes of these widths are compared, and of the width at which the texts differ.
_WIDTHS = (1, 2, 4)
_NUM_LIKELY = 100
_NUM_REREAD = 64  # tokens before a difference that are read again at several widths


class PlainText(NamedTuple):
    """An answer of plain decoding, and the row of logits from which each of its tokens was chosen."""

    tokens: TokenIds  # [num_tokens]
    rows: list[Row]


class Deviation(NamedTuple):
    """A place where a speculative pass chose another token than plain decoding."""

    position: int  # in the answer
    token: int
    row: Row
    width: int  # of the pass, in tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A deviation, measured. A margin is the logit of the plain token minus the logit of the other.

    width_difference: The most by which passes of several widths over an empty cache, without speculation, change
        the distance between two likely tokens' logits at this place.
    """

    prompt: int  # index of the prompt
    policy: str
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
    num_tokens: int
    differences: tuple[Difference, ...]


def compare(
    target: Decoder,
    prompts: Sequence[TokenIds],
    policies: Callable[[], Mapping[str, DraftPolicy]],
    samplings: Sequence[SamplingParams],
    *,
    max_tokens: int,
    ends: Collection[int] = (),
    report: Report = lambda line: None,
) -> Comparison:
    """Compare each prompt's plain answer with the answer under each draft policy.

    policies: Makes new draft policies for one answer, by name.
    ends: Tokens that end an answer.
    """
    num_tokens, differences = 0, list[Difference]()
    for i, prompt in enumerate(prompts):
        for sampling in samplings:
            sampler = GumbelSampler(sampling, len(prompt))
            plain = plain_text(target, prompt, sampler, max_tokens, ends)
            for name, policy in policies().items():
                num_tokens += len(plain.tokens)
                # All first: measuring one uses the target.
                found = list(deviations(target, prompt, sampler, policy, plain))
                differences += [_measure(each, target, prompt, plain, i, name) for each in found]
        report(f"{i + 1} of {len(prompts)} prompts, {len(differences)} differences")
    return Comparison(num_tokens=num_tokens, differences=tuple(differences))


def plain_text(
    target: Decoder, prompt: TokenIds, sampler: GumbelSampler, max_tokens: int, ends: Collection[int]
) -> PlainText:
    tokens, rows = list[int](), list[Row]()
    for block in speculative_decode(prompt, target, sampler, Plain(), max_tokens=max_tokens):
        tokens.append(int(block.tokens[0]))
        rows.append(block.logits[0].copy())
        if len(tokens) == max_tokens or tokens[-1] in ends:
            break
    return PlainText(np.array(tokens, np.int32), rows)


def deviations(
    target: Decoder, prompt: TokenIds, sampler: GumbelSampler, policy: DraftPolicy, plain: PlainText
) -> Iterator[Deviation]:
    """Places where speculation leaves the plain text; it goes on from that text, so that none hides the next."""
    position = 0
    while position < len(plain.tokens):
        prefix = append(prompt, plain.tokens[:position])
        for block in speculative_decode(prefix, target, sampler, policy, max_tokens=len(plain.tokens) - position):
            wanted = plain.tokens[position : position + len(block.tokens)]
            wrong = np.flatnonzero(block.tokens[: len(wanted)] != wanted)
            if len(wrong):
                at = int(wrong[0])
                position += at
                yield Deviation(position, int(block.tokens[at]), _chosen_from(block, at), block.num_draft + 1)
                position += 1
                break
            position += len(wanted)
            if position >= len(plain.tokens):
                return


def _chosen_from(block: Block, at: int) -> Row:
    """The row of logits from which the token at this place of a block was chosen."""
    row: int | None = 0
    for token in block.tokens[:at]:
        assert row is not None
        row = row_behind(block.draft, row, int(token))
    return block.logits[row].copy()


def _measure(
    found: Deviation, target: Decoder, prompt: TokenIds, plain: PlainText, index: int, policy: str
) -> Difference:
    token, other = int(plain.tokens[found.position]), found.token
    prefix = append(prompt, plain.tokens[: found.position])
    narrow = plain.rows[found.position]
    return Difference(
        prompt=index,
        policy=policy,
        position=found.position,
        plain_token=token,
        speculative_token=other,
        width=found.width,
        narrow_margin=float(narrow[token] - narrow[other]),
        wide_margin=float(found.row[token] - found.row[other]),
        width_difference=width_difference(target, prefix, {*_WIDTHS, found.width}),
    )


def width_difference(target: Decoder, prefix: TokenIds, widths: Collection[int]) -> float:
    """The most by which the distance between two likely tokens' logits after prefix depends on the width."""
    rows = [row[:1] for row in _fresh_rows(target, prefix, widths)]
    likely = np.argsort(-rows[0][0])[:_NUM_LIKELY]
    values = np.concatenate(rows)[:, likely].astype(np.float64)
    distances = values[:, :, None] - values[:, None, :]  # [num_rows, num_likely, num_likely]
    return float(np.ptp(distances, axis=0).max())


def _fresh_rows(target: Decoder, prefix: TokenIds, widths: Collection[int]) -> Iterator[Logits]:
    """Logits after prefix with its end read in passes of each width, and in one pass, over an empty cache.

    More than the last pass is repeated, for keys and values differ too by the width of the pass that wrote them.
    """
    other = (prefix[:1] + 1) % target.vocab_size
    start = max(0, len(prefix) - _NUM_REREAD)
    for width in chain(sorted(width for width in widths if width < len(prefix)), [len(prefix)]):
        target.logits(other, 1)  # empties the cache of the prefix
        first = start + (len(prefix) - start) % width
        for stop in range(first, len(prefix), width):
            if stop:
                target.logits(prefix[:stop], 1)
        yield target.logits(prefix, min(width, max(widths)))[-1:].copy()
