"""Time set aside for trials: drafts that are made to learn whether drafting from their source pays by now."""

from dataclasses import dataclass

from edgespec.policy.limits import TRIAL_SHARE


@dataclass(slots=True)
class TrialBudget:
    """Saves a share of the time that passes, and spends all of it on one trial."""

    saved: float = 0.0

    def save(self, elapsed: float) -> None:
        self.saved += TRIAL_SHARE * elapsed

    def spend(self, cost: float) -> bool:
        """Whether the budget allows a trial that is expected to lose so much time; if so, the trial uses it up."""
        if self.saved < cost:
            return False
        self.saved = 0.0
        return True
