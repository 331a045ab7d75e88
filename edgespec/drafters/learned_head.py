"""What a drafting head has learned from use in one domain.

At first the head drafts as it is. A correction that was trained is a candidate: on the rows of later answers what
it would have drafted is counted, and it is used once it beats what is in use by more than chance. What was
in use before is kept and counted too, and is used again where it turns out better. Trains nothing itself.
"""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt

from edgespec.decoding.head_rows import Contexts, Correction, correct
from edgespec.drafters.shadow_trial import ShadowTrial
from edgespec.drafters.verified_rows import VerifiedRows, no_rows
from edgespec.types import Logits

MOST_ROWS = 4096  # kept to train on, in 2 MB
_WINDOW_ROWS = 1024  # what was better before these says little of now


@dataclass(frozen=True)
class Tally:
    """Rows at which it was counted what the head would have drafted, before it was trained on them.

    num_plain: Where the head as it is would have drafted the target's token.
    num_used: Where what was in use at the time would have.
    """

    num_rows: int = 0
    num_plain: int = 0
    num_used: int = 0


@dataclass(frozen=True, kw_only=True)
class LearnedHead:
    """What was learned in a domain.

    active: The correction in use; None for the head as it is.
    previous: What was in use before; None for the head as it is.
    candidate: A correction on trial, if there is one.
    trial: The candidate against what is in use.
    back: What was in use before against what is.
    plain: The head as it is against what is in use.
    rows: The newest verified rows, to train on.
    num_new: Rows since a candidate was last trained.
    changed: When what is in use was last changed, in UTC.
    """

    rows: VerifiedRows = field(default_factory=no_rows)
    active: Correction | None = None
    previous: Correction | None = None
    candidate: Correction | None = None
    trial: ShadowTrial = field(default_factory=ShadowTrial)
    back: ShadowTrial = field(default_factory=ShadowTrial)
    plain: ShadowTrial = field(default_factory=ShadowTrial)
    tally: Tally = field(default_factory=Tally)
    num_new: int = 0
    num_swaps: int = 0
    changed: str | None = None

    def judge(self, found: Logits, contexts: Contexts, wanted: npt.NDArray[np.int32]) -> "LearnedHead":
        """Count what each would have drafted where the target's token has the column wanted."""

        def is_right(correction: Correction | None) -> npt.NDArray[np.bool_]:
            return np.asarray(correct(correction, found, contexts).argmax(axis=1) == wanted)

        plain, used = is_right(None), is_right(self.active)
        tally = Tally(
            self.tally.num_rows + len(found),
            self.tally.num_plain + int(plain.sum()),
            self.tally.num_used + int(used.sum()),
        )
        trial = self.trial.count(is_right(self.candidate), used) if self.candidate else self.trial
        if self.active is None:
            return replace(self, tally=tally, trial=trial)
        back, against_plain = self.back.count(is_right(self.previous), used), self.plain.count(plain, used)
        return replace(self, tally=tally, trial=trial, back=back, plain=against_plain)

    def with_rows(self, rows: VerifiedRows) -> "LearnedHead":
        return replace(self, rows=self.rows.followed_by(rows, MOST_ROWS), num_new=self.num_new + len(rows))

    def decide(self) -> "LearnedHead":
        """Use what has turned out better, and end trials that are over."""
        if self.back.verdict == "better":
            return self._change(self.previous, None)
        if self.candidate is not None and self.trial.verdict == "better":
            return self._change(self.candidate, self.active)
        if self.plain.verdict == "better":
            return self._change(None, None)
        ended = self
        if self.candidate is not None and self.trial.verdict == "worse":
            ended = replace(ended, candidate=None, trial=ShadowTrial())
        if self.plain.num_rows >= _WINDOW_ROWS:
            ended = replace(ended, back=ShadowTrial(), plain=ShadowTrial())
        return ended

    def try_out(self, candidate: Correction) -> "LearnedHead":
        return replace(self, candidate=candidate, trial=ShadowTrial(), num_new=0)

    def _change(self, active: Correction | None, previous: Correction | None) -> "LearnedHead":
        return replace(
            self,
            active=active,
            previous=previous,
            candidate=None,
            trial=ShadowTrial(),
            back=ShadowTrial(),
            plain=ShadowTrial(),
            num_swaps=self.num_swaps + 1,
            changed=datetime.now(UTC).isoformat(timespec="seconds"),
        )
