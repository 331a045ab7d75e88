"""Learns a correction of a drafting head from one answer after another. Knows no threads."""

from pathlib import Path
from weakref import ReferenceType, ref

from edgespec.decoders import CorrectableHead
from edgespec.drafters.correction_training import TrainingRule, train_correction
from edgespec.drafters.learned_file import LearnedFile
from edgespec.drafters.learned_head import LearnedHead
from edgespec.drafters.verified_rows import AnswerLog, verify_rows
from edgespec.system.cancel import Flag
from edgespec.types import Report

_MOST_ROWS = 48  # in one pass of the head
_MOST_LOGITS = 1 << 20  # likewise
_FEWEST_NEW = 256  # rows between two trainings


class HeadLearner:
    """What one head learns in one domain, and its file.

    learned: So far; None before the first answer.
    """

    def __init__(
        self, file: LearnedFile, report: Report = lambda line: None, rule: TrainingRule | None = None
    ) -> None:
        """Read what was learned earlier; a file that cannot be used is reported."""
        self._file, self._rule = file, rule or TrainingRule()
        self._head: ReferenceType[CorrectableHead] | None = None
        self.learned: LearnedHead | None = file.read(report)
        self._num_unwritten = 0  # rows

    def attach(self, head: CorrectableHead) -> None:
        """Let a head draft with what was learned, and learn from its rows from here on; it is not kept alive."""
        self._head = ref(head)
        head.correction = self.learned.active if self.learned else None

    @property
    def head(self) -> CorrectableHead | None:
        """The head that learns; None while it is not open."""
        return self._head() if self._head is not None else None

    def is_of(self, folder: Path) -> bool:
        """Whether this learner is of the head in a folder."""
        return self._file.head == folder

    def interrupt(self) -> None:
        """End the pass of the head in which another thread reads rows."""
        if head := self.head:
            head.interrupt()

    def read(self, log: AnswerLog, cancel: Flag) -> None:
        """Read the head's rows after the tokens of an answer, judge with them, and keep them to train on.

        Goes on where it was cancelled; ends where the target's hidden states are not known any more.
        """
        head = self.head
        while head is not None and not cancel.is_set() and self._read_some(head, log, cancel):
            pass
        if self.learned is None or head is None:
            return
        before, self.learned = self.learned, self.learned.decide()
        head.correction = self.learned.active
        if self.learned.num_swaps != before.num_swaps:
            self.write()

    def train(self, cancel: Flag) -> None:
        """Train a candidate where none is on trial and enough rows are new, unless that is cancelled."""
        learned, head = self.learned, self.head
        if learned is None or head is None or learned.candidate or learned.num_new < _FEWEST_NEW:
            return
        steps = train_correction(learned.rows, head.num_columns, self._rule)
        while not cancel.is_set():
            try:
                next(steps)
            except StopIteration as end:
                self.learned = learned.try_out(end.value)
                self.write()
                return

    def _read_some(self, head: CorrectableHead, log: AnswerLog, cancel: Flag) -> bool:
        """Read rows in one pass of the head; whether there were any."""
        first, stop = max(1, log.first + log.num_read), log.first + len(log.rows)
        stop = min(stop, first + max(1, min(_MOST_ROWS, _MOST_LOGITS // head.num_columns)))
        if first >= stop:
            return False
        try:
            found = head.known_rows(log.text[:stop], stop - first)
        except Exception:
            if cancel.is_set():  # which is why the pass failed
                return False
            raise
        if found is None:
            return False
        target = log.rows[first - log.first : stop - log.first]
        rows = verify_rows(found, target, log.text[: stop + 1], head.columns)
        learned = self.learned or LearnedHead()
        self.learned = learned.judge(found, rows.contexts, rows.wanted).with_rows(rows)
        self._num_unwritten += len(rows)
        log.num_read = stop - log.first
        return True

    def write(self) -> None:
        """Write what was learned, if anything was; raises OSError."""
        if self.learned is None or not self._num_unwritten:
            return
        self._num_unwritten = 0
        self._file.write(self.learned)
