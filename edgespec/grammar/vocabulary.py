"""A model's tokens as the grammar library has them: the bytes of each, and which of them may follow in a state."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt

from edgespec.errors import FormatError, ModelError
from edgespec.system.text_files import decode_text, read_plain

Matcher = Any  # llguidance.LLMatcher
_NOTHING_FOLLOWS = "NoExtension"  # as the library calls a grammar that no token goes on with
_MAX_BYTES = 64 << 20  # as of tokenizers anywhere
# For each value of a byte of a bit mask the eight summands of logits: 0 where a bit is set, else −∞.
_SUMMANDS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(0),
    np.float32(-np.inf),
).astype(np.float32)


class GrammarVocabulary:
    """The tokens of one model. It takes 0.2 to 1 s to make for 50,000 to 150,000 tokens, so make it once.

    vocab_size: Logits of a row, which may be more than the tokenizer has tokens.
    end_tokens: Tokens that end an answer; the first ends those that can go no further.
    """

    def __init__(self, tokenizer_file: Path, vocab_size: int, end_tokens: Sequence[int]) -> None:
        """Read a tokenizer.json.

        Raises:
            FormatError: The model has no end token, or the grammar library cannot take the tokenizer.
            ModelError: The file cannot be read.
        """
        if not end_tokens:
            raise FormatError(
                "this model has no end token, so no answer in a response_format could end; leave it out"
            )
        self.vocab_size, self.end_tokens = vocab_size, tuple(end_tokens)
        try:
            source = decode_text(read_plain(tokenizer_file, _MAX_BYTES))
        except (OSError, ValueError) as error:  # without the path, which a server would tell its clients
            reason = error.strerror if isinstance(error, OSError) else error
            raise ModelError(
                f"the model's {tokenizer_file.name} can no longer be read ({reason}); load the model again"
            ) from None
        try:
            self.tokenizer = llguidance.LLTokenizer(source, n_vocab=vocab_size, eos_token=list(end_tokens))
        except BaseException as error:  # a panic of the library is no Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise FormatError(
                f"the tokenizer of this model cannot be used with a response_format ({str(error)[:200]}); ask for "
                "text, or use another model"
            ) from None

    def text_of(self, token: int) -> bytes:
        """The bytes of a token; those of a special token are its spelling."""
        return bytes(self.tokenizer.decode_bytes([token]))

    def special_among(self, tokens: Mapping[str, int]) -> dict[str, int]:
        """The tokens, by their spelling, that a grammar has to name because no text matches them."""
        return {text: token for text, token in tokens.items() if self.tokenizer.is_special_token(token)}


def mask_of(matcher: Matcher, vocab_size: int) -> npt.NDArray[np.bool_]:
    """True for each token that may follow, [vocab_size]. Raises what require_sound raises."""
    return np.unpackbits(_bits(matcher), bitorder="little")[:vocab_size].view(np.bool_)


def bias_of(matcher: Matcher, vocab_size: int) -> npt.NDArray[np.float32]:
    """The summands of logits, [vocab_size]: 0 for a token that may follow, −∞ for any other.

    To add it takes 8 µs for 49,000 logits, where a choice by a mask takes 50. Raises what require_sound raises.
    """
    return _SUMMANDS[_bits(matcher)].reshape(-1)[:vocab_size]


def forced_by(matcher: Matcher) -> list[int]:
    """The tokens that have to follow; none where there is a choice, or the text has ended."""
    return [] if matcher.is_stopped() else [int(token) for token in matcher.compute_ff_tokens()]


def may_follow(matcher: Matcher, token: int) -> bool:
    """True if a token may follow, which the matcher then has consumed."""
    forced = forced_by(matcher)
    return (not forced or token == forced[0]) and bool(matcher.try_consume_tokens([token]))


def _bits(matcher: Matcher) -> npt.NDArray[np.uint8]:
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    require_sound(matcher)
    return bits


def require_sound(matcher: Matcher) -> None:
    """Raises FormatError: The grammar takes more work than is allowed for a token, or the library fails at it."""
    if not matcher.is_error():
        return
    reason = first_words(matcher.get_error())
    if reason.startswith(_NOTHING_FOLLOWS):
        raise FormatError(
            "the response_format matches no text: no token can come next; check for parts that refer to "
            "themselves in a circle, or exclude each other"
        )
    raise FormatError(f"the response_format cannot be followed here ({reason}); make it simpler")


def first_words(error: str) -> str:
    """The beginning of a message of the library, in one line."""
    return " ".join(error.partition("<backtrace>")[0].split())[:300]
