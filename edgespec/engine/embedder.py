"""Vectors of texts, from a model that was trained for embeddings."""

from collections.abc import Sequence
from threading import Lock

import numpy as np
import numpy.typing as npt

from edgespec.decoding.decoder import Decoder
from edgespec.decoding.hidden_states import HiddenStates
from edgespec.errors import ContextOverflow, EdgeSpecError, ModelError, UsageError, require_context
from edgespec.manifest import Pooling
from edgespec.system.arguments import require_kind
from edgespec.system.cancel import Cancel
from edgespec.text.tokenizer import Tokenizer
from edgespec.types import TokenIds

_LONG = 16  # characters a token, more than nearly any text has
Vectors = npt.NDArray[np.float32]


class Embedder:
    """One pass over each text, one text at a time; several threads may share it.

    decoder: Keeps the states behind the model's final norm, and no others.
    context_length: The most tokens of a text.
    """

    def __init__(self, decoder: Decoder, pooling: Pooling, tokenizer: Tokenizer, context_length: int) -> None:
        assert decoder.hidden_states is not None
        states: HiddenStates = decoder.hidden_states
        self._decoder, self._states, self._pooling = decoder, states, pooling
        self._tokenizer, self.context_length = tokenizer, context_length
        self._lock = Lock()

    @property
    def size(self) -> int:
        """How many numbers a vector has."""
        return self._states.hidden_size

    def vectors(self, texts: str | Sequence[str]) -> Vectors:
        """A vector of length 1 for a text, [hidden_size], or for each of several; raises as Engine.embed does."""
        if isinstance(texts, str):
            return self.vector(self.encode(texts))
        if not isinstance(texts, Sequence) or not texts:
            raise UsageError(f"texts are {texts!r}; wanted a str or a list of them")
        tokens = []
        for i, text in enumerate(texts):
            try:
                tokens.append(self.encode(text))
            except EdgeSpecError as error:
                error.args = (f"texts[{i}]: {error}",)
                raise
        return np.stack([self.vector(each) for each in tokens])

    def encode(self, text: str, *, cuts: bool = False) -> TokenIds:
        """The tokens of a text, with those that the model wants around it, [num_tokens].

        cuts: Leave out the end of a text that does not fit.

        Raises:
            ContextOverflow: They are too many.
            UsageError: It is no text, or an empty one.
        """
        require_kind("the text", text, str, "a str")
        if not text:
            raise UsageError("the text is empty; give at least one character")
        if cuts:
            tokens = self._tokenizer.encode(text[: _LONG * self.context_length])
            return self.complete(tokens[: self.context_length - len(self._pooling.last_tokens)])
        if len(text) > _LONG * self.context_length:  # before it is encoded: 10 MB take 10 s
            num_tokens = self._tokenizer.least_tokens(text, self.context_length)
            if num_tokens > self.context_length:
                raise ContextOverflow(num_tokens, self.context_length, is_all=False)
        return self.complete(self._tokenizer.encode(text))

    def complete(self, tokens: TokenIds) -> TokenIds:
        """Tokens of a text, with those that the model wants behind it; raises ContextOverflow."""
        last = np.array(self._pooling.last_tokens, np.int32)
        if not np.array_equal(tokens[len(tokens) - len(last) :], last):
            tokens = np.concatenate([tokens, last])
        require_context(len(tokens), self.context_length)
        return tokens

    def vector(self, tokens: TokenIds, cancel: Cancel | None = None, size: int | None = None) -> Vectors:
        """The vector of a text's tokens, of length 1, [hidden_size], or its first numbers at length 1, [size].

        Raises:
            Cancelled: It was cancelled.
            ModelError: The states are no finite numbers.
            MemoryExhausted: The pass does not fit.
        """
        with self._lock:
            try:
                with self._decoder.cancelled_by(cancel or Cancel()):
                    self._decoder.logits(tokens, 1)
                states = self._states.read(tokens, 0)
            finally:
                if self._decoder.cache:
                    self._decoder.cache.forget()  # its vector is the same whatever was read before it
        vector = states[-1] if self._pooling.kind == "last" else states.mean(axis=0)
        if not np.isfinite(vector).all():
            raise ModelError(
                "the vector of a text has numbers that are not finite; the weights are damaged, or too large for "
                "their precision: export the model with --precision fp32"
            )
        whole = normalize(vector)
        return whole if size is None else normalize(whole[:size])


def normalize(vector: Vectors) -> Vectors:
    """The vector at length 1; one of zeros stays as it is."""
    length = np.linalg.norm(vector)
    return vector / length if length > 0 else vector
