"""Keeps texts out of an answer, however tokens spell them. Knows nothing of logits."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from edgespec.types import TokenIds


class SpellingIndex:
    """The tokens of a vocabulary by their bytes, as Tokenizer.spellings has them."""

    def __init__(self, spellings: Mapping[int, bytes], vocab_size: int) -> None:
        self.spellings, self.vocab_size = spellings, vocab_size
        in_order = sorted((text, token) for token, text in spellings.items() if text and token < vocab_size)
        self._texts = [text for text, _ in in_order]
        self._ids = np.array([token for _, token in in_order], np.intp)
        self._behind = b"\xff" * max(map(len, self._texts), default=0)

    def beginning_with(self, text: bytes) -> npt.NDArray[np.intp]:
        """Tokens whose bytes begin with a text, [num_found]."""
        return self._ids[bisect_left(self._texts, text) : bisect_right(self._texts, text + self._behind)]

    def holding(self, text: bytes) -> npt.NDArray[np.intp]:
        """Tokens whose bytes hold a text, [num_found]."""
        return self._ids[[i for i, each in enumerate(self._texts) if text in each]]


class BannedTexts:
    """The TokenMask of answers in which none of some texts occurs.

    A token is banned if it would complete one of them: if it holds it, or begins with the rest of it where the
    answer ends within it. So no sequence of tokens spells it, whichever way it is cut.
    """

    def __init__(self, texts: Sequence[str], index: SpellingIndex) -> None:
        """Each of texts has at least one character."""
        self._spellings = index.spellings
        banned = [text.encode("utf-8", "surrogatepass") for text in texts]
        self._alone = np.ones(index.vocab_size, np.bool_)  # tokens that hold none of the texts
        for text in banned:
            self._alone[index.holding(text)] = False
        self._alone.flags.writeable = False
        # Tokens that complete a text, by the part of it that comes before them.
        self._behind: dict[bytes, list[npt.NDArray[np.intp]]] = {}
        for text in banned:
            for cut in range(1, len(text)):
                self._behind.setdefault(text[:cut], []).append(index.beginning_with(text[cut:]))
        self._num_bytes = max(map(len, banned), default=1) - 1

    def __call__(self, answer: TokenIds) -> npt.NDArray[np.bool_]:
        """True for each token that may follow the answer so far, [vocab_size]."""
        end = self._end_of(answer)
        allowed = self._alone
        for size in range(1, min(len(end), self._num_bytes) + 1):
            for ids in self._behind.get(end[-size:], ()):
                allowed = allowed if allowed.flags.writeable else allowed.copy()
                allowed[ids] = False
        return allowed

    def _end_of(self, answer: TokenIds) -> bytes:
        """The last bytes of an answer, at least as many as the longest text has before its last one."""
        end = b""
        for token in answer[::-1]:
            if len(end) >= self._num_bytes:
                break
            end = self._spellings.get(int(token), b"") + end
        return end
