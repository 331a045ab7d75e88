"""Time that is left to check a device, and models that are left out for want of it."""

from time import perf_counter


class LeftOut(Exception):
    """A model that cannot be had, or that there is no time for."""


class Budget:
    """Seconds for all models; what the next takes is foreseen from the last one, by their numbers of weights."""

    def __init__(self, budget_s: float) -> None:
        self._started_s, self._budget_s = perf_counter(), budget_s
        self._begun_s = self._started_s
        self._weight_s = 0.0

    def begin(self, num_weights: int) -> None:
        """Raises LeftOut: A model would end after the budget."""
        self._begun_s = perf_counter()
        left_s = self._budget_s - (self._begun_s - self._started_s)
        if self._weight_s * num_weights > left_s:
            foreseen_s = self._weight_s * num_weights
            raise LeftOut(f"it would take about {foreseen_s:.0f} s, and {left_s:.0f} s are left; raise --minutes")

    def end(self, num_weights: int) -> None:
        self._weight_s = (perf_counter() - self._begun_s) / num_weights
