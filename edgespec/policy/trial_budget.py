"""Time set aside for drafts that are made to learn whether their source has come to pay."""

from dataclasses import dataclass

from edgespec.policy.limits import TRIAL_SHARE


@dataclass(slots=True)
class TrialBudget:
    """Saves a share of the time that passes, and spends all of it on one trial."""

    saved: float = 0.0

    def save(self, elapsed: float) -> None:
        self.saved += TRIAL_SHARE * elapsed

    def spend(self, cost: float) -> bool:
        """Whether a trial that is expected to lose so much can be afforded; if so nothing is left."""
        if self.saved < cost:
            return False
        self.saved = 0.0
        return True
