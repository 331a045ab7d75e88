"""Plain passes of a greedy answer that begin as soon as the token before them is chosen.

The thread that runs them does not wait for the thread of the answer, which accepts the token, makes its text known
and asks for the next pass meanwhile. Of an answer with drafts nothing runs ahead: a pass then begins with a draft,
which is only made when the token before it is known.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from edgespec.decoding.decoder import BEST, Decoder, ForwardingDecoder, Pass, Rows
from edgespec.types import TokenIds, append


@dataclass(slots=True, eq=False)
class _Begun:
    """A pass that runs, or has run; num_fed is the target's count behind it."""

    given: Pass
    result: Future[Rows] = field(default_factory=Future)
    num_fed: int = 0
    is_wanted: bool = False  # it was asked for, so that the one after it may begin
    next: "_Begun | None" = None

    def is_of(self, given: Pass) -> bool:
        mine, other = self.given, given
        is_plain = not len(other.tree.tokens) and other.num_rows == 1 and other.wants is BEST
        return is_plain and mine.num_prompt == other.num_prompt and np.array_equal(mine.text, other.text)


class PassAhead(ForwardingDecoder):
    """A decoder that runs one plain pass ahead of those that it is asked for.

    What it holds is a memo of tokens, so that a pass in vain leaves nothing to undo.
    """

    def __init__(
        self, decoder: Decoder, goes_on: Callable[[TokenIds], bool], on_begin: Callable[[], None] = lambda: None
    ) -> None:
        """Begin nothing yet.

        Args:
            goes_on: True if a plain pass over these tokens is to be expected; any thread may call it.
            on_begin: Is called when a pass is asked for that has begun already.
        """
        super().__init__(decoder)
        self._goes_on, self._on_begin = goes_on, on_begin
        self._begun: _Begun | None = None
        self._lock = Lock()  # of what was begun
        self._pool = ThreadPoolExecutor(1, "edgespec pass")  # starts no thread before it has work
        self._num_fed = decoder.num_fed

    @property
    def num_fed(self) -> int:
        """Without what a pass that was not asked for has run."""
        return self._num_fed

    def run(self, given: Pass) -> Rows:
        begun = self._begun
        if begun is None or not begun.is_of(given):
            self._drop()
            rows = self._decoder.run(given)
            self._num_fed = self._decoder.num_fed
            self._begun = self._begin_after(given, rows)
            return rows
        with self._lock:
            begun.is_wanted = True
            if begun.result.done():
                self._follow(begun)
        self._on_begin()
        try:
            rows = begun.result.result()
        except BaseException:
            self._drop()
            raise
        self._num_fed, self._begun = begun.num_fed, begun.next
        return rows

    def close(self) -> None:
        """End the pass that runs ahead, and its thread."""
        self._drop()
        self._pool.shutdown()

    def _drop(self) -> None:
        begun, self._begun = self._begun, None
        while begun is not None:
            if not begun.result.done():
                self._decoder.interrupt()
                wait([begun.result])
            begun = begun.next

    def _begin_after(self, given: Pass, rows: Rows) -> _Begun | None:
        """Begin the pass after the token that a pass has chosen, if that one is to be expected."""
        best = rows.best
        if best is None or len(best.ids) != 1 or not best.is_sound[0]:
            return None
        text = append(given.text, best.ids.tolist())
        if len(text) > self.context_length or not self._goes_on(text):
            return None
        begun = _Begun(Pass(text, wants=BEST, num_prompt=given.num_prompt))
        self._pool.submit(self._run, begun)
        return begun

    def _run(self, begun: _Begun) -> None:
        try:
            rows = self._decoder.run(begun.given)
        except BaseException as error:  # passed on to the caller
            begun.result.set_exception(error)
            return
        begun.num_fed = self._decoder.num_fed
        with self._lock:
            if begun.is_wanted:  # before its caller wakes, which would compete for the interpreter
                begun.next = self._begin_after(begun.given, rows)
            begun.result.set_result(rows)

    def _follow(self, begun: _Begun) -> None:
        """Begin the pass after one that was over before it was asked for."""
        if begun.result.exception() is None:
            begun.next = self._begin_after(begun.given, begun.result.result())
