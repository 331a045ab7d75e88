"""A drafter with another vocabulary, as a decoder over the target's.

The drafter can draft the tokens that both vocabularies have, which are matched by their bytes (token-level
intersection: Timor et al., arXiv:2502.05202). Text is translated token by token: a token that the drafter lacks is
spelled in its own tokens. So the translation of a text never changes when more follows, no text is tokenized
again, and the drafter's cache works as with its own tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from edgespec.decoding.decoder import CHAINS, Can, Decoder, ForwardingDecoder, Pass, Rows
from edgespec.decoding.head_rows import UNKNOWN
from edgespec.errors import ContextOverflow, ManifestError, VocabularyMismatch, require_context
from edgespec.text.tokenizer import Tokenizer, have_same_tokens
from edgespec.types import TokenIds

# The share of tokens that the drafter has bounds acceptance; below the usual break-even not even a drafter that is
# always right would pay.
_MIN_SHARE = 0.55
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
    """Tokens of a target as tokens of a drafter."""

    counterparts: TokenIds  # the drafter's token for each of the target's, or -1, [target_vocab_size]
    target_bytes: Mapping[int, bytes]  # by token of the target
    drafter_bytes: Mapping[int, bytes]  # by token of the drafter
    drafter_tokens: Mapping[bytes, int]  # the drafter's token with these bytes
    drafter_tokenizer: Tokenizer
    prefix: tuple[int, ...] = ()  # the drafter's tokens that begin every text
    _spellings: dict[int, list[int]] = field(default_factory=dict)  # of tokens that the drafter lacks

    def __call__(self, tokens: TokenIds) -> tuple[TokenIds, npt.NDArray[np.intp]]:
        """The drafter's tokens, and how many there are after each of the target's tokens, [num_tokens]."""
        counterparts = self.counterparts[tokens]
        is_shared = counterparts >= 0
        lacking = np.flatnonzero(~is_shared)
        spellings = [self._spell(int(token)) for token in tokens[lacking]]
        lengths = np.ones(len(tokens), np.intp)
        lengths[lacking] = [len(ids) for ids in spellings]
        ends = len(self.prefix) + lengths.cumsum()
        drafted = np.empty(len(self.prefix) + lengths.sum(), np.int32)
        drafted[: len(self.prefix)] = self.prefix
        drafted[ends[is_shared] - 1] = counterparts[is_shared]
        for end, ids in zip(ends[lacking], spellings, strict=True):
            drafted[end - len(ids) : end] = ids
        return drafted, ends

    def _spell(self, token: int) -> list[int]:
        """The drafter's tokens that spell a token that it lacks; none for a special token."""
        if token not in self._spellings:
            text = self.target_bytes.get(token, b"")
            tokens = _encode_exactly(text, self.drafter_tokenizer, self.drafter_bytes)
            self._spellings[token] = tokens or longest_pieces(text, self.drafter_tokens)
        return self._spellings[token]


def _encode_exactly(text: bytes, tokenizer: Tokenizer, spellings: Mapping[int, bytes]) -> list[int]:
    """The tokens that a tokenizer makes of a text; none where their bytes are not those of the text."""
    try:
        tokens = tokenizer.encode(text.decode()).tolist()[len(tokenizer.encode("")) :]
    except (UnicodeDecodeError, ManifestError):
        return []
    return tokens if b"".join(spellings.get(token, b"") for token in tokens) == text else []


def longest_pieces(text: bytes, tokens: Mapping[bytes, int]) -> list[int]:
    """The token of the longest piece that begins the text, and so on; bytes without a token are left out.

    With pieces `a`, `ab` and `c`, `abxc` becomes `ab`, `c`.
    """
    found: list[int] = []
    start = 0
    while start < len(text):
        stop = next((stop for stop in range(len(text), start, -1) if text[start:stop] in tokens), None)
        if stop is not None:
            found.append(tokens[text[start:stop]])
        start = stop or start + 1
    return found


def match_vocabularies(
    target: Tokenizer, drafter: Tokenizer, vocab_size: int, ends: tuple[Sequence[int], Sequence[int]] = ((), ())
) -> Translation:
    """Match the tokens of two vocabularies: text by its bytes, special tokens by their spelling or their role.

    Args:
        vocab_size: The target's, padding included.
        ends: Tokens that end an answer, of target and drafter. Tokens of the target that the drafter spells
            otherwise become the drafter's last one, which ends a turn where there are several.
    """
    target_bytes, drafter_bytes = target.spellings, drafter.spellings
    # The last token of each spelling: SentencePiece has single bytes first, and letters after them.
    by_bytes = {text: token for token, text in sorted(drafter_bytes.items()) if text}
    by_piece = {piece: token for token, piece in drafter.pieces.items()}
    counterparts = np.full(vocab_size, -1, np.int32)
    for token, text in target_bytes.items():
        alike = by_piece.get(target.piece(token) or "", -1)
        counterparts[token] = alike if drafter_bytes.get(alike) == text else by_bytes.get(text, -1)
    prefixes = [tokenizer.encode("").tolist() for tokenizer in (target, drafter)]
    special = {token: max(ends[1]) for token in ends[0] if ends[1]}
    in_drafter = drafter.special_tokens
    special |= {token: in_drafter[text] for text, token in target.special_tokens.items() if text in in_drafter}
    special |= dict(zip(*prefixes, strict=False))
    for token, counterpart in special.items():
        counterparts[token] = counterpart
    prefix = () if prefixes[0] else tuple(prefixes[1])
    return Translation(counterparts, target_bytes, drafter_bytes, by_bytes, drafter, prefix)


def shared_token_share(translate: Translation, target: Tokenizer, names: tuple[str, str]) -> float:
    """The share of a sample's tokens (prose, numbers, code, three languages) that the drafter has too.

    Raises VocabularyMismatch: It has too few; names are of target and drafter.
    """
    share = float((translate.counterparts[target.encode(_SAMPLE)] >= 0).mean())
    if share < _MIN_SHARE:
        raise VocabularyMismatch(
            f"the drafter {names[1]} has {share:.0%} of the tokens that the target {names[0]} needs for ordinary "
            f"text, wanted {_MIN_SHARE:.0%}; choose a drafter of the target's own family, or --drafter ngram, "
            "which needs none"
        )
    return share


class TranslatedDecoder(ForwardingDecoder):
    """A decoder over the vocabulary of another model; tokens that it lacks get a logit that is never chosen.

    A text that is longer than the context in the drafter's tokens is read from a later start.
    """

    def __init__(self, decoder: Decoder, translate: Translation) -> None:
        super().__init__(decoder)
        self._translate = translate
        # The column of each token in a row of the drafter with one column more, for tokens that the drafter lacks.
        counterparts = translate.counterparts
        self._columns = np.where(counterparts < 0, decoder.vocab_size, counterparts).astype(np.intp)
        self.vocab_size = len(self._columns)

    @property
    def can(self) -> Can:
        return CHAINS

    def run(self, given: Pass) -> Rows:
        """Rows of a pass, [num_rows, vocab_size].

        All are equal where the drafter has read no token yet, as after special tokens that it lacks.

        Raises ContextOverflow: tokens are more than context_length, or the rows are.
        """
        tokens, num_last = given.tokens, given.num_rows
        require_context(len(tokens), self.context_length)
        rows = np.full((num_last, self.vocab_size), UNKNOWN, np.float32)
        drafted, ends = self._translate(tokens)
        ends = ends[-num_last:]
        known = np.flatnonzero(ends)
        if not len(known):
            return Rows(rows)
        first = int(ends[known[0]])
        # Left out in quarters of the context, so that the cache starts over only now and then.
        quarter = max(1, self.context_length // 4)
        start = -(-max(0, len(drafted) - self.context_length) // quarter) * quarter
        if first <= start:
            raise ContextOverflow(len(drafted) - first + 1, self.context_length)
        own = self._decoder.logits(drafted[start:], len(drafted) - first + 1)
        wider = np.full((len(known), self._decoder.vocab_size + 1), UNKNOWN, np.float32)
        wider[:, :-1] = own[ends[known] - first]
        rows[known] = wider.take(self._columns, axis=1)  # 0.18 ms a row, 0.35 ms by assigning shared tokens alone
        return Rows(rows)


def respell(guess: list[int], tokenizer: Tokenizer, spellings: Mapping[int, bytes]) -> list[int]:
    """Guessed tokens as the target's tokenizer would write their text, up to the first special token.

    So `:` and a line break, which is all that a drafter can draft that lacks the token of both, become that token:
    of four tokens drafted by SmolLM2-135M for Qwen2.5-Coder-1.5B 1.60 are accepted instead of 1.47.

    Args:
        tokenizer: The target's.
        spellings: Bytes of the target's tokens.
    """
    end = next((i for i, token in enumerate(guess) if token not in spellings), len(guess))
    text = b"".join(spellings[token] for token in guess[:end])
    return ((_encode_exactly(text, tokenizer, spellings) or guess[:end]) + guess[end:])[: len(guess)]


def find_translation(
    tokenizers: tuple[Tokenizer, Tokenizer],
    vocab_size: int,
    ends: tuple[Sequence[int], Sequence[int]],
    names: tuple[str, str],
) -> tuple[Translation, float] | None:
    """The translation for a drafter and the share of the target's tokens that it has; None if their tokens agree.

    Args:
        tokenizers: Of target and drafter, as are ends and names.
        vocab_size: The target's.

    Raises VocabularyMismatch: The drafter has too few of the target's tokens.
    """
    if have_same_tokens(*tokenizers):
        return None
    translate = match_vocabularies(*tokenizers, vocab_size, ends)
    return translate, shared_token_share(translate, tokenizers[0], names)
