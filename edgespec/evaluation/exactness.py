"""Compares speculative text with plain text, and tells near-ties of two tokens from defects.

A pass of one token may run other kernels than a wide pass and differ from it in the last bits of a logit. That can
change the choice between two tokens that are nearly tied, and nothing else. So the text before a difference is
read again in many cuts: the difference is a defect if the margin of the two tokens in question is larger than what
these cuts change in the distance of these two tokens' logits.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from edgespec import (
    Decoder,
    DraftPolicy,
    GumbelSampler,
    Plain,
    Report,
    Row,
    SamplingParams,
    TokenIds,
    append,
    empty_cache,
    speculative_decode,
)
from edgespec.evaluation.document import Text
from edgespec.system.console import show_progress

# The text before a difference is read again in passes of these widths, of the width at which the texts differ, and
# of random widths, as drafts give them. A distance over so many cuts spans some 3.5 of its standard deviations.
_WIDTHS = (1, 2, 3, 4, 8)
_NUM_MIXED, _WIDEST_MIXED = 10, 8
_NUM_REREAD = 64  # tokens before a difference that are read again
# A token is plausible if the model finds it at most e times less likely than its best one. A runtime that rounds
# otherwise than we do writes such tokens alone; one that computes wrongly soon repeats itself, which any model
# finds likely, so only the beginning of its text is judged.
_PLAUSIBLE = 1.0
_NUM_JUDGED = 32
_LEAST_PLAUSIBLE = 0.8


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

    width_difference: How much the distance between the logits of these two tokens changes at this place with the
        cut of the text into passes, without speculation.
    """

    prompt: int  # index of the prompt
    draft_length: str  # or the name of another policy
    position: int
    plain_token: int
    speculative_token: int
    pass_tokens: int
    margin_of_one: float
    margin_of_wide: float
    width_difference: float

    @property
    def is_near_tie(self) -> bool:
        return max(abs(self.margin_of_one), abs(self.margin_of_wide)) <= self.width_difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How many tokens were compared, and where they differ."""

    num_tokens: int
    differences: tuple[Difference, ...]


def compare(
    target: Decoder,
    prompts: Sequence[Sequence[int] | TokenIds],
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
    for i, prompt in enumerate(np.asarray(each, np.int32) for each in prompts):
        for sampling in samplings:
            sampler = GumbelSampler(sampling, len(prompt))
            where, share = f"prompt {i + 1} of {len(prompts)}", i / len(prompts)
            show_progress(f"{where}, without drafts", share)
            plain = plain_text(target, prompt, sampler, max_tokens, ends)
            for name, policy in policies().items():
                show_progress(f"{where}, draft length {name}", share)
                num_tokens += len(plain.tokens)
                # All first: measuring one uses the target.
                found = list(deviations(target, prompt, sampler, policy, plain))
                differences += [_measure(each, target, prompt, plain, i, name) for each in found]
        report(f"{i + 1} of {len(prompts)} prompts, {len(differences)} differences")
    return Comparison(num_tokens=num_tokens, differences=tuple(differences))


def plain_text(
    target: Decoder, prompt: TokenIds, sampler: GumbelSampler, max_tokens: int, ends: Collection[int]
) -> PlainText:
    """The answer of plain decoding, up to one of the end tokens or max_tokens."""
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
                row = block.logits[block.chosen_from[at]].copy()
                yield Deviation(position, int(block.tokens[at]), row, block.num_draft + 1)
                position += 1
                break
            position += len(wanted)
            if position >= len(plain.tokens):
                return


def _measure(
    found: Deviation, target: Decoder, prompt: TokenIds, plain: PlainText, index: int, policy: str
) -> Difference:
    token, other = int(plain.tokens[found.position]), found.token
    prefix = append(prompt, plain.tokens[: found.position])
    narrow = plain.rows[found.position]
    return Difference(
        prompt=index,
        draft_length=policy,
        position=found.position,
        plain_token=token,
        speculative_token=other,
        pass_tokens=found.width,
        margin_of_one=float(narrow[token] - narrow[other]),
        margin_of_wide=float(found.row[token] - found.row[other]),
        width_difference=width_difference(target, prefix, (token, other), found.width),
    )


def width_difference(target: Decoder, prefix: TokenIds, pair: tuple[int, int], width: int) -> float:
    """How much the distance between two tokens' logits after prefix depends on its cut into passes.

    width: A width to try beside the usual ones.
    """
    one, other = pair
    distances = [float(row[one]) - float(row[other]) for row in _reread(target, prefix, {*_WIDTHS, width})]
    return max(distances) - min(distances)


def _reread(target: Decoder, prefix: TokenIds, widths: Collection[int]) -> Iterator[Row]:
    """The row after prefix with the end of prefix read in one cut after the other, over an empty cache.

    More than the last pass is repeated, for keys and values differ too by the width of the pass that wrote them.
    """
    rng = np.random.default_rng(len(prefix))
    num_read = min(_NUM_REREAD, len(prefix))
    cuts = [[width] * (num_read // width) for width in sorted(widths)]
    cuts += [list(_mixed(num_read, rng)) for _ in range(_NUM_MIXED)]
    for cut in [[], *cuts]:  # at first in one pass
        empty_cache(target, prefix)
        stop = len(prefix) - sum(cut)
        if stop:
            row = target.logits(prefix[:stop], 1)[-1]
        for width in cut:
            stop += width
            row = target.logits(prefix[:stop], width)[-1]
        yield row.copy()


def _mixed(total: int, rng: np.random.Generator) -> Iterator[int]:
    """Random widths with a sum."""
    while total:
        width = min(int(rng.integers(1, _WIDEST_MIXED + 1)), total)
        total -= width
        yield width


class Plausible(NamedTuple):
    """How many tokens of an answer were judged, and how many of them the target finds plausible."""

    judged: int
    plausible: int

    @property
    def is_nonsense(self) -> bool:
        return self.plausible < _LEAST_PLAUSIBLE * self.judged


def compare_texts(
    target: Decoder, prompt: Sequence[int] | TokenIds, plain: Sequence[int], other: Sequence[int]
) -> Text:
    """Compare two greedy answers: they are equal, part at a near-tie, or are different.

    A near-tie is a place where the width of a pass changes the distance between two likely tokens' logits by at
    least the distance of the two tokens at which the answers part.
    """
    if tuple(plain) == tuple(other):
        return "equal"
    first = next((i for i, (one, two) in enumerate(zip(plain, other, strict=False)) if one != two), None)
    if first is None:  # one goes on where the other has ended, and both were asked for as many tokens
        return "different"
    prefix = append(prompt, np.array(plain[:first], np.int32))
    row = target.logits(prefix, 1)[-1]
    margin = abs(float(row[plain[first]]) - float(row[other[first]]))
    is_near = margin <= width_difference(target, prefix, (plain[first], other[first]), 2)
    return "near_tie" if is_near else "different"


def judge_tokens(target: Decoder, prompt: Sequence[int] | TokenIds, answer: Sequence[int]) -> Plausible:
    """How many of an answer's first tokens the target finds plausible, each after those before it."""
    tokens = np.array(answer[:_NUM_JUDGED], np.int32)
    if not len(tokens):
        return Plausible(0, 0)
    rows = target.logits(append(prompt, tokens[:-1]), len(tokens))
    chosen = rows[np.arange(len(tokens)), tokens]
    return Plausible(len(tokens), int((chosen >= rows.max(axis=1) - _PLAUSIBLE).sum()))
