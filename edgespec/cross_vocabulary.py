"""A drafter of another vocabulary, as a decoder over the target's.

Drafter and target meet at the tokens that both have (token-level intersection: Timor et al., arXiv:2502.05202): a
token is the same where its bytes are. Text goes over token by token and not by way of a string: what both have
stays as it is, and what the drafter lacks is spelled in the drafter's own tokens. So what a text becomes never
changes when more follows, nothing is ever tokenised again, and the drafter's cache serves as with its own tokens.

Knows nothing of models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
import numpy.typing as npt

from edgespec.errors import ContextOverflow, ManifestError, VocabularyMismatch
from edgespec.pair import have_same_tokens
from edgespec.tokenizer import Tokenizer
from edgespec.types import AheadDrafter, Ask, Decoder, Draft, Drafter, Interruptible, Logits, Sampler, TokenIds
from edgespec.vocab_subset import UNKNOWN

# A token that the drafter lacks is never drafted right, so the share of those that it has bounds acceptance;
# below the usual break-even not even a drafter that is always right would pay.
_LEAST_SHARE = 0.55
_SAMPLE = """\
The museum opens at 9:30 on weekdays, but it's closed on 25 December. "Couldn't we go tomorrow?" she asked.
1. First, multiply 37 by 12: 37 * 12 = 444.
2. Then subtract 44, which leaves **400**.

def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("nothing to average")
    return sum(values) / len(values)

Die Bibliothek schließt um sechs Uhr. La bibliothèque ferme à six heures. La biblioteca cierra a las seis.
"""


@dataclass(frozen=True, slots=True)
class Translation:
    """Tokens of a target as tokens of a drafter.

    same: The drafter's token that is the same, or -1, [target_vocab_size].
    opening: The drafter's tokens that stand before every text.
    """

    same: TokenIds
    target: Mapping[int, bytes]  # the bytes of its tokens
    drafter: Mapping[int, bytes]
    by_bytes: Mapping[bytes, int]  # of the drafter
    tokenizer: Tokenizer  # of the drafter
    opening: tuple[int, ...] = ()
    _spelled: dict[int, list[int]] = field(default_factory=dict)  # of tokens met so far that the drafter lacks

    def __call__(self, tokens: TokenIds) -> tuple[TokenIds, npt.NDArray[np.intp]]:
        """The drafter's tokens, and how many of them there are once each of the target's is in, [num_tokens]."""
        same = self.same[tokens]
        shared = same >= 0
        lacking = np.flatnonzero(~shared)
        spelled = [self._spell(int(token)) for token in tokens[lacking]]
        lengths = np.ones(len(tokens), np.intp)
        lengths[lacking] = [len(ids) for ids in spelled]
        ends = len(self.opening) + lengths.cumsum()
        drafted = np.empty(len(self.opening) + lengths.sum(), np.int32)
        drafted[: len(self.opening)] = self.opening
        drafted[ends[shared] - 1] = same[shared]
        for end, ids in zip(ends[lacking], spelled, strict=True):
            drafted[end - len(ids) : end] = ids
        return drafted, ends

    def _spell(self, token: int) -> list[int]:
        """A token that the drafter lacks in those that it has; nothing for a special token."""
        if token not in self._spelled:
            text = self.target.get(token, b"")
            self._spelled[token] = _encoded(text, self.tokenizer, self.drafter) or longest_pieces(
                text, self.by_bytes
            )
        return self._spelled[token]


def _encoded(text: bytes, tokenizer: Tokenizer, spellings: Mapping[int, bytes]) -> list[int]:
    """The tokens that a tokenizer makes of a text; none where they are not of these very bytes."""
    try:
        tokens = tokenizer.encode(text.decode()).tolist()[len(tokenizer.encode("")) :]
    except (UnicodeDecodeError, ManifestError):
        return []
    return tokens if b"".join(spellings.get(token, b"") for token in tokens) == text else []


def _by_bytes(spellings: Mapping[int, bytes]) -> dict[bytes, int]:
    """The last token of each spelling: SentencePiece has single bytes first, and letters after them."""
    return {text: token for token, text in sorted(spellings.items()) if text}


def longest_pieces(text: bytes, tokens: Mapping[bytes, int]) -> list[int]:
    """The token of the longest piece that begins the text, then of what is left, less bytes without a token.

    Of pieces `a`, `ab` and `c`, `abxc` becomes `ab`, `c`.
    """
    found: list[int] = []
    start = 0
    while start < len(text):
        stop = next((stop for stop in range(len(text), start, -1) if text[start:stop] in tokens), None)
        if stop is not None:
            found.append(tokens[text[start:stop]])
        start = stop or start + 1
    return found


def translation(
    target: Tokenizer, drafter: Tokenizer, vocab_size: int, ends: tuple[Sequence[int], Sequence[int]] = ((), ())
) -> Translation:
    """Match the tokens of two vocabularies: text by its bytes, special tokens by their spelling or their role.

    Args:
        vocab_size: Of the target, padding included.
        ends: Tokens that end an answer, of target and drafter. Those of the target that the drafter does not spell
            alike are its last one, which ends a turn where there are several.
    """
    in_target, in_drafter = target.spellings, drafter.spellings
    by_bytes = _by_bytes(in_drafter)
    by_piece = {piece: token for token, piece in drafter.pieces.items()}
    same = np.full(vocab_size, -1, np.int32)
    for token, text in in_target.items():
        alike = by_piece.get(target.piece(token) or "", -1)
        same[token] = alike if in_drafter.get(alike) == text else by_bytes.get(text, -1)
    openings = [tokenizer.encode("").tolist() for tokenizer in (target, drafter)]
    for token, counterpart in _same_roles(target, drafter, ends, openings).items():
        same[token] = counterpart
    return Translation(same, in_target, in_drafter, by_bytes, drafter, () if openings[0] else tuple(openings[1]))


def _same_roles(
    target: Tokenizer,
    drafter: Tokenizer,
    ends: tuple[Sequence[int], Sequence[int]],
    openings: Sequence[Sequence[int]],
) -> dict[int, int]:
    """Special tokens of the target that the drafter has: by spelling, as an opening, or as an end."""
    counterparts = drafter.special_tokens
    found = {token: counterparts[text] for text, token in target.special_tokens.items() if text in counterparts}
    found |= dict(zip(*openings, strict=False))
    return {token: max(ends[1]) for token in ends[0] if ends[1]} | found


def shared_share(translate: Translation, target: Tokenizer) -> float:
    """The share of the tokens of a sample (prose, numbers, code, three languages) that the drafter has too."""
    return float((translate.same[target.encode(_SAMPLE)] >= 0).mean())


def expect_shared_tokens(share: float, names: tuple[str, str]) -> None:
    """Raises VocabularyMismatch: the drafter of names, target and drafter, has too few of the target's tokens."""
    if share < _LEAST_SHARE:
        raise VocabularyMismatch(
            f"the drafter {names[1]} has {share:.0%} of the tokens that the target {names[0]} needs for ordinary "
            f"text, wanted {_LEAST_SHARE:.0%}; choose a drafter of the target's own family, or --drafter ngram, "
            "which needs none"
        )


class TranslatedDecoder:
    """decoder over the vocabulary of another model; tokens that it lacks get a logit that is never chosen.

    A text that is longer than the context in the drafter's tokens is read from a later start.
    """

    def __init__(self, decoder: Decoder, translate: Translation) -> None:
        self._decoder = decoder
        self._translate = translate
        # Where each token's logit stands in a row with one more column, of the tokens that the drafter lacks.
        self._columns = np.where(translate.same < 0, decoder.vocab_size, translate.same).astype(np.intp)

    @property
    def vocab_size(self) -> int:
        return len(self._translate.same)

    @property
    def context_length(self) -> int:
        return self._decoder.context_length

    @property
    def num_fed(self) -> int:
        return self._decoder.num_fed

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        """Logits that follow each of the last num_last tokens, [num_last, vocab_size].

        Rows behind which the drafter has no token yet, as after special tokens that it lacks, are all alike.

        Raises:
            ContextOverflow: tokens are more than context_length, or the rows are.
        """
        if len(tokens) > self.context_length:
            raise ContextOverflow(len(tokens), self.context_length)
        whole = np.full((num_last, self.vocab_size), UNKNOWN, np.float32)
        drafted, ends = self._translate(tokens)
        ends = ends[-num_last:]
        speaks = np.flatnonzero(ends)
        if not len(speaks):
            return whole
        first = int(ends[speaks[0]])
        start = self._start(len(drafted))
        if first <= start:
            raise ContextOverflow(len(drafted) - first + 1, self.context_length)
        rows = self._decoder.logits(drafted[start:], len(drafted) - first + 1)
        wider = np.full((len(speaks), self._decoder.vocab_size + 1), UNKNOWN, np.float32)
        wider[:, :-1] = rows[ends[speaks] - first]
        whole[speaks] = wider.take(self._columns, axis=1)  # 0.18 ms a row, 0.35 ms by assigning what is shared
        return whole

    def interrupt(self) -> None:
        if isinstance(self._decoder, Interruptible):
            self._decoder.interrupt()

    def _start(self, num_drafted: int) -> int:
        """Moves on by quarters of the context, so that the cache is read anew only now and then."""
        quarter = max(1, self.context_length // 4)
        return -(-max(0, num_drafted - self.context_length) // quarter) * quarter


@dataclass(slots=True)
class RespelledDrafter:
    """A drafter whose guesses are put into the tokens that the target's tokenizer makes of their text.

    So `:` and a line break, which is all that a drafter can say that lacks the token of both, become that token:
    of four tokens drafted by SmolLM2-135M for Qwen2.5-Coder-1.5B 1.60 are kept instead of 1.47. Guesses that come
    with distributions stay as they were drawn.
    """

    drafter: Drafter
    tokenizer: Tokenizer
    spellings: Mapping[int, bytes]  # of the target's tokens
    _ahead: AheadDrafter | None = field(init=False)  # the drafter, if it is one: to ask takes 35 µs

    def __post_init__(self) -> None:
        self._ahead = self.drafter if isinstance(self.drafter, AheadDrafter) else None

    @property
    def name(self) -> str:
        return self.drafter.name

    @property
    def is_free(self) -> bool:
        return self.drafter.is_free

    @property
    def can_run_ahead(self) -> bool:
        return self._ahead is not None and self._ahead.can_run_ahead

    @property
    def num_outcomes(self) -> int:
        return self._ahead.num_outcomes if self._ahead else 0

    def draft(self, tokens: TokenIds, ask: Ask, sampler: Sampler) -> Draft:
        return self._respelled(self.drafter.draft(tokens, ask, sampler), ask)

    def follow(self, tokens: TokenIds, ask: Ask, sampler: Sampler) -> Draft:
        assert self._ahead
        return self._respelled(self._ahead.follow(tokens, ask, sampler), ask)

    def due_s(self, step_s: float) -> float:
        return self._ahead.due_s(step_s) if self._ahead else inf

    def taken_s(self) -> tuple[Sequence[float], float]:
        return self._ahead.taken_s() if self._ahead else ((), 0.0)

    def rest(self) -> None:
        if self._ahead:
            self._ahead.rest()

    def _respelled(self, draft: Draft, ask: Ask) -> Draft:
        if ask.with_distributions or draft.parents is not None:
            return draft
        guess = draft.tokens.tolist()
        end = next((i for i, token in enumerate(guess) if token not in self.spellings), len(guess))
        text = b"".join(self.spellings[token] for token in guess[:end])
        respelled = (_encoded(text, self.tokenizer, self.spellings) or guess[:end]) + guess[end:]
        return draft._replace(tokens=np.array(respelled, np.int32)).cut(min(len(respelled), len(guess)))

    def learn(self, tokens: TokenIds, draft: Draft, logits: Logits) -> None:
        self.drafter.learn(tokens, draft, logits)


def translation_between(
    tokenizers: tuple[Tokenizer, Tokenizer],
    vocab_size: int,
    ends: tuple[Sequence[int], Sequence[int]],
    names: tuple[str, str],
) -> tuple[Translation, float] | None:
    """What makes a drafter one of the target's tokens, and the share of these that it has; None if all.

    Args:
        tokenizers: Of target and drafter, as are ends and names.
        vocab_size: Of the target.

    Raises:
        VocabularyMismatch: It has too few of them.
    """
    if have_same_tokens(*tokenizers):
        return None
    translate = translation(*tokenizers, vocab_size, ends)
    share = shared_share(translate, tokenizers[0])
    expect_shared_tokens(share, names)
    return translate, share
