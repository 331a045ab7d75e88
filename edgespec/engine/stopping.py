"""When an answer ends: end tokens, a count, strings that may lie across blocks. Pure but for two cursors."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from edgespec.types import TokenIds


@dataclass(slots=True)
class TokenStop:
    """Cuts a stream of blocks at an end token, which is not part of the answer, or after max_tokens."""

    eos_token_ids: Collection[int]
    max_tokens: int
    num_tokens: int = 0

    def cut(self, tokens: TokenIds) -> tuple[TokenIds, str | None]:
        """The tokens that belong to the answer, and the finish reason if it ends here."""
        room = self.max_tokens - self.num_tokens
        kept = tokens[:room]
        for i, token in enumerate(kept.tolist()):
            if token in self.eos_token_ids:
                self.num_tokens += i
                return tokens[:i], "stop"
        self.num_tokens += len(kept)
        return kept, "length" if self.num_tokens >= self.max_tokens else None


class TextStop:
    """Cuts a stream of text at the first of several strings.

    Text that may be the start of one is held back until it is clear.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [string for string in strings if string]
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that can be shown, and whether the answer ends there."""
        self._held += text
        found = [at for string in self._strings if (at := self._held.find(string)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = self._num_undecided()
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        shown, self._held = self._held, ""
        return shown

    def _num_undecided(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max(map(len, self._strings), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(string.startswith(self._held[-size:]) for string in self._strings):
                return size
        return 0
