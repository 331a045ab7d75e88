"""A target as several engines share it: its caches, and the queue of answers that are to have one."""

from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import ref

from edgespec.decoding.decoder import Decoder
from edgespec.draft.pool import DrafterPool
from edgespec.engine.request_queue import RequestQueue, Ticket
from edgespec.engine.target_caches import TargetCaches


class SharedTarget(NamedTuple):
    """The caches of a target, and the queue of answers that are to have one."""

    caches: TargetCaches
    queue: RequestQueue

    @classmethod
    def make(
        cls,
        target: Decoder,
        max_parallel: int = 1,
        may_join: Callable[[], bool] = lambda: True,
        report_exchange: Callable[[int, int], None] = lambda number, other: None,
    ) -> "SharedTarget":
        """Caches for as many answers at once as max_parallel says, if the target can have several.

        Args:
            may_join: Whether there is memory for passes of several answers.
            report_exchange: Takes the numbers of caches that exchange what they hold.
        """
        caches = TargetCaches(target, max_parallel, may_join, report_exchange)
        return cls(caches, RequestQueue(num_caches=caches.num_caches))

    def empty(self) -> Sequence[int]:
        """Free the memory of caches that no answer has, but for the first; returns which."""
        return self.caches.empty(self.queue.is_held)


def interrupt(decoders: Sequence[Decoder], pool: DrafterPool, weak: "ref[Ticket]") -> None:
    """End the pass and the drafts that are being made for an answer, from another thread.

    Args:
        decoders: Of the target's caches, which an answer may still use when its engine has let them go.
        weak: The answer, which has this call.
    """
    ticket = weak()
    if ticket is None or ticket.cache is None:
        return
    if ticket.cache < len(decoders):
        decoders[ticket.cache].interrupt()
    if ticket.cache == 0:  # drafter models draft for the answer in the first cache
        pool.interrupt()
