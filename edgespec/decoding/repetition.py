"""Tells if a text has run into a loop: its last tokens are one span, again and again. Knows nothing of text."""

from collections.abc import Sequence

SHORTEST_LOOP = 192  # tokens; fewer never count as a loop
_LONGEST_SPAN = 256
_LOOK_AFTER = 64  # tokens, between two looks for a loop in a text that is being written
# Rows of a table, zeros of an array and lines of a drawing repeat too, but consist of few different tokens, unlike
# sentences. For so many distinct tokens of a span, or more: how often it comes in a loop, and in how many tokens.
_LIMITS = ((12, 8, SHORTEST_LOOP), (4, 24, 384), (1, 48, 768))


def ends_in_loop(tokens: Sequence[int]) -> bool:
    """True if the tokens end with a loop.

    Exact repetition alone counts: a list whose numbers rise, or a refrain between other verses, is no loop.
    """
    for span_length in range(1, min(_LONGEST_SPAN, len(tokens) // 2) + 1):
        if tokens[-1] != tokens[-1 - span_length]:
            continue
        num_distinct = len({*tokens[-span_length:]})
        num_times, num_tokens = next((times, num) for least, times, num in _LIMITS if num_distinct >= least)
        wanted = max(num_times * span_length, num_tokens)
        tail = tokens[-wanted:]
        if len(tokens) >= wanted and tail[span_length:] == tail[:-span_length]:
            return True
    return False


class LoopWatch:
    """Looks for a loop, now and then, in the tokens of a text that is being written."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._num_since = 0  # tokens since it was looked for
        self._is_found = False

    def push(self, tokens: Sequence[int]) -> bool:
        """Take more tokens; return whether a loop was found just now."""
        self._tokens += tokens
        self._num_since += len(tokens)
        if self._is_found or self._num_since < _LOOK_AFTER:
            return False
        self._num_since = 0
        self._is_found = ends_in_loop(self._tokens)
        return self._is_found
