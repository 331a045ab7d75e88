"""A decoder that takes the time that a device takes."""

from collections.abc import Callable, Sequence
from functools import partial
from threading import Condition
from time import perf_counter

from edgespec.errors import EdgeSpecError
from edgespec.types import Decoder, Logits, TokenIds, TreeDecoder

Pace = Callable[[int, int], float]
"""Tokens that a pass runs (those that the cache does not hold), and rows that are wanted of it → seconds."""


class PacedDecoder:
    """Another decoder's logits, at the pace of a device.

    What the inner decoder takes counts as part of it. Where sleeping ends late, as on a busy machine it does by
    some 0.1 ms, the next pass is that much shorter, so that lateness does not add up over passes; what lies
    between passes is nobody's but the caller's.

    Args:
        decoder: Gives the logits; trees too, if it is a TreeDecoder.
        pace: What a pass takes.
        sleep: Lets seconds pass on the clock; unless given real ones do, and interrupt() ends them.
        clock: Tells seconds.
    """

    def __init__(
        self,
        decoder: Decoder,
        pace: Pace,
        sleep: Callable[[float], None] | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._decoder = decoder
        self._pace = pace
        self._sleep = sleep or self._rest
        self._clock = clock
        self._late_s = 0.0
        self._changed = Condition()
        self._is_running = False
        if isinstance(decoder, TreeDecoder):
            # Only then, so that it counts as a TreeDecoder exactly when the inner one does.
            self.tree_logits = partial(self._tree_logits, decoder)

    @property
    def vocab_size(self) -> int:
        return self._decoder.vocab_size

    @property
    def context_length(self) -> int:
        return self._decoder.context_length

    @property
    def num_fed(self) -> int:
        return self._decoder.num_fed

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        return self._paced(lambda: self._decoder.logits(tokens, num_last))

    def _tree_logits(
        self,
        decoder: TreeDecoder,
        tokens: TokenIds,
        nodes: TokenIds,
        parents: Sequence[int],
        num_last: int | None = None,
    ) -> Logits:
        return self._paced(lambda: decoder.tree_logits(tokens, nodes, parents, num_last))

    def interrupt(self) -> None:
        """End the pass that runs, if one does: it raises an error."""
        with self._changed:
            self._is_running = False
            self._changed.notify_all()

    def _paced(self, run: Callable[[], Logits]) -> Logits:
        started, fed = self._clock(), self._decoder.num_fed
        self._is_running = True
        rows = run()
        end = started + self._pace(self._decoder.num_fed - fed, len(rows))
        now, due = self._clock(), end - self._late_s
        if now < due:
            self._sleep(due - now)
            self._late_s = max(0.0, self._clock() - due)
        else:
            self._late_s -= max(0.0, end - now)
        if not self._is_running:
            raise EdgeSpecError("the pass was interrupted")
        self._is_running = False
        return rows

    def _rest(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_running, seconds)
