"""A model's tokenizer as the grammar library reads it: the bytes of each token, and how texts become tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import llguidance

from edgespec.errors import FormatError


class GrammarVocabulary:
    """The tokens of one model. It takes 0.2 to 1 s to make for 50,000 to 150,000 tokens, so make it once.

    vocab_size: Logits of a row, which may be more than the tokenizer has tokens.
    end_tokens: Tokens that end an answer; the first ends those that can go no further.
    """

    def __init__(self, tokenizer_file: Path, vocab_size: int, end_tokens: Sequence[int]) -> None:
        """Read a tokenizer.json.

        Raises FormatError: The model has no end token, or the grammar library cannot take the tokenizer.
        """
        if not end_tokens:
            raise FormatError(
                "this model has no end token, so no answer in a response_format could end; leave it out"
            )
        self.vocab_size, self.end_tokens = vocab_size, tuple(end_tokens)
        try:
            source = tokenizer_file.read_text(encoding="utf-8")
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
