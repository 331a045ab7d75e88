"""The correction that a drafting head has learned from use in one domain.

At first the head drafts as it is. A correction that was trained is a candidate: on the rows of later answers what
it would have drafted is counted, and it is used once it beats what is in use by more than chance. What was
in use before is kept and counted too, and is used again where it turns out better. Trains nothing itself.
"""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from math import sqrt
from typing import Annotated, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from edgespec.decoding.head_rows import Contexts, Correction, correct
from edgespec.draft.verified_rows import VerifiedRows, no_rows
from edgespec.types import Logits

# Standard deviations of a coin's that a lead must have: one look in 100 at two equal ways finds it.
_LEAD = 2.3
_FEWEST = 20  # rows at which just one of both is right
# After so many rows a trial goes on only with a lead of half a deviation, and not beyond the second number.
_PROMISING, _HALF_WAY_ROWS, _LONGEST_ROWS = 0.5, 512, 4096

Verdict = Literal["better", "worse", "open"]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]


class ShadowTrial(NamedTuple):
    """Counts of rows at which just the new way, or just the old one, would have drafted the target's token.

    At other rows they are equal, so that of two equal ways each is right in half of these (McNemar's test).
    """

    num_rows: Count = 0
    num_new: Count = 0
    num_old: Count = 0

    def after(self, is_new_right: npt.NDArray[np.bool_], is_old_right: npt.NDArray[np.bool_]) -> "ShadowTrial":
        """The trial after more rows."""
        return ShadowTrial(
            self.num_rows + len(is_new_right),
            self.num_new + int((is_new_right & ~is_old_right).sum()),
            self.num_old + int((is_old_right & ~is_new_right).sum()),
        )

    @property
    def lead(self) -> float:
        """By how much the new way leads, in standard deviations of what chance alone makes of equal ways."""
        return (self.num_new - self.num_old) / sqrt(max(1, self.num_new + self.num_old))

    @property
    def verdict(self) -> Verdict:
        """Better or worse, for the new way; also worse if it has not proved better in enough rows."""
        if self.num_new + self.num_old >= _FEWEST and abs(self.lead) >= _LEAD:
            return "better" if self.lead > 0 else "worse"
        is_hopeless = self.num_rows >= _HALF_WAY_ROWS and self.lead < _PROMISING
        return "worse" if is_hopeless or self.num_rows >= _LONGEST_ROWS else "open"


MOST_ROWS = 4096  # kept to train on, in 2 MB
_WINDOW_ROWS = 1024  # what was better before these says little of now


class ShadowCount(NamedTuple):
    """Rows at which it was counted what the head would have drafted, before it was trained on them.

    num_plain: Where the head as it is would have drafted the target's token.
    num_used: Where what was in use at the time would have.
    """

    num_rows: Count = 0
    num_plain: Count = 0
    num_used: Count = 0


@dataclass(frozen=True, kw_only=True)
class LearnedHead:
    """A head's corrections in a domain, in use and on trial.

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
    tally: ShadowCount = field(default_factory=ShadowCount)
    num_new: int = 0
    num_swaps: int = 0
    changed: str | None = None

    def judge(self, found: Logits, contexts: Contexts, wanted: npt.NDArray[np.int32]) -> "LearnedHead":
        """Count what each would have drafted where the target's token has the column wanted."""

        def is_right(correction: Correction | None) -> npt.NDArray[np.bool_]:
            return np.asarray(correct(correction, found, contexts).argmax(axis=1) == wanted)

        plain, used = is_right(None), is_right(self.active)
        tally = ShadowCount(
            self.tally.num_rows + len(found),
            self.tally.num_plain + int(plain.sum()),
            self.tally.num_used + int(used.sum()),
        )
        trial = self.trial.after(is_right(self.candidate), used) if self.candidate else self.trial
        if self.active is None:
            return replace(self, tally=tally, trial=trial)
        back, against_plain = self.back.after(is_right(self.previous), used), self.plain.after(plain, used)
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
