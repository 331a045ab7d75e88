"""Has a drafting head learn while no answer is made, in a thread that ends what it does when one begins."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from threading import Condition, RLock, Thread
from weakref import ReferenceType, ref

from edgespec.decoding.decoder import CorrectableHead
from edgespec.draft.learned_head import LearnedHead
from edgespec.draft.quarantine import describe_error
from edgespec.draft.verified_rows import AnswerLog, train_correction, verify_rows
from edgespec.setup.learned_file import LearnedFile
from edgespec.setup.open_model import ModelFolder
from edgespec.setup.resolve import Chain
from edgespec.system.cancel import Flag
from edgespec.system.command_line import quote
from edgespec.system.context_managers import contextmanager
from edgespec.system.threads import end_at_exit, has_ended, lower_priority
from edgespec.types import Report

_KINDS = ("recurrent", "steps")  # of heads that can learn
_END_S = 2.0
_MOST_ROWS = 48  # in one pass of the head
_MOST_LOGITS = 1 << 20  # likewise
_FEWEST_NEW = 256  # rows between two trainings


class HeadLearner:
    """The lessons of one head in one domain, and their file. Knows no threads.

    learned: So far; None before the first answer.
    folder: That of the head.
    """

    def __init__(self, file: LearnedFile, report: Report = lambda line: None) -> None:
        """Read what was learned earlier; a file that cannot be used is reported."""
        self._file, self.folder = file, file.head
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
        steps = train_correction(learned.rows, head.num_columns)
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


class IdleLearner:
    """Gives a learner the answers that were made, one at a time, in a thread of its own.

    An error of the learner ends learning and is reported with the next answer; no answer fails because of it.
    """

    def __init__(self, learner: HeadLearner, lock: ExitStack | None, report: Report = lambda line: None) -> None:
        """lock: Of the learner's file, freed when learning ends; None where nothing is to be learned."""
        self.learner = learner
        self._lock_of_file = lock or ExitStack()
        self._report = report
        # Entered itself, and not by its condition, in whose code Ctrl-C could strike with the lock taken.
        self._lock = RLock()
        self._changed = Condition(self._lock)
        self._worker: Thread | None = None
        self._log: AnswerLog | None = None  # of the last answer, until it is read
        self._num_answers = 0  # that are being made
        self._cancel = Flag()  # of what the thread does
        self._is_working, self._is_closed = False, lock is None
        self._problem: str | None = None  # that ended learning

    @contextmanager
    def answering(self) -> Iterator[AnswerLog]:
        """Learn nothing while the block makes an answer, and from its log afterwards."""
        with self._lock:
            self._num_answers += 1
            self._log = None  # the hidden states that it needs give way to those of this answer
            self._stop()
        log = AnswerLog()
        try:
            yield log
        finally:
            with self._lock:
                self._num_answers -= 1
                if not self._num_answers and log.rows and not self._is_closed:
                    self._log = log
                    self._start()

    def wait(self) -> None:
        """Wait until the thread has nothing to do."""
        with self._lock:
            self._changed.wait_for(lambda: self._log is None and not self._is_working)

    def report_problem(self) -> None:
        """Report what ended learning, if something did and it was not reported."""
        with self._lock:
            problem, self._problem = self._problem, None
        if problem is not None:
            self._report(problem)

    def close(self) -> None:
        """End the thread, read the rows of the last answer, and write what was learned."""
        has_ended(self.close)
        self.report_problem()
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._stop()
            self._changed.notify_all()
            worker, log = self._worker, self._log
        if worker is not None:
            worker.join(_END_S)
        if worker is not None and worker.is_alive():
            return  # it may still write; the lock ends with it
        try:
            if worker is not None:
                if log is not None:
                    self.learner.read(log, Flag())
                self.learner.write()
        except Exception as error:
            self._report(_describe(error))
        finally:
            self._lock_of_file.close()

    def _stop(self) -> None:
        self._cancel.set()
        if self._is_working:
            self.learner.interrupt()

    def _start(self) -> None:
        if self._worker is None:
            # A daemon, so that a program that forgets to close its engine can end.
            self._worker = Thread(target=self._work, name="edgespec learning", daemon=True)
            self._worker.start()
            end_at_exit(self.close)
        self._changed.notify_all()

    def _work(self) -> None:
        lower_priority()
        while True:
            with self._lock:
                self._is_working = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._log is not None or self._is_closed)
                log, cancel = self._log, Flag()
                if log is None or self._is_closed:
                    return
                self._cancel, self._is_working = cancel, True
            try:
                self.learner.read(log, cancel)
                with self._lock:
                    if self._log is log and not cancel.is_set():
                        self._log = None
                self.learner.train(cancel)
            except Exception as error:
                with self._lock:
                    self._problem, self._log = _describe(error), None
                    self._is_closed, self._is_working = True, False
                    self._changed.notify_all()
                self._lock_of_file.close()
                return


def make_learner(
    domain: str, models: Sequence[ModelFolder], unused: Chain | None, report: Report
) -> IdleLearner | None:
    """The learner of the first head that can learn; None where no such head drafts, which is reported.

    Args:
        models: Those that draft for the target, the first of each cascade.
        unused: The drafter of a pair that does not draft here.
    """
    for folder, manifest in models:
        if manifest.head is not None and manifest.head.kind in _KINDS:
            file = LearnedFile(folder, domain)
            return IdleLearner(HeadLearner(file, report), _lock(file, report), report)
    if blocks := [model.manifest.name for model in models if model.manifest.head is not None]:
        why = f"{blocks[0]} drafts in blocks"
    elif unused is not None and unused.models[0].manifest.head is not None:
        folder = unused.models[0].folder.parent
        why = f"{unused.name} does not draft here; --drafter {quote(folder)} lets it draft all the same"
    else:
        why = "no drafting head drafts here; edgespec train makes one"
    report(f"nothing is learned for {domain}: {why}")
    return None


def _lock(file: LearnedFile, report: Report) -> ExitStack | None:
    """The lock of a file; None where it cannot be had, which is reported."""
    try:
        return file.lock()
    except TimeoutError as error:
        why = f"its file is {error}, which learns for it"
    except OSError as error:
        why = f"{file.head} cannot be written to ({error.strerror or error})"
    report(f"nothing is learned for {file.domain} here: {why}; the head drafts with what is stored")
    return None


def _describe(error: Exception) -> str:
    return f"nothing more is learned in this session: {describe_error(error)}"
