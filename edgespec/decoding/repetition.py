"""Tells if a text has run into a loop: its last tokens are one span, again and again. Knows nothing of text."""

from collections.abc import Callable, Sequence

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
    return _loop_span(tokens) > 0


def _loop_span(tokens: Sequence[int]) -> int:
    """How many tokens the loop repeats that the tokens end with; 0 where they end with none."""
    for span_length in range(1, min(_LONGEST_SPAN, len(tokens) // 2) + 1):
        if tokens[-1] != tokens[-1 - span_length]:
            continue
        num_distinct = len({*tokens[-span_length:]})
        num_times, num_tokens = next((times, num) for least, times, num in _LIMITS if num_distinct >= least)
        wanted = max(num_times * span_length, num_tokens)
        tail = tokens[-wanted:]
        if len(tokens) >= wanted and tail[span_length:] == tail[:-span_length]:
            return span_length
    return 0


class LoopWatch:
    """Looks for a loop in a text that is being written, after every 64 tokens, however they come."""

    def __init__(self, may_go_on: Callable[[list[int], int], bool] = lambda tokens, span_length: False) -> None:
        """may_go_on: Whether a text that ends in a loop may, by its tokens and how many of them repeat."""
        self._tokens: list[int] = []
        self._may_go_on = may_go_on

    def find(self, tokens: Sequence[int]) -> int | None:
        """Take more tokens; returns how many of them are written when a loop is found, None if none is."""
        num_before = len(self._tokens)
        self._tokens += tokens
        first = num_before - num_before % _LOOK_AFTER + _LOOK_AFTER
        for end in range(first, len(self._tokens) + 1, _LOOK_AFTER):
            written = self._tokens[:end]
            if (span_length := _loop_span(written)) and not self._may_go_on(written, span_length):
                return end - num_before
        return None
