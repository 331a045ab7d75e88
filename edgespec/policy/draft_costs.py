"""What a drafter model's drafts and steps cost, corrected by what is seen of them. Knows nothing of who drafts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from edgespec.policy.costs import PassCosts

# A draft that took this many times what was expected was disturbed, by another program or a growing cache.
_DISTURBED = 2.0
_DECAY = 0.85


@dataclass(slots=True)
class DraftCosts:
    """Costs of a model's draft in steps of its target, so that a change of the machine's speed cancels."""

    step: float  # of each token that is drafted
    row: float  # of each token of the text that the model has not read yet

    def steps(self, num_tokens: float, num_unread: int) -> float:
        # The last token of the text is read by the step that drafts the first.
        return num_tokens * self.step + max(0, num_unread - 1) * self.row

    def observe(self, num_tokens: float, num_unread: int, taken: float) -> None:
        """Correct the costs by those of one draft, each by its share of what was expected."""
        expected = self.steps(num_tokens, num_unread)
        drafting = num_tokens * self.step / expected
        self.step *= correction(taken / expected) ** drafting
        self.row *= correction(taken / expected) ** (1 - drafting)


@dataclass(slots=True)
class RowCosts:
    """Time of a drafter's step by its rows, relative to a step of one row.

    measured: What was measured at first, by rows, 1 among them; use can only show that rows cost more than that.
    """

    measured: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})
    _excess: dict[int, float] = field(init=False, default_factory=dict)  # by row class, over what was measured
    _known: dict[int, float] = field(init=False, default_factory=dict)  # what was measured, by rows

    def ratio(self, num_rows: int) -> float:
        return self._measured(num_rows) * self._known_excess(num_rows) if num_rows > 1 else 1.0

    def observe(self, num_rows: int, factor: float) -> float:
        """Correct the cost of a step of num_rows by a factor; returns the part of it that rows do not explain."""
        self._excess.setdefault(_row_class(num_rows), self._known_excess(num_rows))
        raised = self._excess[_row_class(num_rows)] * factor
        self._excess[_row_class(num_rows)] = max(1.0, raised)
        return min(1.0, raised)

    def relax(self, factor: float) -> None:
        """Take back a factor that was ascribed to rows, as steps of one row turned out to cost it too."""
        for rows in self._excess:
            self._excess[rows] = max(1.0, self._excess[rows] / factor)

    def _known_excess(self, num_rows: int) -> float:
        """The cost of a step of num_rows relative to what was measured, by the nearest number of rows observed."""
        if not self._excess:
            return 1.0
        rows = _row_class(num_rows)
        return self._excess[min(self._excess, key=lambda known: abs(known - rows))]

    def _measured(self, num_rows: int) -> float:
        if num_rows not in self._known:
            self._known[num_rows] = PassCosts(dict(self.measured)).ratio(num_rows)
        return self._known[num_rows]


def _row_class(num_rows: int) -> int:
    """The class of a number of rows, by the next power of two: what was learned of one counts for all of it."""
    return int(num_rows - 1).bit_length()


def correction(surprise: float, count: int = 1) -> float:
    """The factor on an expected time after count samples took surprise times as long on average."""
    weight = 1 - _DECAY**count
    return min(max(surprise, 1 / _DISTURBED), _DISTURBED) ** weight  # type: ignore[no-any-return]
