"""A conversation that a thread of its own answers, for programs whose main thread draws a window.

What happens comes out of a queue, so that the window alone touches its widgets. Knows nothing of windows.
"""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Literal, NamedTuple

from edgespec import AnswerStream, EdgeSpecError, Engine, Message, Stats

MAX_TOKENS = 800


class Event(NamedTuple):
    """What happened.

    stage: text is a line about the model that is being loaded. ready: text is its name.
    text: a piece of the answer. done: the answer ended, with its stats; text is why.
    failed: text is what went wrong; an answer is over then.
    """

    kind: Literal["stage", "ready", "text", "done", "failed"]
    text: str
    stats: Stats | None = None


class _Closed(Exception):
    pass


class BackgroundChat:
    """One question at a time: ask() again after "done" or "failed"."""

    def __init__(self, load_engine: Callable[[Callable[[str], None]], Engine]) -> None:
        """load_engine is given where to report to, and runs in the thread."""
        self.events: SimpleQueue[Event] = SimpleQueue()
        self._load_engine = load_engine
        self._questions: SimpleQueue[str | None] = SimpleQueue()  # None: no more
        self._lock = Lock()  # holds the three below together
        self._answer: AnswerStream | None = None
        self._is_stopped = False
        self._is_closed = False
        self._thread = Thread(target=self._run, name="background chat")
        self._thread.start()

    def ask(self, question: str) -> None:
        with self._lock:
            self._is_stopped = False
        self._questions.put(question)

    def stop(self) -> None:
        """End the answer at once; what there is of it stays in the conversation."""
        with self._lock:
            self._is_stopped = True
            if self._answer is not None:
                self._answer.cancel()

    def close(self) -> None:
        """End the answer, or the loading at its next stage, and wait for the thread."""
        self._is_closed = True
        self._questions.put(None)
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._load_engine(self._stage) as engine:
                self._tell("ready", engine.manifest.name)
                messages: list[Message] = []
                while (question := self._questions.get()) is not None and not self._is_closed:
                    messages = self._reply(engine, [*messages, Message("user", question)])
        except _Closed:
            pass
        except (EdgeSpecError, OSError) as error:
            self._tell("failed", str(error))

    def _stage(self, line: str) -> None:
        if self._is_closed:
            raise _Closed
        self._tell("stage", line)

    def _reply(self, engine: Engine, asked: list[Message]) -> list[Message]:
        """Answer, and give the conversation with the answer; without the question too where there is none."""
        said = []
        try:
            with engine.stream(asked, max_tokens=MAX_TOKENS) as chunks:
                self._running(chunks)
                for chunk in chunks:
                    said.append(chunk.text)
                    self._tell("text", chunk.text)
            self._tell("done", chunk.finish_reason or "", chunk.stats)
        except EdgeSpecError as error:
            self._tell("failed", str(error))
        finally:
            self._running(None)
        text = "".join(said)
        return [*asked, Message("assistant", text)] if text else asked[:-1]

    def _running(self, answer: AnswerStream | None) -> None:
        with self._lock:
            self._answer = answer
            if answer is not None and self._is_stopped:
                answer.cancel()

    def _tell(
        self, kind: Literal["stage", "ready", "text", "done", "failed"], text: str, stats: Stats | None = None
    ) -> None:
        self.events.put(Event(kind, text, stats))
