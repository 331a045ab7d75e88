"""Decoders at the pace of a device in real time, which a simulation is compared with."""

from collections.abc import Callable
from threading import Condition
from time import perf_counter

from edgespec.decoding.decoder import Decoder, ForwardingDecoder, Pass, Rows
from edgespec.draft.lanes import ThreadLane
from edgespec.errors import EdgeSpecError
from edgespec.simulation.schedules import Devices
from edgespec.simulation.synthetic import Pace


class RealPacedDecoder(ForwardingDecoder):
    """Another decoder's logits, at the pace of a device.

    The time of the inner decoder counts as part of it. Where sleeping ends late, as on a busy machine it does by
    some 0.1 ms, the next pass is that much shorter, so that lateness does not add up over passes; the time between
    passes is the caller's.

    Args:
        decoder: Gives the rows.
        pace: How long a pass takes.
        sleep: Lets seconds pass on the clock; by default real ones, which interrupt() ends.
        clock: The time in seconds.
    """

    def __init__(
        self,
        decoder: Decoder,
        pace: Pace,
        sleep: Callable[[float], None] | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        super().__init__(decoder)
        self._pace = pace
        self._sleep = sleep or self._wait
        self._clock = clock
        self._late_s = 0.0
        self._changed = Condition()
        self._is_running = False

    def interrupt(self) -> None:
        """End the pass that runs, if one does: it raises an error."""
        with self._changed:
            self._is_running = False
            self._changed.notify_all()

    def run(self, given: Pass) -> Rows:
        started, fed = self._clock(), self._decoder.num_fed
        self._is_running = True
        rows = self._decoder.run(given)
        end = started + self._pace(self._decoder.num_fed - fed, given.num_rows)
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

    def _wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_running, seconds)


def real_devices() -> Devices:
    """A target in the caller's thread, and a drafter in another one."""
    return Devices(perf_counter, ThreadLane("drafter"), RealPacedDecoder, RealPacedDecoder)
